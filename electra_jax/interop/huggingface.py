"""Hugging Face's `config.json`, and which of our encoders and parts a file of theirs is."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from electra_jax.errors import UserError
from electra_jax.modeling.encoders import ENCODERS, encoder_class
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.encoders.naming import Naming


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
    model_type = content.get("model_type")
    readers = {
        known: name
        for name, encoder in ENCODERS.items()
        if encoder.naming
        for known in encoder.naming.dialects
    }
    if model_type not in readers:
        allowed = ", ".join(map(repr, readers))
        raise UserError(f"model_type is {model_type!r}; allowed: {allowed}")
    naming = ENCODERS[readers[model_type]].naming
    for name, value in naming.fixed.items():
        if content.get(name, value) != value:
            raise UserError(f"{name} is {content[name]!r}; allowed: {value!r}")
    sizes = {}
    for ours, theirs in {**naming.sizes, **naming.dialects[model_type].sizes}.items():
        sizes[ours] = content.get(theirs)
        if type(sizes[ours]) is not int or not 1 <= sizes[ours] < 2**31:
            raise UserError(f"{theirs} is {sizes[ours]!r}; allowed: a number, at least 1")
    rates = {}
    for ours, (theirs, usual) in naming.rates.items():
        rates[ours] = content.get(theirs, usual)
        if not isinstance(rates[ours], int | float) or not 0 <= rates[ours] < 1:
            raise UserError(f"{theirs} is {rates[ours]!r}; allowed: at least 0 and below 1")
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise UserError(
            f"hidden_size is {sizes['hidden_size']} and num_attention_heads is "
            f"{sizes['num_heads']}; allowed: heads that divide the hidden size"
        )
    return described(readers[model_type], sizes, rates)


def described(encoder: str, sizes: Mapping[str, int], rates: Mapping[str, float]) -> EncoderConfig:
    """The configuration of a network that is read, not computed with: its numerics do not matter.

    Args:
      rates: of dropout and the like; the usual ones if they are not given.
    """
    naming = ENCODERS[encoder].naming
    rates = {name: float(rates.get(name, usual)) for name, (_, usual) in naming.rates.items()}
    numerics = {"remat": "none", "scan_unroll": 1, "dtype": jnp.float32}
    return ENCODERS[encoder].Config(encoder=encoder, **sizes, **rates, **numerics)


def canonical(name: str, naming: Naming) -> str:
    """The name that a model of `Naming.model_type` would have for the tensor `name`."""
    for pattern, replacement in naming.spellings:
        name = re.sub(pattern, replacement, name)
    return name


def without_a_place(name: str, naming: Naming, model_type: str) -> str | None:
    """Why the tensor of this canonical name is not used, if it is known to be of no use."""
    patterns = (*naming.without_a_place, *naming.dialects[model_type].without_a_place)
    return next((why for pattern, why in patterns if re.search(pattern, name)), None)
