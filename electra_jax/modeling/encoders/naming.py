"""What Hugging Face calls an encoder, its parameters and its settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Patterns = tuple[tuple[str, str], ...]  # regular expressions, and what is said where one matches


@dataclasses.dataclass(frozen=True)
class Part:
    """What one of their files holds beside embeddings and encoder.

    Attributes:
      architecture: their class.
      head: modules of our head to theirs.
    """

    architecture: str
    head: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Dialect:
    """In what another model type differs that is read, too.

    Attributes:
      sizes: fields that are called otherwise there, see `Naming.sizes`.
      without_a_place: see `Naming.without_a_place`.
    """

    sizes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    without_a_place: Patterns = ()


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names of parameters and of settings, ours to theirs.

    Attributes:
      model_type: what `config.json` says.
      prefix: what their names of the encoder's tensors begin with where there is a head.
      modules: our modules and tables to theirs; `{}` is the layer. Several names are fused in ours.
      parts: what a file can hold, by the name that `export --part` has for it. `encoder` has no
        head; `discriminator` and `generator` are made in pre-training.
      tied: tensors that only repeat another one, and which.
      sizes: fields of our config to theirs.
      rates: likewise, numbers below 1; with what they are where `config.json` does not say.
      fixed: what `config.json` must say where it says anything: all that our encoder can be.
      written: what else an exported `config.json` says.
      dialects: the model types that are read.
      spellings: patterns of other names of the same tensors, and what to put in their place.
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
