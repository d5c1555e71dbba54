"""ELECTRA's optimiser: Adam without bias correction, decoupled decay, two-part schedule (spec 4).

The step counter lives in the train state alone: the learning rate is a function of it, and no
counter hides in the optimiser's state.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from electra_jax.modeling.params import Params, path_name

# Spec 4.1: biases and LayerNorm are not decayed; kernels and all embedding tables are.
NOT_DECAYED = re.compile(r"(^|/)(bias|scale)$")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Attributes:
    learning_rate: before warm-up and decay are applied.
    num_steps: where the linear decay reaches zero.
    max_grad_norm: gradients are scaled down to this global norm; 0 leaves them alone.
    layerwise_decay: the rate of each layer is that of the one above times this; the head has 1.
    layerwise_mode: `fixed`, or `faithful` to the original, which skips a level under the head.
    """

    learning_rate: float
    warmup_steps: int
    num_steps: int
    decay_power: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    layerwise_decay: float = 1.0
    layerwise_mode: str = "fixed"


def learning_rate(
    config: OptimizerConfig, step: Int[Array, ""], switch_step: int = 0
) -> Float[Array, ""]:
    """Warm-up times decay, both active from step 0, so the very first update has rate 0.

    Args:
      switch_step: where the second of two stages begins, and both of them anew; 0: there is one.
    """
    num_steps = config.num_steps
    if switch_step:
        is_second = step >= switch_step
        num_steps = jnp.where(is_second, num_steps - switch_step, switch_step)
        step = jnp.where(is_second, step - switch_step, step)
    remaining = 1 - jnp.minimum(step, num_steps) / num_steps
    warmup = jnp.minimum(1.0, step / max(1, config.warmup_steps)) if config.warmup_steps else 1.0
    return config.learning_rate * remaining**config.decay_power * warmup


def is_decayed(params: Params) -> Params:
    """A tree of bools: which parameters shrink."""
    return jax.tree.map_with_path(lambda path, _: not NOT_DECAYED.search(path_name(path)), params)


def only_trained(tree: Params, is_trained: Callable[[str], bool | Bool[Array, ""]]) -> Params:
    """`tree`, gradients or updates, with zeros for the parameters that are frozen.

    What has had no gradient has no moments; what gets no update does not decay.

    Args:
      is_trained: of a parameter's path; an array where that depends on the step.
    """

    def keep(path: tuple, x: Array) -> Array:
        yes = is_trained(path_name(path))
        return x if yes is True else jnp.where(yes, x, jnp.zeros_like(x))

    return jax.tree.map_with_path(keep, tree)


def scale_by_biased_adam(b1: float, b2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam's direction without bias correction, epsilon outside the root (spec 4.1).

    Early updates are larger than with correction, up to 6.6 times; warm-up hides it.
    """

    def init(params: Params) -> dict[str, Params]:
        return {
            "mu": jax.tree.map(jnp.zeros_like, params),
            "nu": jax.tree.map(jnp.zeros_like, params),
        }

    def update(grads, state, params=None):
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["nu"], grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu)
        return updates, {"mu": mu, "nu": nu}

    return optax.GradientTransformation(init, update)


def layer_factors(
    decay: float, mode: str, num_layers: int, path: str
) -> float | Float[np.ndarray, "N"]:
    """What multiplies the rate of a parameter of a fine-tuned network (spec 4.3).

    The head has 1; from the top layer to the embeddings each has `decay` times what the one above
    has. In `faithful` mode the original's gap of one level is between the head and the top layer.

    Returns:
      One factor, or for stacked layers one for each, the lowest layer first.

    Raises:
      KeyError: the parameter is in none of these.
    """
    top = num_layers + (2 if mode == "faithful" else 1)
    if path.startswith("head/"):
        return 1.0
    if path.startswith("encoder/layers/"):
        return decay ** (top - 1.0 - np.arange(num_layers, dtype=np.float32))
    if path.startswith(("embeddings/", "encoder/projection/")):
        return decay**top
    raise KeyError(f"{path} belongs to no layer")


def scale_by_layer(decay: float, mode: str) -> optax.GradientTransformation:
    """Multiplies updates by `layer_factors`; decay of the weights among them."""

    def scale(updates: Params, params: Params | None) -> Params:
        num_layers = len(updates["encoder"]["layers"]["up"]["bias"])

        def scaled(path: tuple, x: Array) -> Array:
            factors = np.asarray(layer_factors(decay, mode, num_layers, path_name(path)))
            return x * factors.reshape(*factors.shape, *(1,) * (x.ndim - factors.ndim))

        return jax.tree.map_with_path(scaled, updates)

    return optax.stateless(scale)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Everything but the learning rate: clip, Adam, decay, factors of layers."""
    by_layer = config.layerwise_decay != 1
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm)
        if config.max_grad_norm
        else optax.identity(),
        scale_by_biased_adam(config.b1, config.b2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=is_decayed),
        *([scale_by_layer(config.layerwise_decay, config.layerwise_mode)] if by_layer else []),
    )
