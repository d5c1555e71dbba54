"""Between BERT and ELECTRA: the discriminator predicts words of a corrupted text (spec 7.5).

* Replace MLM predicts the original tokens where the generator has written its samples.
* All-Tokens MLM does so at all positions, and may copy the token that it reads.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from electra_jax.modeling.electra import Electra
from electra_jax.modeling.heads import CopyHead, MaskedLMHead
from electra_jax.modeling.layers import PRNGKey
from electra_jax.objectives import masking
from electra_jax.objectives.base import Batch, Inputs, Sums, context, is_real, pair
from electra_jax.objectives.corruption import REPLACED, CorruptedText
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.metrics import Metric, loss_metric, score_metric
from electra_jax.objectives.mlm import mlm_sums

RECONSTRUCTION = {
    "reconstruction_loss": loss_metric(
        "reconstruction loss", console="reconstruction", tile="{:.3f}"
    ),
    "reconstruction_accuracy": score_metric(
        "reconstruction accuracy",
        console="reconstruction acc",
        figure="Reconstruction",
        tile="{:.1%}",
    ),
}


@dataclasses.dataclass(frozen=True)
class ReplaceMLM(CorruptedText):
    """Masked language modeling whose input has samples of a generator in place of `[MASK]`."""

    discriminator_term: ClassVar[str] = "reconstruction_loss"
    head: ClassVar[type] = MaskedLMHead
    metrics: ClassVar[dict[str, Metric]] = CorruptedText.metrics | RECONSTRUCTION | REPLACED

    def loss_mask(self, batch: Batch, masked: Masked) -> Bool[Array, "B L"]:
        """The positions that are predicted."""
        return masking.is_selected(masked, batch["input_ids"].shape[1])

    def discriminator_sums(
        self, model: Electra, corrupted_ids: Int[Array, "B L"], inputs: Inputs, key: PRNGKey | None
    ) -> Sums:
        """Loss and accuracy over the predicted positions."""
        batch, masked = inputs.batch, inputs.masked
        states = model.discriminator_states(corrupted_ids, context(batch), key)
        states = jnp.take_along_axis(states, masked.masked_positions[..., None], axis=1)
        logits = model.discriminator.head(states, model.discriminator_words())
        sums = mlm_sums(logits, masked)
        return {
            "reconstruction_loss": sums["mlm_loss"],
            "reconstruction_accuracy": sums["mlm_accuracy"],
            "replaced_fraction": replaced(self.loss_mask(batch, masked), batch, corrupted_ids),
        }

    def denominators(self, batch: Batch, masked: Masked) -> dict[str, Float[Array, ""]]:
        """Number of predictions; repeated draws count twice, as in the generator's loss."""
        found = super().denominators(batch, masked)
        return found | {self.discriminator_term: found["mlm_loss"]}


@dataclasses.dataclass(frozen=True)
class AllTokensMLM(CorruptedText):
    """Masked language modeling at all positions, with a copy mechanism."""

    discriminator_term: ClassVar[str] = "reconstruction_loss"
    head: ClassVar[type] = CopyHead
    metrics: ClassVar[dict[str, Metric]] = {
        **CorruptedText.metrics,
        **RECONSTRUCTION,
        "copy_rate": Metric("copied", figure="Reconstruction"),
        **REPLACED,
    }

    def loss_mask(self, batch: Batch, masked: Masked) -> Bool[Array, "B L"]:
        """All real tokens."""
        return is_real(batch)

    def discriminator_sums(
        self, model: Electra, corrupted_ids: Int[Array, "B L"], inputs: Inputs, key: PRNGKey | None
    ) -> Sums:
        """Loss and accuracy over all real tokens.

        There are never logits for all of them at once: the vocabulary is projected to for some
        positions at a time, no more than the generator predicts, and once more going backward.
        """
        batch, masked = inputs.batch, inputs.masked
        head, words = model.discriminator.head, model.discriminator_words()
        states = model.discriminator_states(corrupted_ids, context(batch), key)
        length, at_once = states.shape[1], masked.masked_positions.shape[1]
        num_parts = -(-length // at_once)

        def cut(x: Array) -> Array:
            """[B, L, ...] to [parts, B, L / parts, ...], with zeros where L does not divide."""
            padding = [(0, 0)] * x.ndim
            padding[1] = (0, -length % num_parts)
            x = jnp.pad(x, padding)
            return jnp.moveaxis(x.reshape(len(x), num_parts, -1, *x.shape[2:]), 1, 0)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def part_sums(part: tuple[Array, ...]) -> Sums:
            states, corrupted_ids, labels, real = part
            return copy_sums(head(states, words), head.gate(states), corrupted_ids, labels, real)

        parts = jax.tree.map(cut, (states, corrupted_ids, batch["input_ids"], is_real(batch)))
        sums = jax.tree.map(lambda x: x.sum(axis=0), jax.lax.map(part_sums, parts))
        return sums | {"replaced_fraction": replaced(is_real(batch), batch, corrupted_ids)}


def copy_sums(
    logits: Float[Array, "B C Vpad"],
    gate_logits: Float[Array, "B C"],
    shown_ids: Int[Array, "B C"],
    labels: Int[Array, "B C"],
    loss_mask: Bool[Array, "B C"],
) -> Sums:
    """Loss and accuracy of a distribution over words mixed with the token that is shown.

    p(w) = c [w = shown] + (1 - c) softmax(logits)(w),    c = sigmoid(gate_logit)
    """
    log_copy, log_word = jax.nn.log_sigmoid(gate_logits), jax.nn.log_sigmoid(-gate_logits)
    normalizer = jax.nn.logsumexp(logits, axis=-1)

    def log_softmax(ids: Int[Array, "B C"]) -> Float[Array, "B C"]:
        return jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - normalizer

    shown = jnp.logaddexp(log_copy, log_word + log_softmax(shown_ids))
    log_label = jnp.where(labels == shown_ids, shown, log_word + log_softmax(labels))
    best = jnp.maximum(shown, log_word + logits.max(axis=-1) - normalizer)
    weights = loss_mask.astype(jnp.float32)
    return {
        "reconstruction_loss": pair(-log_label, weights),
        "reconstruction_accuracy": pair((log_label >= best).astype(jnp.float32), weights),
        "copy_rate": pair(jax.nn.sigmoid(gate_logits), weights),
    }


def replaced(
    loss_mask: Bool[Array, "B L"], batch: Batch, corrupted_ids: Int[Array, "B L"]
) -> Float[Array, "2"]:
    """How many tokens in `loss_mask` are not the original ones."""
    is_replaced = corrupted_ids != batch["input_ids"]
    return pair(is_replaced.astype(jnp.float32), loss_mask.astype(jnp.float32))
