"""The explicit collectives: every device computes the sums of its own rows."""

import functools

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective
from electra_jax.sharding.mesh import BATCH, ROWS, P


def on_own_rows(objective: Objective, stored: Params, scattered: Params) -> Objective:
    """`objective`, with sums that every device takes over its own rows.

    The devices along `data` and `fsdp` meet three times, all in the compute dtype: parameters are
    gathered before use, all at once; their gradients are added up and scattered after it; and the
    sums are added up. Left to itself, XLA splits the activations as it finds the parameters split,
    and exchanges them in every layer. Every device's rows draw a dropout of their own.

    Args:
      stored: a `NamedSharding` for each parameter.
      scattered: likewise, for its gradient.
    """
    dtype = objective.dtype
    mesh = jax.tree.leaves(stored)[0].mesh
    stored_specs, scattered_specs = (
        jax.tree.map(lambda x: P(*(axis if axis in ROWS else None for axis in x.spec)), tree)
        for tree in (stored, scattered)
    )

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def gather(part: Array, x: Array, part_spec: PartitionSpec, spec: PartitionSpec) -> Array:
        """The whole of `x`. The gradient of `part`, the same in another layout, is that of `x`."""
        x = jax.lax.pcast(x.astype(dtype), tuple(a for a in ROWS if a not in spec), to="varying")
        for axis in set(spec) - {None}:
            x = jax.lax.all_gather(x, axis, axis=tuple(spec).index(axis), tiled=True)
        return x

    def scatter(part_spec: PartitionSpec, spec: PartitionSpec, _: None, gradient: Array):
        for axis in reversed(ROWS):  # what is added over `data` is then a part already
            if axis in part_spec:
                place = tuple(part_spec).index(axis)
                gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=place, tiled=True)
            else:
                gradient = jax.lax.psum(gradient, axis)
        return gradient.astype("float32"), None

    gather.defvjp(lambda *arguments: (gather(*arguments), None), scatter)

    class OnOwnRows(type(objective)):
        def sums(self, params, batch, masked, key, dropout_key, evaluation, step=None):
            def sums_of_own_rows(parts, params, batch, masked, key, dropout_key, step):
                params = jax.tree.map(gather, parts, params, scattered_specs, stored_specs)
                if dropout_key is not None:
                    dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(ROWS))
                sums = objective.sums(params, batch, masked, key, dropout_key, evaluation, step)
                return jax.lax.psum(sums, ROWS)

            return jax.shard_map(
                sums_of_own_rows,
                mesh=mesh,
                in_specs=(scattered_specs, stored_specs, BATCH, BATCH, P(), P(), P()),
                out_specs=P(),
                axis_names={*ROWS},
            )(params, jax.lax.stop_gradient(params), batch, masked, key, dropout_key, step)

    return OnOwnRows(**vars(objective))
