"""Masked language modeling: BERT's objective with masks drawn anew in every step (spec 3.9).

It is also the generator's half of ELECTRA, so its pieces are shared with `electra.py`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from electra_jax.errors import UserError
from electra_jax.modeling.electra import Electra, ElectraConfig
from electra_jax.modeling.flops import train_flops_per_token
from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params
from electra_jax.objectives import base, masking, networks, schedules
from electra_jax.objectives.base import Batch, Inputs, Sums, context, is_real, pair
from electra_jax.objectives.masking import Masked, MaskingConfig, TokenCounts, Vocabulary
from electra_jax.objectives.metrics import Metric, loss_metric, score_metric
from electra_jax.objectives.schedules import Scalar, Schedule, Step, at
from electra_jax.settings import Config, field

LEARNS_NOTHING = 0.95  # share of the loss of guessing


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModel(base.Objective):
    """Predict the original token at the masked positions."""

    model: ElectraConfig
    masking: MaskingConfig
    mlm_weight: Schedule = 1.0  # multiplies the mean loss

    metrics: ClassVar[dict[str, Metric]] = {
        "loss": Metric("loss", better="lower", console="loss", figure=None),
        "mlm_loss": loss_metric(
            "MLM loss", console="mlm", figure="Masked language modeling loss", tile="{:.3f}"
        ),
        "mlm_accuracy": score_metric(
            "MLM accuracy", console="mlm acc", figure="Accuracy", tile="{:.1%}"
        ),
    }

    @property
    def measured(self) -> Mapping[str, Metric]:
        """Those of `metrics` that this one measures."""
        return self.metrics

    def symptoms(self, logged: base.Logged) -> base.Symptoms:
        """Whether the network that predicts words is no better than one that knows nothing."""
        losses = [row["eval/mlm_loss"] for row in logged if "eval/mlm_loss" in row]
        if losses and self.trains_generator:
            loss, chance = losses[-1], math.log(self.masking.vocab_size)
            sentence = (
                f"the generator predicts tokens no better than by guessing (loss {loss:.2f}; "
                f"guessing has {chance:.2f}): it learns nothing. Are config.loss.generator_weight "
                "and config.optimizer.learning_rate as they should be?"
            )
            yield "guessing", sentence if loss > LEARNS_NOTHING * chance else ""

    @property
    def trains_generator(self) -> bool:
        """Whether a network learns to predict masked tokens."""
        return True

    @classmethod
    def arguments(
        cls, config: Config, tokenizer: Vocabulary, token_counts: TokenCounts
    ) -> dict[str, Any]:
        """Fields of the objective that `config` describes; UserError where settings clash."""
        networks.require_full_size(config, "objective")
        require_weight(config, "loss.generator_weight")
        return {
            "model": ElectraConfig(None, networks.encoder(config.model, tokenizer.vocab_size)),
            "masking": MaskingConfig.from_config(config, tokenizer),
            "mlm_weight": schedules.from_config(config, "loss.generator_weight"),
        }

    @property
    def dtype(self) -> DTypeLike:
        """Of the computation."""
        return self.model.main.dtype

    def loss_weights(self, step: Step) -> dict[str, Scalar]:
        """That of the one term."""
        return {"mlm_loss": at(self.mlm_weight, step)}

    @property
    def generator_passes(self) -> int:
        """What the generator costs, in forward passes; a backward pass is two."""
        return 3

    def network(self, rngs: nnx.Rngs) -> Electra:
        """Generator and discriminator, as far as there are both."""
        return Electra(self.model, rngs)

    def flops_per_token(self, length: int) -> float:
        """Operations for one token of a training step on rows of `length` tokens."""
        predictions = self.masking.max_predictions(length)
        return train_flops_per_token(self.model, length, predictions, self.generator_passes)

    def mask(self, batch: Batch, key: PRNGKey) -> Masked:
        """Draw the positions to predict."""
        keys = masking.row_keys(key, batch["row"])
        return masking.mask_tokens(self.masking, batch["input_ids"], is_real(batch), keys)

    def denominators(self, batch: Batch, masked: Masked) -> dict[str, Float[Array, ""]]:
        """Number of predictions."""
        return {"mlm_loss": masked.weights.sum()}

    def sums(self, params: Params, inputs: Inputs) -> Sums:
        """`mlm_loss` and `mlm_accuracy` as `[sum, weight]`."""
        masked = inputs.masked
        logits = self.bind(params).generate(
            masked.masked_ids, context(inputs.batch), masked.masked_positions, inputs.dropout_key
        )
        return mlm_sums(logits, masked)


def require_weight(config: Config, *names: str) -> None:
    """Raises UserError where the weights with these names are 0 throughout."""
    if not any(field(config, name) or field(config, f"{name}_start") for name in names):
        weights = " and ".join(f"config.{name}" for name in names)
        raise UserError(f"{weights} = 0 leave nothing to train")


def mlm_sums(logits: Float[Array, "B P Vpad"], masked: Masked) -> Sums:
    """Loss and accuracy of the masked predictions (spec 3.4, 3.7)."""
    label_logit = jnp.take_along_axis(logits, masked.labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logit
    is_best = (label_logit >= logits.max(axis=-1)).astype(jnp.float32)
    return {
        "mlm_loss": pair(nll, masked.weights),
        "mlm_accuracy": pair(is_best, masked.weights),
    }
