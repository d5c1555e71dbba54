"""The tensors of a network under the names that a file has for them, and back into parameters.

A file of Hugging Face's holds a part of what a run has trained: an encoder with its embeddings and,
mostly, a head. Their linear weights are `[out, in]`, one tensor a layer, with query, key and value
apart. Ours are `[in, out]`, stacked over layers, with query, key and value fused and heads split.

`Layout.views` makes views of NumPy arrays, so filling these views is its inverse, and the way back
needs no second description.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from electra_jax.errors import UserError
from electra_jax.modeling.encoders.naming import Naming
from electra_jax.modeling.params import Params, by_path

Tensors = Mapping[str, Array | np.ndarray]


class Layout(ABC):
    """Names of tensors. Parameters are `{"embeddings", "encoder", "head"}`, perhaps without head.

    Attributes:
      tied: tensors that only repeat another one, and which.
    """

    tied: Mapping[str, str]

    @abstractmethod
    def views(self, params: Params) -> Iterator[tuple[str, str, Array | np.ndarray]]:
        """Each tensor: its name, the path of our parameter that holds it, its numbers.

        Tied tensors are left out. Tensors of NumPy arrays are views.
        """

    @abstractmethod
    def is_of_head(self, name: str) -> bool:
        """Whether the tensor `name` is one of the head's."""

    def tensors(self, params: Params) -> dict[str, Array | np.ndarray]:
        """The tensors by name, see `views`."""
        return {name: tensor for name, _, tensor in self.views(params)}

    def paths(self, params: Params) -> dict[str, str]:
        """For each of `tensors`, the path of our parameter that holds it."""
        return {name: path for name, path, _ in self.views(params)}

    def params(self, tensors: Tensors, like: Params) -> Params:
        """Our float32 parameters, on the host.

        Args:
          tensors: of any floating type that float32 holds.
          like: parameters or their shapes; says which tensors there must be, and how large.

        Raises:
          UserError: names the tensors that are missing, unknown, of another shape or type, not tied
            or not finite.
        """
        expected = jax.eval_shape(self.tensors, like)
        problems = [f"{name} is missing" for name in expected if name not in tensors]
        for name, x in tensors.items():
            if name in expected and x.shape != expected[name].shape:
                problems.append(f"{name} is {x.shape}, the model's is {expected[name].shape}")
            elif self.tied.get(name) in expected:
                if not np.array_equal(x, tensors.get(self.tied[name])):
                    problems.append(f"{name} is not tied to {self.tied[name]}")
            elif name not in expected:
                problems.append(f"{name} is not known")
            elif not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
                problems.append(f"{name} holds {x.dtype}; allowed: float32, or smaller floats")
            elif not np.isfinite(x).all():
                problems.append(f"{name} holds numbers that are not finite")
        if problems:
            raise UserError(f"the weights do not fit the model: {'; '.join(problems)}")
        params = jax.tree.map(lambda x: np.empty(x.shape, np.float32), like)
        for name, view in self.tensors(params).items():
            view[...] = tensors[name]
        return params


class OurLayout(Layout):
    """Each parameter is a tensor, named by its path."""

    tied: Mapping[str, str] = {}

    def views(self, params: Params) -> Iterator[tuple[str, str, Array | np.ndarray]]:
        """The parameters themselves."""
        return ((path, path, value) for path, value in by_path(params).items())

    def is_of_head(self, name: str) -> bool:
        """Whether it lies below `head/`."""
        return name.startswith("head/")


@dataclasses.dataclass(frozen=True)
class HuggingFaceLayout(Layout):
    """Hugging Face's names for `part`, a key of `Naming.parts`."""

    naming: Naming
    part: str

    @property
    def tied(self) -> Mapping[str, str]:
        """Those of this part."""
        return {name: x for name, x in self.naming.tied.items() if self.is_of_head(name)}

    def views(self, params: Params) -> Iterator[tuple[str, str, Array | np.ndarray]]:
        """One tensor a layer; query, key and value apart.

        Raises:
          KeyError: the part has no such parameter.
        """
        heads = {ours: (theirs,) for ours, theirs in self.naming.parts[self.part].head.items()}
        modules = {**self.naming.modules, **heads}
        for path, value in by_path(params).items():
            module, _, leaf = path.rpartition("/")
            names = modules[path if path in modules else module]
            suffix = "bias" if leaf == "bias" else "weight"
            split = np.split if isinstance(value, np.ndarray) else jnp.split
            layers = split(value, len(value)) if "/layers/" in path else [value[None]]
            for number, layer in enumerate(layers):
                pieces = split(layer[0], len(names), axis=1 if leaf == "kernel" else 0)
                for name, piece in zip(names, pieces, strict=True):
                    if leaf == "kernel":  # [H, 1, A, D], [A, D, H] or [in, out]
                        inputs = piece.shape[:1] if len(names) > 1 else piece.shape[:-1]
                        piece = piece.reshape(math.prod(inputs), -1).T
                    elif leaf == "bias":
                        piece = piece.reshape(-1)
                    yield f"{name.format(number)}.{suffix}", path, piece

    def is_of_head(self, name: str) -> bool:
        """Whether it belongs to a module of the part's head."""
        return name.rpartition(".")[0] in self.naming.parts[self.part].head.values()
