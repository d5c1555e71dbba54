"""Every device computes the sums of its own rows, and what it has is added to what others have.

`axes` names axes of the mesh, or the one axis of `jax.pmap`. None: the code sees all rows, because
it runs on one device or is left to the compiler to divide.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params
from electra_jax.objectives.base import Inputs, Sums
from electra_jax.sharding.mesh import BATCH, ROWS, P

SumsOf = Callable[[Params, Inputs], Sums]
Axes = tuple[str, ...]


def add_over(tree: PyTree, axes: Axes) -> PyTree:
    """The sum of `tree` over the devices along `axes`."""
    return jax.lax.psum(tree, axes) if axes else tree


def own_key(key: PRNGKey | None, axes: Axes) -> PRNGKey | None:
    """A key that is another one on each device along `axes`."""
    if key is None or not axes:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(axes))


def gathered(sums: SumsOf, dtype: DTypeLike, stored: Params, scattered: Params) -> SumsOf:
    """`sums` as a function of parameters that are split over the devices, and of all rows.

    The devices along `data` and `fsdp` meet three times, all in the compute dtype: parameters are
    gathered before use, all at once; their gradients are added up and scattered after it; and the
    sums are added up. Left to itself, XLA splits the activations as it finds the parameters split,
    and exchanges them in every layer. Every device's rows draw a dropout of their own.

    Args:
      stored, scattered: a `NamedSharding` for each parameter, and for its gradient.
    """
    mesh = jax.tree.leaves(stored)[0].mesh
    stored_specs, scattered_specs = (
        jax.tree.map(lambda x: P(*(axis if axis in ROWS else None for axis in x.spec)), tree)
        for tree in (stored, scattered)
    )

    def sums_of_own_rows(parts: Params, params: Params, inputs: Inputs) -> Sums:
        whole = functools.partial(gather, dtype)
        params = jax.tree.map(whole, parts, params, scattered_specs, stored_specs)
        inputs = dataclasses.replace(inputs, dropout_key=own_key(inputs.dropout_key, ROWS))
        return add_over(sums(params, inputs), ROWS)

    def sums_of_all_rows(params: Params, inputs: Inputs) -> Sums:
        specs = Inputs(BATCH, BATCH, P(), P(), P(), inputs.is_evaluation)
        return jax.shard_map(
            sums_of_own_rows,
            mesh=mesh,
            in_specs=(scattered_specs, stored_specs, specs),
            out_specs=P(),
            axis_names={*ROWS},
        )(params, jax.lax.stop_gradient(params), inputs)

    return sums_of_all_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def gather(
    dtype: DTypeLike, part: Array, x: Array, part_spec: PartitionSpec, spec: PartitionSpec
) -> Array:
    """`x`, which is split by `spec`, as a whole and in `dtype`.

    `part` is the same parameter in the layout of the gradients, `part_spec`: it receives the
    gradient of the whole, added up over all devices.
    """
    x = jax.lax.pcast(x.astype(dtype), tuple(a for a in ROWS if a not in spec), to="varying")
    for axis in set(spec) - {None}:
        x = jax.lax.all_gather(x, axis, axis=tuple(spec).index(axis), tiled=True)
    return x


def _gather_forward(*arguments):
    return gather(*arguments), None


def _gather_backward(
    dtype: DTypeLike, part_spec: PartitionSpec, spec: PartitionSpec, _: None, gradient: Array
) -> tuple[Array, None]:
    for axis in reversed(ROWS):  # what is added over `data` is then a part already
        if axis in part_spec:
            place = tuple(part_spec).index(axis)
            gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=place, tiled=True)
        else:
            gradient = jax.lax.psum(gradient, axis)
    return gradient.astype("float32"), None


gather.defvjp(_gather_forward, _gather_backward)
