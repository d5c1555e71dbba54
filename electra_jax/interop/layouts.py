"""The tensors of a network under the names that a file has for them, and back into parameters.

One of Hugging Face's files holds a part of what a run has trained: an encoder with its embeddings
and, mostly, a head. Their linear weights are `[out, in]`, one tensor a layer, with query, key and
value apart. Ours are `[in, out]`, stacked over layers, with query, key and value fused and heads
split.

`Layout.tensors` makes views of NumPy arrays, so filling these views is its inverse, and the way
back needs no second description.
"""

import dataclasses
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
    def tensors(self, params: Params) -> dict[str, Array | np.ndarray]:
        """All tensors by name, without those that are tied. Of NumPy arrays they are views."""

    @abstractmethod
    def paths(self, params: Params) -> dict[str, str]:
        """For each of `tensors`, the path of our parameter that it is, or is a part of."""

    @abstractmethod
    def is_of_head(self, name: str) -> bool:
        """Whether the tensor `name` is one of the head's."""

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

    def tensors(self, params: Params) -> dict[str, Array | np.ndarray]:
        """See `Layout.tensors`."""
        return by_path(params)

    def paths(self, params: Params) -> dict[str, str]:
        """See `Layout.paths`."""
        return {name: name for name in by_path(params)}

    def is_of_head(self, name: str) -> bool:
        """See `Layout.is_of_head`."""
        return name.startswith("head/")


@dataclasses.dataclass(frozen=True)
class HuggingFaceLayout(Layout):
    """Hugging Face's names for `part`, a key of `Naming.parts`."""

    naming: Naming
    part: str

    @property
    def tied(self) -> Mapping[str, str]:
        """See `Layout`."""
        heads = self.naming.parts[self.part].head.values()
        return {
            name: other
            for name, other in self.naming.tied.items()
            if name.rpartition(".")[0] in heads
        }

    def tensors(self, params: Params) -> dict[str, Array | np.ndarray]:
        """See `Layout.tensors`."""
        tensors = {}
        for path, value in by_path(params).items():
            split = np.split if isinstance(value, np.ndarray) else jnp.split
            is_kernel = path.endswith("/kernel")
            layers = split(value, len(value)) if "/layers/" in path else [value[None]]
            for layer, names in zip(layers, self.names(path, len(layers)), strict=True):
                pieces = split(layer[0], len(names), axis=1 if is_kernel else 0)
                for name, piece in zip(names, pieces, strict=True):
                    if is_kernel:  # [H, 1, A, D], [A, D, H] or [in, out]
                        inputs = piece.shape[:1] if len(names) > 1 else piece.shape[:-1]
                        piece = piece.reshape(np.prod(inputs), -1).T
                    elif name.endswith(".bias"):
                        piece = piece.reshape(-1)
                    tensors[name] = piece
        return tensors

    def paths(self, params: Params) -> dict[str, str]:
        """See `Layout.paths`."""
        return {
            name: path
            for path, x in by_path(params).items()
            for names in self.names(path, x.shape[0] if "/layers/" in path else 1)
            for name in names
        }

    def is_of_head(self, name: str) -> bool:
        """See `Layout.is_of_head`."""
        return name.rpartition(".")[0] in self.naming.parts[self.part].head.values()

    def names(self, path: str, num_layers: int) -> Iterator[tuple[str, ...]]:
        """For each layer, the names of the tensors that our parameter `path` is made of.

        Raises:
          KeyError: the part has no such parameter.
        """
        heads = self.naming.parts[self.part].head
        modules = {**self.naming.modules, **{ours: (theirs,) for ours, theirs in heads.items()}}
        module, _, leaf = path.rpartition("/")
        suffix = "bias" if leaf == "bias" else "weight"
        for layer in range(num_layers):
            theirs = modules[path if path in modules else module]
            yield tuple(f"{name.format(layer)}.{suffix}" for name in theirs)
