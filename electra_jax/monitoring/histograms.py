"""How the values of each parameter are spread, for the histograms of TensorBoard."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from electra_jax.modeling.params import Params, path_name

BINS = 64


class Histogram(NamedTuple):
    """How the values of an array are spread. The outer edges are its smallest and largest value."""

    counts: np.ndarray  # of values between neighboring edges, [BINS]
    edges: np.ndarray  # ascending, [BINS + 1]
    sum: float
    sum_squares: float


def histograms(params: Params) -> dict[str, Histogram]:
    """One for each parameter by its path; for each layer, where layers lie in one array.

    They are counted on the devices that hold the parameters; with several processes, all must call.
    """
    arrays = {path_name(path): x for path, x in jax.tree.leaves_with_path(params)}
    mesh = next(iter(arrays.values())).sharding.mesh
    found = {}
    for name, counts in jax.device_get(_compiled(mesh)(arrays)).items():
        before, layers, after = name.partition("/layers/")
        if not layers:
            found[name] = Histogram(*counts)
            continue
        for layer, of_layer in enumerate(zip(*counts, strict=True)):
            found[f"{before}/layers/{layer}/{after}"] = Histogram(*of_layer)
    return found


@functools.cache
def _compiled(mesh: Mesh) -> Callable[[dict[str, Array]], dict[str, tuple[Array, ...]]]:
    def count(x: Float[Array, "..."]) -> tuple[Array, ...]:
        counts, edges = jnp.histogram(x, BINS)
        return counts, edges, x.sum(), jnp.square(x).sum()

    def count_all(arrays: dict[str, Array]) -> dict[str, tuple[Array, ...]]:
        return {
            name: (jax.vmap(count) if "/layers/" in name else count)(x)
            for name, x in arrays.items()
        }

    return jax.jit(count_all, out_shardings=NamedSharding(mesh, PartitionSpec()))
