"""The train step and the evaluation step: pure functions of state and batch.

One function serves one device, a sharded mesh and `jax.pmap`. Under `jax.jit` a batch is the global
batch and `axis_name` is None. Under `jax.pmap` a batch is one device's share, and every sum that
leaves it is added over `axis_name`.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt32

from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective
from electra_jax.objectives.base import Batch, Sums, is_real
from electra_jax.training.optimizer import (
    OptimizerConfig,
    learning_rate,
    make_optimizer,
    only_trained,
)

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
    return TrainState(jnp.int32(0), params, make_optimizer(optimizer).init(params))


def stream(key: PRNGKey, name: str) -> PRNGKey:
    """A key of its own for each use of randomness."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def begin_stage(objective: Objective, state: TrainState) -> TrainState:
    """`state`, as training goes on from it.

    That is another one only where the second of two stages begins: with the parameters that the
    objective makes of those of the first, and without moments.
    """
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
    num_microbatches: int = 1,
    axis_name: str | None = None,
) -> tuple[TrainState, Sums]:
    """Mask, generate, sample, discriminate, differentiate and update.

    Args:
      batch: `input_ids`, `piece_ids`, `position_ids`, `token_type_ids`, each int32 [B, L], and
        `row`, int32 [B], the index of each row in the global batch.
      num_microbatches: gradients are accumulated over this many parts of the batch. The result is
        that of the whole batch.

    Returns:
      The next state, and `[sum, weight]` pairs by metric name, `learning_rate` and `grad_norm`
      (before clipping) among them, and `loss` where the weights of its terms change. Where one of
      these is not finite, parameters and optimiser are those of `state`: the update is skipped.
    """
    state = begin_stage(objective, state)
    weights = objective.loss_weights(state.step)
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    masked = objective.mask(batch, stream(key, "mask"))
    totals = add_over_devices(objective.totals(batch, masked), axis_name)
    dropout_key = stream(key, "dropout")
    if axis_name:
        dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(axis_name))

    def loss_of(sums: Sums) -> Float[Array, ""]:
        return sum(
            weight * sums[term][0] / jnp.maximum(totals[term], 1.0)
            for term, weight in weights.items()
        )

    def loss_and_sums(params, part) -> tuple[Float[Array, ""], Sums]:
        part_batch, part_masked, part_key = part
        sums = objective.sums(
            params,
            part_batch,
            part_masked,
            stream(key, "sample"),
            part_key,
            evaluation=False,
            step=state.step,
        )
        return loss_of(sums), sums

    grads_and_sums = jax.grad(loss_and_sums, has_aux=True)

    def add_part(carry, part):
        return jax.tree.map(jnp.add, carry, grads_and_sums(state.params, part)), None

    if num_microbatches == 1:
        grads, sums = grads_and_sums(state.params, (batch, masked, dropout_key))
    else:
        parts = jax.tree.map(lambda x: split_rows(x, num_microbatches), (batch, masked))
        parts = (*parts, jax.random.split(dropout_key, num_microbatches))
        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(grads_and_sums, state.params, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, sums), _ = jax.lax.scan(add_part, zeros, parts)
    grads, sums = add_over_devices((grads, sums), axis_name)

    is_trained = functools.partial(objective.is_trained, step=state.step)
    grads = only_trained(grads, is_trained)
    updates, opt_state = make_optimizer(optimizer).update(grads, state.opt_state, state.params)
    updates = only_trained(updates, is_trained)
    rate = learning_rate(optimizer, state.step, objective.switch_step)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    one = jnp.float32(1)
    sums |= {
        "learning_rate": jnp.stack([rate, one]),
        "grad_norm": jnp.stack([optax.tree.norm(grads), one]),
        "tokens": jnp.stack(
            [add_over_devices(is_real(batch).sum(dtype=jnp.float32), axis_name), one]
        ),
    }
    if any(isinstance(weight, jax.Array) for weight in weights.values()):
        sums["loss"] = jnp.stack([loss_of(sums), one])  # the host does not know the weights
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
    axis_name: str | None = None,
) -> Sums:
    """Metrics of a held-out batch. Dropout is off; masks depend on seed and row alone."""
    key = stream(jax.random.key(seed), "evaluation")
    masked = objective.mask(batch, stream(key, "mask"))
    sums = objective.sums(params, batch, masked, stream(key, "sample"), None, evaluation=True)
    return add_over_devices(sums, axis_name)


def add_over_devices(tree, axis_name: str | None):
    """Sum over the devices of `jax.pmap`; under `jax.jit` sums are global already."""
    return jax.lax.psum(tree, axis_name) if axis_name else tree


def split_rows(x: Array, parts: int) -> Array:
    """[B, ...] to [parts, B / parts, ...], part i taking rows i, i + parts, ...

    Neighbouring rows go to different parts, so each part stays spread over all devices.
    """
    return jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)
