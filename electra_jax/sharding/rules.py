"""Which axis of a parameter is split over which axis of the mesh."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from electra_jax.modeling.params import ParamInfo, Params
from electra_jax.sharding.mesh import P

RULES = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor"}  # axes with other names stay whole


def partition_spec(
    info: ParamInfo, shape: tuple[int, ...], mesh: Mesh, over_data: bool = False
) -> PartitionSpec:
    """How a parameter, or what has its shape, is split. Axes that do not divide stay whole.

    `over_data` also splits the largest axis that is still whole over `data`.
    """
    axes = [RULES.get(name) for name in info.axes]
    axes = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    if over_data:
        whole = [
            i
            for i, axis in enumerate(axes)
            if (axis is None or mesh.shape[axis] == 1) and shape[i] % mesh.shape["data"] == 0
        ]
        if whole:
            axes[max(whole, key=shape.__getitem__)] = "data"
    return P(*axes)


def shardings(infos: Params, shapes: Params, mesh: Mesh, over_data: bool = False) -> Params:
    """A `NamedSharding` for every parameter; the arguments are those of `partition_spec`."""

    def sharding(info: ParamInfo, x: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(info, x.shape, mesh, over_data))

    return jax.tree.map(sharding, infos, shapes)
