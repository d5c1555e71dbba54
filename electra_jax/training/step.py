"""The train step and the evaluation step: pure functions of state and batch.

One function serves one device, a sharded mesh and `jax.pmap`. Under `jax.jit` a batch is the global
batch, and `axes` is empty. Under `jax.pmap` a batch is one device's share, and every sum that
leaves it is added over `axes`.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, UInt32

from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective
from electra_jax.objectives.base import Batch, Inputs, Sums, is_real
from electra_jax.sharding.rows import Axes, SumsOf, add_over, own_key
from electra_jax.training import optimizer as optimizers
from electra_jax.training.optimizer import OptimizerConfig

Seed = int | UInt32[Array, ""]  # the latter in what is compiled, for it to serve every seed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint holds. `step` is the only random state there is."""

    step: Int[Array, ""]  # updates done so far
    params: Params
    opt_state: optax.OptState


def init_state(objective: Objective, optimizer: OptimizerConfig, seed: Seed) -> TrainState:
    """Step 0 with fresh parameters."""
    params = objective.init(stream(jax.random.key(seed), "init"))
    transformation = optimizers.make_optimizer(optimizer, objective.param_infos())
    return TrainState(jnp.int32(0), params, transformation.init(params))


def stream(key: PRNGKey, name: str) -> PRNGKey:
    """A key of its own for each use of randomness."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def begin_stage(objective: Objective, state: TrainState) -> TrainState:
    """`state`, or where the second of two stages begins, what that begins with: no moments."""
    if not objective.switch_step:
        return state
    begins = state.step == objective.switch_step
    choose = lambda new, old: jnp.where(begins, new, old)  # noqa: E731
    return TrainState(
        state.step,
        jax.tree.map(choose, objective.second_stage(state.params), state.params),
        jax.tree.map(lambda x: choose(jnp.zeros_like(x), x), state.opt_state),
    )


def train_step(
    state: TrainState,
    batch: Batch,
    seed: Seed,
    *,
    objective: Objective,
    optimizer: OptimizerConfig,
    sums_of: SumsOf | None = None,
    num_microbatches: int = 1,
    axes: Axes = (),
) -> tuple[TrainState, Sums]:
    """Mask, generate, sample, discriminate, differentiate and update.

    Args:
      batch: `input_ids`, `segment_ids`, `position_ids`, `token_type_ids`, each int32 [B, L], and
        `row`, int32 [B], the index of each row in the global batch.
      sums_of: computes the sums, by default `objective.sums`.
      num_microbatches: parts of the batch that gradients are accumulated over, to the same result.
      axes: of devices with a batch each.

    Returns:
      The next state, and `[sum, weight]` pairs by metric name, `learning_rate` and `grad_norm`
      (before clipping) among them, and `loss` where the weights of its terms change. Where one of
      these is not finite, parameters and optimizer are those of `state`: the update is skipped.
    """
    state = begin_stage(objective, state)
    weights = objective.loss_weights(state.step)
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    inputs = dataclasses.replace(
        draw(objective, batch, key),
        dropout_key=own_key(stream(key, "dropout"), axes),
        step=state.step,
    )
    denominators = add_over(objective.denominators(batch, inputs.masked), axes)

    def loss_of(sums: Sums) -> Float[Array, ""]:
        return sum(
            weight * sums[term][0] / jnp.maximum(denominators[term], 1.0)
            for term, weight in weights.items()
        )

    def loss_and_sums(params: Params, part: Inputs) -> tuple[Float[Array, ""], Sums]:
        sums = (sums_of or objective.sums)(params, part)
        return loss_of(sums), sums

    grads_and_sums = functools.partial(jax.grad(loss_and_sums, has_aux=True), state.params)
    grads, sums = add_over(over_parts(grads_and_sums, inputs, num_microbatches), axes)

    is_trained = functools.partial(objective.is_trained, step=state.step)
    grads = optimizers.only_trained(grads, is_trained)
    transformation = optimizers.make_optimizer(optimizer, objective.param_infos())
    updates, opt_state = transformation.update(grads, state.opt_state, state.params)
    updates = optimizers.only_trained(updates, is_trained)
    rate = optimizers.learning_rate(optimizer, state.step, objective.switch_step)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)

    alone = {
        "learning_rate": rate,
        "grad_norm": optax.tree.norm(grads),
        "tokens": add_over(is_real(batch).sum(dtype=jnp.float32), axes),
    }
    if any(isinstance(weight, jax.Array) for weight in weights.values()):
        alone["loss"] = loss_of(sums)  # the host does not know the weights
    sums |= {name: jnp.stack([value, jnp.float32(1)]) for name, value in alone.items()}
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in sums.values()]).all()
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    return TrainState(state.step + 1, params, opt_state), sums


def eval_step(
    params: Params,
    batch: Batch,
    seed: Seed,
    *,
    objective: Objective,
    sums_of: SumsOf | None = None,
    axes: Axes = (),
) -> Sums:
    """Metrics of a held-out batch; `sums_of` and `axes` are those of `train_step`."""
    inputs = evaluation_inputs(objective, batch, seed)
    return add_over((sums_of or objective.sums)(params, inputs), axes)


def evaluation_inputs(objective: Objective, batch: Batch, seed: Seed) -> Inputs:
    """What an evaluation draws for `batch`: it depends on the seed and the rows alone."""
    inputs = draw(objective, batch, stream(jax.random.key(seed), "evaluation"))
    return dataclasses.replace(inputs, is_evaluation=True)


def draw(objective: Objective, batch: Batch, key: PRNGKey) -> Inputs:
    """`batch` with its masks; dropout is off."""
    return Inputs(batch, objective.mask(batch, stream(key, "mask")), stream(key, "sample"))


def over_parts(function: Callable[[Inputs], PyTree], inputs: Inputs, num_parts: int) -> PyTree:
    """The sum of what `function` returns for each of `num_parts` parts of the rows."""
    if num_parts == 1:
        return function(inputs)

    def add_part(total: PyTree, part: tuple) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, of_part(part)), None

    def of_part(part: tuple) -> PyTree:
        batch, masked, dropout_key = part
        changed = dataclasses.replace(inputs, batch=batch, masked=masked, dropout_key=dropout_key)
        return function(changed)

    rows = jax.tree.map(lambda x: split_rows(x, num_parts), (inputs.batch, inputs.masked))
    parts = (*rows, jax.random.split(inputs.dropout_key, num_parts))
    shapes = jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add_part, zeros, parts)[0]


def split_rows(x: Array, parts: int) -> Array:
    """[B, ...] to [parts, B / parts, ...], part i taking rows i, i + parts, ...

    Neighboring rows go to different parts, so each part stays spread over all devices.
    """
    return jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)
