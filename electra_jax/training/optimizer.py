"""ELECTRA's optimizer: Adam without bias correction, decoupled decay, two-part schedule (spec 4).

The step counter lives in the train state alone: the learning rate is a function of it, and no
counter hides in the optimizer's state.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from electra_jax.modeling.params import ParamInfo, Params, path_name


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Rate, schedule and update rule."""

    learning_rate: float  # before warm-up and decay are applied
    warmup_steps: int
    num_steps: int  # where the decay reaches zero
    decay_power: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm; 0: they are not
    layerwise_decay: float = 1.0  # a layer's rate is this times that of the one above; the head's 1
    layerwise_mode: str = "fixed"  # `faithful`: as the original, which skips a level under the head


def learning_rate(
    config: OptimizerConfig, step: Int[Array, ""], switch_step: int = 0
) -> Float[Array, ""]:
    """Warm-up times decay, both active from step 0, so the very first update has rate 0.

    Both begin anew at `switch_step`, where that is not 0.
    """
    num_steps = config.num_steps
    if switch_step:
        is_second = step >= switch_step
        num_steps = jnp.where(is_second, num_steps - switch_step, switch_step)
        step = jnp.where(is_second, step - switch_step, step)
    remaining = 1 - jnp.minimum(step, num_steps) / num_steps
    warmup = jnp.minimum(1.0, step / max(1, config.warmup_steps)) if config.warmup_steps else 1.0
    return config.learning_rate * remaining**config.decay_power * warmup


def only_trained(tree: Params, is_trained: Callable[[str], bool | Bool[Array, ""]]) -> Params:
    """`tree`, gradients or updates, with zeros for the parameters that are frozen.

    Zeros for gradients keep the moments at zero; zeros for updates switch the decay off, too.
    """

    def keep(path: tuple, x: Array) -> Array:
        yes = is_trained(path_name(path))
        return x if yes is True else jnp.where(yes, x, jnp.zeros_like(x))

    return jax.tree.map_with_path(keep, tree)


class AdamState(NamedTuple):
    """Running means of each parameter's gradients and of their squares."""

    mu: Params
    nu: Params


def scale_by_biased_adam(b1: float, b2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam's direction without bias correction, epsilon outside the root (spec 4.1).

    Early updates are larger than with correction, up to 6.6 times; warm-up hides it.
    """

    def init(params: Params) -> AdamState:
        return AdamState(*(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def update(grads: Params, state: AdamState, params: Params | None = None):
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mu, nu)
        return updates, AdamState(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_depth(decay: float, mode: str, infos: Params) -> optax.GradientTransformation:
    """Multiplies updates, decay of the weights among them, by their depth (spec 4.3).

    The head has 1; from the top layer to the embeddings each has `decay` times what the one above
    has. In `faithful` mode the original's gap of one level is between the head and the top layer.
    """

    def scale(updates: Params, params: Params | None) -> Params:
        pairs = zip(jax.tree.leaves(infos), jax.tree.leaves(updates), strict=True)
        num_layers = next(len(x) for info, x in pairs if info.depth == "layers")
        top = num_layers + (2 if mode == "faithful" else 1)
        by_layer = decay ** (top - 1.0 - np.arange(num_layers, dtype=np.float32))
        factors = {"output": 1.0, "layers": by_layer, "input": decay**top}

        def scaled(info: ParamInfo, x: Array) -> Array:
            factor = np.asarray(factors[info.depth])
            return x * factor.reshape(*factor.shape, *(1,) * (x.ndim - factor.ndim))

        return jax.tree.map(scaled, infos, updates)

    return optax.stateless(scale)


def make_optimizer(config: OptimizerConfig, infos: Params) -> optax.GradientTransformation:
    """Everything but the learning rate: clip, Adam, decay, factors of layers."""
    by_depth = config.layerwise_decay != 1
    limit = config.max_grad_norm
    decays = jax.tree.map(lambda info: info.decays, infos)
    return optax.chain(
        optax.clip_by_global_norm(limit) if limit else optax.identity(),
        scale_by_biased_adam(config.b1, config.b2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        *([scale_by_depth(config.layerwise_decay, config.layerwise_mode, infos)] * by_depth),
    )
