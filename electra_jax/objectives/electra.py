"""Replaced token detection: ELECTRA (spec 3).

    input_ids --mask--> masked_ids --generator--> logits --Gumbel sample--> corrupted_ids
    corrupted_ids --discriminator--> logits: which tokens are not the original ones?

Both losses are minimised together. Samples are integers, so no gradient of the discriminator's
loss reaches the generator, save through the tables that both read.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from electra_jax import masking
from electra_jax.masking import Masked
from electra_jax.metrics import score_histogram
from electra_jax.modeling.electra import Params
from electra_jax.modeling.layers import PRNGKey
from electra_jax.objectives.mlm import (
    Batch,
    MaskedLanguageModel,
    Sums,
    context,
    is_real,
    mlm_sums,
    pair,
)


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetection(MaskedLanguageModel):
    """Generator and discriminator trained jointly.

    Attributes:
      discriminator_weight: multiplies the discriminator's mean loss; 50 in the paper.
      temperature: divides the generator's logits before sampling, not in its loss.
      disallow_correct: never sample the original token.
    """

    discriminator_weight: float = 50.0
    temperature: float = 1.0
    disallow_correct: bool = False

    @property
    def loss_terms(self) -> dict[str, float]:
        """Weight of each mean loss in the total."""
        return super().loss_terms | {"rtd_loss": self.discriminator_weight}

    def totals(self, batch: Batch, masked: Masked) -> dict[str, Float[Array, ""]]:
        """Number of predictions and of real tokens."""
        return super().totals(batch, masked) | {
            "rtd_loss": is_real(batch).sum(dtype=jnp.float32),
        }

    def sums(
        self,
        params: Params,
        batch: Batch,
        masked: Masked,
        key: PRNGKey,
        dropout_key: PRNGKey | None,
        evaluation: bool,
    ) -> Sums:
        """All metrics of spec 3.7 over real tokens; the scores behind AUC only in evaluation."""
        generator_key, discriminator_key = (
            (None, None) if dropout_key is None else jax.random.split(dropout_key)
        )
        model = self.bind(params)
        logits = model.generate(
            masked.masked_ids, context(batch), masked.masked_positions, generator_key
        )
        samples = masking.sample_replacements(
            logits,
            masked.labels,
            masking.row_keys(key, batch["row"]),
            self.temperature,
            self.disallow_correct,
        )
        corrupted_ids = masking.corrupt(self.masking.mode, batch["input_ids"], masked, samples)
        is_replaced = corrupted_ids != batch["input_ids"]
        verdicts = model.discriminate(corrupted_ids, context(batch), discriminator_key)

        sampled_right = (samples == masked.labels).astype(jnp.float32)
        sums = mlm_sums(logits, masked) | {
            "sampled_mlm_accuracy": pair(sampled_right, masked.weights)
        }
        sums |= rtd_sums(verdicts, is_replaced, is_real(batch))
        if evaluation:
            sums["rtd_auc"] = score_histogram(verdicts, is_replaced, is_real(batch))
        return sums


def rtd_sums(logits: Float[Array, "B L"], is_replaced: Array, is_real: Array) -> Sums:
    """Loss and verdict metrics over real tokens (spec 3.6, 3.7).

    A positive logit calls the token replaced. Precision is the accuracy over tokens called
    replaced, recall the accuracy over those that are.
    """
    label, real = is_replaced.astype(jnp.float32), is_real.astype(jnp.float32)
    cross_entropy = jnp.maximum(logits, 0) - logits * label + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    called = (logits > 0).astype(jnp.float32)
    correct = (called == label).astype(jnp.float32)
    return {
        "rtd_loss": pair(cross_entropy, real),
        "rtd_accuracy": pair(correct, real),
        "rtd_precision": pair(correct, real * called),
        "rtd_recall": pair(correct, real * label),
        "replaced_fraction": pair(label, real),
    }
