"""Hugging Face's `config.json`, and which of our encoders and parts a file of theirs is."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from electra_jax.errors import UserError
from electra_jax.modeling.encoders import ENCODERS, encoder_class
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.encoders.naming import Naming, Patterns


def part_of(names: Iterable[str], naming: Naming) -> str:
    """Which part a file with tensors of these names is: the one whose head is there."""
    roots = {name.rpartition(".")[0] for name in names}
    found = {name: len(roots & {*part.head.values()}) for name, part in naming.parts.items()}
    best = max(found, key=found.get)
    return best if found[best] else "encoder"


def to_config(config: EncoderConfig, part: str, pad_id: int) -> dict[str, Any]:
    """The content of `config.json`."""
    naming = encoder_class(config).naming
    rates = {ours: theirs for ours, (theirs, _) in naming.rates.items()}
    return {
        "model_type": naming.model_type,
        "architectures": [naming.parts[part].architecture],
        **{theirs: getattr(config, ours) for ours, theirs in {**naming.sizes, **rates}.items()},
        **naming.written,
        "pad_token_id": pad_id,
    }


def from_config(content: Mapping[str, Any]) -> EncoderConfig:
    """The encoder that a `config.json` describes.

    Raises:
      UserError: names the field that is missing, or that no encoder of ours can follow.
    """
    readers = {
        model_type: name
        for name, encoder in ENCODERS.items()
        if encoder.naming
        for model_type in encoder.naming.dialects
    }

    def checked(name: str, value: Any, is_allowed: bool, allowed: str) -> Any:
        if not is_allowed:
            raise UserError(f"{name} is {value!r}; allowed: {allowed}")
        return value

    model_type = content.get("model_type")
    checked("model_type", model_type, model_type in readers, ", ".join(map(repr, readers)))
    naming = ENCODERS[readers[model_type]].naming
    for name, value in naming.fixed.items():
        found = content.get(name, value)
        checked(name, found, found == value, repr(value))
    sizes, rates = {}, {}
    for ours, theirs in {**naming.sizes, **naming.dialects[model_type].sizes}.items():
        size = content.get(theirs)
        is_count = type(size) is int and 1 <= size < 2**31
        sizes[ours] = checked(theirs, size, is_count, "a number, at least 1")
    for ours, (theirs, usual) in naming.rates.items():
        rate = content.get(theirs, usual)
        is_rate = isinstance(rate, int | float) and 0 <= rate < 1
        rates[ours] = checked(theirs, rate, is_rate, "at least 0 and below 1")
    heads, width = sizes["num_heads"], sizes["hidden_size"]
    checked(naming.sizes["num_heads"], heads, width % heads == 0, f"what divides the width {width}")
    return described(readers[model_type], sizes, rates)


def described(encoder: str, sizes: Mapping[str, int], rates: Mapping[str, float]) -> EncoderConfig:
    """The configuration of a network that is read and does not compute: its numerics are arbitrary.

    Args:
      rates: of dropout and the like; those that are not given are the usual ones.
    """
    naming = ENCODERS[encoder].naming
    rates = {name: float(rates.get(name, usual)) for name, (_, usual) in naming.rates.items()}
    numerics = {"remat": "none", "scan_unroll": 1, "dtype": jnp.float32}
    return ENCODERS[encoder].Config(encoder=encoder, **sizes, **rates, **numerics)


def renamed(name: str, spellings: Patterns) -> str:
    """`name` after all replacements, one after the other."""
    for pattern, replacement in spellings:
        name = re.sub(pattern, replacement, name)
    return name


def reason(name: str, patterns: Patterns) -> str | None:
    """Why the tensor `name` is not used, where one of the patterns says so."""
    return next((why for pattern, why in patterns if re.search(pattern, name)), None)
