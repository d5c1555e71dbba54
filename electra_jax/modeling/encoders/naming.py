"""What Hugging Face calls an encoder, its parameters and its settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Patterns = tuple[tuple[str, str], ...]  # regular expressions, and what is said where one matches


@dataclasses.dataclass(frozen=True)
class Part:
    """What one of their files holds: embeddings, an encoder and, mostly, a head.

    Attributes:
      architecture: their class.
      use: what it is and what it is for, in the words of a model card.
      head: modules of our head to theirs.
    """

    architecture: str
    use: str
    head: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def auto_class(self) -> str:
        """Their class that loads such a part of any encoder."""
        return "AutoModel" + "".join(self.architecture.partition("For")[1:])


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a model type that is read differs from the one that is written.

    Attributes:
      sizes: fields with another name there, see `Naming.sizes`.
      without_a_place: see `Naming.without_a_place`.
    """

    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    without_a_place: Patterns = ()


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names of parameters and of settings, ours to theirs.

    Attributes:
      model_type: what `config.json` says.
      prefix: where there is a head, all names of the encoder's tensors begin with it.
      modules: our modules and tables to theirs; `{}` is the layer. Ours is several of theirs fused
        where there are several names.
      parts: what a file can hold, by the value of `export --part`. `encoder` has no head;
        `discriminator` and `generator` are made in pre-training.
      tied: tensors that only repeat another one, and which.
      sizes: fields of our config to theirs.
      rates: likewise, numbers below 1, each with its value where `config.json` has none.
      fixed: fields of `config.json` that may have one value only, because our encoder has no other.
      written: fields that an exported `config.json` has besides.
      dialects: the model types that are read.
      spellings: patterns of other names of the same tensors, and their replacements.
      without_a_place: patterns of tensors that are known and not used, and why.
    """

    model_type: str
    prefix: str
    modules: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, Part]
    tied: Mapping[str, str]
    sizes: Mapping[str, str]
    rates: Mapping[str, tuple[str, float]]
    fixed: Mapping[str, Any]
    written: Mapping[str, Any]
    dialects: Mapping[str, Dialect]
    spellings: Patterns = ()
    without_a_place: Patterns = ()
