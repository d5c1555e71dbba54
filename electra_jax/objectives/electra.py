"""Replaced token detection: ELECTRA (spec 3).

The main network is a discriminator: which tokens are not the original ones?
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from electra_jax.modeling.electra import Electra
from electra_jax.modeling.heads import ReplacedTokenHead
from electra_jax.modeling.layers import PRNGKey
from electra_jax.objectives import masking
from electra_jax.objectives.base import Batch, Sums, binary_cross_entropy, context, is_real, pair
from electra_jax.objectives.corruption import CorruptedText
from electra_jax.objectives.masking import Masked, Vocabulary
from electra_jax.objectives.metrics import score_histogram
from electra_jax.settings import Config


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetection(CorruptedText):
    """Generator and discriminator.

    Attributes:
      selected_only: the discriminator is asked about the positions that the generator predicts
        and no others (ELECTRA 15 %, spec 7.5).
    """

    selected_only: bool = False

    main_term: ClassVar[str] = "rtd_loss"
    head: ClassVar[type] = ReplacedTokenHead

    @classmethod
    def arguments(
        cls, config: Config, tokenizer: Vocabulary, token_counts: Int[np.ndarray, "V"] | None
    ) -> dict[str, Any]:
        """See `CorruptedText.arguments`."""
        arguments = super().arguments(config, tokenizer, token_counts)
        return arguments | {"selected_only": config.objective == "electra_15"}

    def judged(self, batch: Batch, masked: Masked) -> Bool[Array, "B L"]:
        """All real tokens, or those that are predicted."""
        if self.selected_only:
            return masking.is_selected(masked, batch["input_ids"].shape[1])
        return is_real(batch)

    def main_sums(
        self,
        model: Electra,
        batch: Batch,
        masked: Masked,
        corrupted_ids: Int[Array, "B L"],
        key: PRNGKey | None,
        evaluation: bool,
    ) -> Sums:
        """All metrics of spec 3.7 over the judged tokens; scores behind AUC only in evaluation."""
        verdicts = model.discriminate(corrupted_ids, context(batch), key)
        return self.verdict_sums(verdicts, batch, masked, corrupted_ids, evaluation)

    def verdict_sums(
        self,
        verdicts: Float[Array, "B L"],
        batch: Batch,
        masked: Masked,
        corrupted_ids: Int[Array, "B L"],
        evaluation: bool,
    ) -> Sums:
        """`main_sums`, from the discriminator's logits."""
        is_replaced = corrupted_ids != batch["input_ids"]
        judged = self.judged(batch, masked)
        sums = rtd_sums(verdicts, is_replaced, judged)
        if evaluation:
            sums["rtd_auc"] = score_histogram(verdicts, is_replaced, judged)
        return sums


def rtd_cross_entropy(
    logits: Float[Array, "B L"], is_replaced: Bool[Array, "B L"]
) -> Float[Array, "B L"]:
    """-log of the probability of the right verdict. A positive logit calls the token replaced."""
    return binary_cross_entropy(logits, is_replaced.astype(jnp.float32))


def rtd_sums(logits: Float[Array, "B L"], is_replaced: Array, is_judged: Array) -> Sums:
    """Loss and verdict metrics over the judged tokens (spec 3.6, 3.7).

    Precision is the accuracy over tokens called replaced, recall the accuracy over those that are.
    """
    label, judged = is_replaced.astype(jnp.float32), is_judged.astype(jnp.float32)
    called = (logits > 0).astype(jnp.float32)
    correct = (called == label).astype(jnp.float32)
    return {
        "rtd_loss": pair(rtd_cross_entropy(logits, is_replaced), judged),
        "rtd_accuracy": pair(correct, judged),
        "rtd_precision": pair(correct, judged * called),
        "rtd_recall": pair(correct, judged * label),
        "replaced_fraction": pair(label, judged),
    }
