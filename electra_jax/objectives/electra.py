"""Replaced token detection: ELECTRA (spec 3).

The discriminator is asked which tokens are not the original ones.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from electra_jax.modeling.electra import Electra
from electra_jax.modeling.heads import ReplacedTokenHead
from electra_jax.modeling.layers import PRNGKey
from electra_jax.objectives import base, masking
from electra_jax.objectives.base import Batch, Inputs, Sums, context, is_real, pair
from electra_jax.objectives.corruption import REPLACED, CorruptedText
from electra_jax.objectives.masking import Masked, TokenCounts, Vocabulary
from electra_jax.objectives.metrics import Metric, loss_metric, score_histogram, score_metric
from electra_jax.settings import Config

DETECTION = "Detection of replaced tokens"
# What counts as wrong is far from what healthy runs do, the smallest among them.
NO_RECALL = 1e-3  # share of the replaced tokens that are detected
RECALLS = 3  # windows in a row
NO_AUC = 0.05  # distance from 0.5
OUTRUN = 0.05  # how far the AUC is below its best


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetection(CorruptedText):
    """Generator and discriminator.

    Attributes:
      selected_only: the discriminator is asked about the positions that the generator predicts
        and no others (ELECTRA 15 %, spec 7.5).
    """

    selected_only: bool = False

    discriminator_term: ClassVar[str] = "rtd_loss"
    head: ClassVar[type] = ReplacedTokenHead
    metrics: ClassVar[dict[str, Metric]] = {
        **CorruptedText.metrics,
        "rtd_loss": loss_metric(
            "RTD loss", console="rtd", figure="Replaced token detection loss", tile="{:.4f}"
        ),
        "rtd_auc": score_metric(
            "RTD AUC", console="auc", figure="Replaced token detection AUC", tile="{:.3f}"
        ),
        "rtd_accuracy": score_metric("RTD accuracy", figure="Accuracy"),
        "rtd_precision": Metric("RTD precision", console="precision", figure=DETECTION),
        "rtd_recall": Metric("RTD recall", console="recall", figure=DETECTION),
        **REPLACED,
    }

    def symptoms(self, logged: base.Logged) -> base.Symptoms:
        """Whether the discriminator learns anything, and keeps up with the generator."""
        yield from super().symptoms(logged)
        recalls = [row["train/rtd_recall"] for row in logged if "train/rtd_recall" in row]
        highest, is_known = max(recalls[-RECALLS:], default=0.0), len(recalls) >= RECALLS
        sentence = (
            f"the discriminator still finds no replaced token (recall {highest:.2%}): it calls "
            "every token original. A larger config.loss.discriminator_weight or "
            "config.optimizer.learning_rate, or a smaller config.generator.width, may help"
        )
        yield "recall", sentence if is_known and highest < NO_RECALL else ""
        scores = [  # AUC of the discriminator and accuracy of the generator
            (row["eval/rtd_auc"], row.get("eval/mlm_accuracy", 0.0))
            for row in logged
            if "eval/rtd_auc" in row
        ]
        if not scores:
            return
        (area, accuracy), (best_area, accuracy_then) = scores[-1], max(scores)
        sentence = (
            "the discriminator tells replaced tokens from others no better than by chance (AUC "
            f"{area:.3f}); is config.loss.discriminator_weight too small?"
        )
        yield "chance", sentence if abs(area - 0.5) < NO_AUC else ""
        sentence = (
            f"the generator outruns the discriminator: the AUC has fallen from {best_area:.3f} to "
            f"{area:.3f}, while the generator's accuracy has risen from {accuracy_then:.1%} to "
            f"{accuracy:.1%}; a smaller config.generator.width may help"
        )
        yield "outrun", sentence if area < best_area - OUTRUN and accuracy > accuracy_then else ""

    @classmethod
    def arguments(
        cls, config: Config, tokenizer: Vocabulary, token_counts: TokenCounts
    ) -> dict[str, Any]:
        """See `MaskedLanguageModel.arguments`."""
        arguments = super().arguments(config, tokenizer, token_counts)
        return arguments | {"selected_only": config.objective == "electra_15"}

    def loss_mask(self, batch: Batch, masked: Masked) -> Bool[Array, "B L"]:
        """All real tokens, or those that are predicted."""
        if self.selected_only:
            return masking.is_selected(masked, batch["input_ids"].shape[1])
        return is_real(batch)

    def discriminator_sums(
        self, model: Electra, corrupted_ids: Int[Array, "B L"], inputs: Inputs, key: PRNGKey | None
    ) -> Sums:
        """The discriminator's metrics of spec 3.7; the histogram behind AUC in evaluation alone."""
        logits = model.discriminate(corrupted_ids, context(inputs.batch), key)
        return self.detection_sums(logits, corrupted_ids, inputs)

    def detection_sums(
        self, logits: Float[Array, "B L"], corrupted_ids: Int[Array, "B L"], inputs: Inputs
    ) -> Sums:
        """`discriminator_sums`, from the discriminator's logits."""
        is_replaced = corrupted_ids != inputs.batch["input_ids"]
        loss_mask = self.loss_mask(inputs.batch, inputs.masked)
        sums = rtd_sums(logits, is_replaced, loss_mask)
        if inputs.is_evaluation:
            sums["rtd_auc"] = score_histogram(logits, is_replaced, loss_mask)
        return sums


def rtd_sums(logits: Float[Array, "B L"], is_replaced: Array, loss_mask: Array) -> Sums:
    """The discriminator's loss and accuracies over the tokens in `loss_mask` (spec 3.6, 3.7).

    A positive logit calls the token replaced. Precision is the accuracy over tokens that are called
    so, recall the accuracy over tokens that are.
    """
    label, weights = is_replaced.astype(jnp.float32), loss_mask.astype(jnp.float32)
    predicted = (logits > 0).astype(jnp.float32)
    correct = (predicted == label).astype(jnp.float32)
    return {
        "rtd_loss": pair(base.binary_cross_entropy(logits, label), weights),
        "rtd_accuracy": pair(correct, weights),
        "rtd_precision": pair(correct, weights * predicted),
        "rtd_recall": pair(correct, weights * label),
        "replaced_fraction": pair(label, weights),
    }
