"""Arithmetic of a training step, and what devices can do: the two halves of MFU.

Counted are matrix products only, 2 operations per multiply-add, and a training step as three
forward passes; recomputation does not count.
"""

import jax

from electra_jax.modeling.electra import ElectraConfig
from electra_jax.modeling.encoders import encoder_class
from electra_jax.modeling.heads import MaskedLMHead

# bfloat16 matrix peak of one device in FLOP/s, by a part of its `device_kind`; first match wins.
PEAKS: tuple[tuple[str, float], ...] = (
    ("TPU v3", 123e12 / 2),  # a device is one of the chip's two cores
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
    ("TPU7x", 2307e12 / 2),
    ("A100", 312e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
)


def peak_flops(device: jax.Device) -> float | None:
    """Peak of a known device, else None."""
    return next((peak for name, peak in PEAKS if name in device.device_kind), None)


def train_flops_per_token(
    model: ElectraConfig, length: int, predictions: int, generator_passes: int = 3
) -> float:
    """Operations of forward and backward pass for one token.

    Args:
      length: of a row.
      predictions: masked positions per row.
      generator_passes: 1 where the generator has no backward pass.
    """
    generator, discriminator = model.generator, model.discriminator
    share = predictions / length
    flops = 0.0
    if generator:
        head = MaskedLMHead.flops_per_token(generator, share)
        head += 2 * generator.hidden_size * model.baseline * share
        encoder = encoder_class(generator).flops_per_token(generator, length)
        flops += generator_passes * (encoder + head)
    if discriminator:
        head = model.discriminator_head.flops_per_token(discriminator, share)
        encoder = encoder_class(discriminator).flops_per_token(discriminator, length)
        flops += 3 * (encoder + head)
    return flops
