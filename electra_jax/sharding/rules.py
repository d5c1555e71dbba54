"""Which axis of a parameter is split over which axis of the mesh."""

import itertools
import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from electra_jax.modeling.params import path_name
from electra_jax.sharding.mesh import P

# Path (of a parameter, or of its moments in the optimiser's state) to the split of its axes. Every
# path matches exactly one. Axes that a mesh axis does not divide stay whole.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embeddings/(word|position|token_type)$", P(None, "fsdp")),
    (r"layers/attention/qkv/kernel$", P(None, "fsdp", None, "tensor", None)),  # [N, H, 3, A, D]
    (r"layers/attention/qkv/bias$", P(None, None, "tensor", None)),  # [N, 3, A, D]
    (r"layers/attention/out/kernel$", P(None, "tensor", None, "fsdp")),  # [N, A, D, H]
    (r"layers/up/kernel$", P(None, "fsdp", "tensor")),  # [N, H, F]
    (r"layers/up/bias$", P(None, "tensor")),  # [N, F]
    (r"layers/down/kernel$", P(None, "tensor", "fsdp")),  # [N, F, H]
    (r"layers/(attention/out|down)/bias$", P()),
    (
        r"(projection|baseline|head/copy|head/start|(head|end|answerable)/(dense|output))/kernel$",
        P("fsdp", None),
    ),
    (
        r"(projection|baseline|head/copy|head/start|(head|end|answerable)/(dense|output)|head)/bias$",
        P(),
    ),
    (r"norm/(scale|bias)$", P()),
    (r"^step$", P()),
)


def partition_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, shard_optimizer: bool = False
) -> PartitionSpec:
    """How the array `name` is split; raises KeyError where no rule matches.

    Args:
      shard_optimizer: split moments over `data`, too: ZeRO-1 (Rajbhandari et al., SC 2020).
    """
    spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
    if spec is None:
        raise KeyError(f"no sharding rule for {name}")
    divides = lambda axis, size: size % mesh.shape[axis] == 0  # noqa: E731
    axes = [
        axis if axis and divides(axis, size) else None
        for axis, size in itertools.zip_longest(spec, shape)
    ]
    if shard_optimizer and name.startswith("opt_state/"):
        whole = [
            i
            for i, (axis, size) in enumerate(zip(axes, shape, strict=True))
            if (axis is None or mesh.shape[axis] == 1) and divides("data", size)
        ]
        if whole:
            axes[max(whole, key=lambda i: shape[i])] = "data"
    return P(*axes)


def shardings(tree: PyTree, mesh: Mesh, shard_optimizer: bool = False) -> PyTree:
    """A tree of `NamedSharding`s for a train state, or for parameters alone."""

    def sharding(path: tuple, x: jax.ShapeDtypeStruct | Array) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(path_name(path), x.shape, mesh, shard_optimizer))

    return jax.tree.map_with_path(sharding, tree)
