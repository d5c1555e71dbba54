"""Parameters: nested dicts of float32 arrays, their names, and what each of them says of itself."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, PyTree

Params = dict  # a nested dict of float32 arrays


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """What is said of a parameter where it is made.

    Attributes:
      axes: a name or None for each axis. `sharding.rules` says which of these names are split.
      decays: whether weight decay shrinks it.
      depth: where it stands, for rates by layer: `input` in front of the layers, `layers` (stacked,
        with the layer as first axis), or `output` behind them.
    """

    axes: tuple[str | None, ...]
    decays: bool = True
    depth: str = "output"

    def stacked(self) -> "ParamInfo":
        """That of the same parameter of all layers in one array."""
        return dataclasses.replace(self, axes=("layers", *self.axes), depth="layers")


def param(value: Float[Array, "..."], info: ParamInfo) -> nnx.Param:
    """A parameter that starts as `value`."""
    return nnx.Param(value, info=info)


def param_infos(state: PyTree) -> Params:
    """The `ParamInfo` of every parameter in the state of a module, in the layout of `Params`."""
    return nnx.to_pure_dict(state, lambda variable: variable.get_metadata("info"))


def by_path(params: PyTree) -> dict[str, Any]:
    """The leaves of `params`, or of a tree with the same layout, by their `path_name`."""
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(params)}


def path_name(path: tuple) -> str:
    """`discriminator/encoder/layers/up/kernel` for a key path into a tree of parameters."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
