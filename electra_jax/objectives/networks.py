"""The sizes of an objective's networks: UserError where the settings allow none."""

import dataclasses

from electra_jax.errors import UserError
from electra_jax.modeling.encoders import encoder_config
from electra_jax.modeling.encoders.base import EncoderConfig, compute_dtype, num_heads
from electra_jax.settings import Config, field, not_allowed


def encoder(model: Config, vocab_size: int) -> EncoderConfig:
    """The encoder that is kept after pre-training, by the section `model`."""
    heads = num_heads(model.hidden_size) if model.num_heads is None else model.num_heads
    if model.hidden_size % heads:
        raise UserError(
            f"config.model.hidden_size is {model.hidden_size} and config.model.num_heads is {heads}"
            "; allowed: heads (by default one for every 64) that divide the hidden size"
        )
    return encoder_config(
        model,
        vocab_size=vocab_size,
        num_heads=heads,
        intermediate_size=model.intermediate_size or 4 * model.hidden_size,
        dtype=compute_dtype(model.dtype),
    )


def generator(config: Config, discriminator: EncoderConfig) -> EncoderConfig:
    """The encoder of a generator: narrower than `discriminator`, perhaps flatter (spec 2.1)."""
    sizes = config.generator
    if sizes.sharing == "all":
        require_full_size(config, "generator.sharing")
        return discriminator
    width = round(discriminator.hidden_size * sizes.width)
    num_layers = round(discriminator.num_layers * sizes.depth)
    if width < 1 or width % num_heads(width):
        allowed = f"what one head for every 64 divides, not {width},"
        raise not_allowed(config, "generator.width", allowed, "model.hidden_size")
    if num_layers < 1:
        raise not_allowed(config, "generator.depth", "what leaves a layer", "model.num_layers")
    return dataclasses.replace(
        discriminator,
        embedding_size=width if sizes.sharing == "none" else discriminator.embedding_size,
        hidden_size=width,
        num_layers=num_layers,
        num_heads=num_heads(width),
        intermediate_size=4 * width,
    )


def require_full_size(config: Config, name: str) -> None:
    """Raises UserError where the generator is smaller than the setting `name` allows."""
    sizes = config.generator.width, config.generator.depth
    if sizes != (1, 1):
        raise UserError(
            f"config.{name} = {field(config, name)!r} needs config.generator.width = 1 and "
            f"config.generator.depth = 1, found {sizes[0]} and {sizes[1]}"
        )
