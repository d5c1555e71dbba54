"""How the values of each parameter are spread, for the histograms of TensorBoard."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
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
    counted = jax.device_get(_counted(arrays, NamedSharding(mesh, PartitionSpec())))
    found = {}
    for name, parts in counted.items():
        before, layers, after = name.partition("/layers/")
        if layers:
            for layer, of_layer in enumerate(zip(*parts, strict=True)):
                found[f"{before}/layers/{layer}/{after}"] = Histogram(*of_layer)
        else:
            found[name] = Histogram(*parts)
    return found


@functools.partial(jax.jit, static_argnums=1)
def _counted(arrays: dict[str, Array], everywhere: NamedSharding) -> dict[str, tuple[Array, ...]]:
    def count(x: Float[Array, "..."]) -> tuple[Array, ...]:
        return *jnp.histogram(x, BINS), x.sum(), jnp.square(x).sum()

    found = {x: (jax.vmap(count) if "/layers/" in x else count)(arrays[x]) for x in arrays}
    return jax.lax.with_sharding_constraint(found, everywhere)
