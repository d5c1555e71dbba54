"""Masked language modelling: BERT's objective with masks drawn anew in every step (spec 3.9).

It is also the generator's half of ELECTRA, so its pieces are shared with `electra.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from electra_jax import masking
from electra_jax.masking import Masked, MaskingConfig
from electra_jax.modeling import electra
from electra_jax.modeling.electra import Context, Electra, ElectraConfig, Params
from electra_jax.modeling.layers import PRNGKey

Batch = dict[str, Int[Array, "B ..."]]
Sums = dict[str, Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModel:
    """Predict the original token at the masked positions.

    Attributes:
      generator_weight: multiplies the mean loss.
    """

    model: ElectraConfig
    masking: MaskingConfig
    generator_weight: float = 1.0

    @property
    def loss_terms(self) -> dict[str, float]:
        """Weight of each mean loss in the total."""
        return {"mlm_loss": self.generator_weight}

    def init(self, key: PRNGKey) -> Params:
        """Fresh parameters."""
        return electra.init(self.model, key)[1]

    def structure(self) -> Params:
        """Shapes and dtypes of the parameters."""
        return electra.structure(self.model)[1]

    def bind(self, params: Params) -> Electra:
        """The model with `params` cast, once, to the compute dtype."""
        graph = electra.structure(self.model)[0]
        dtype = self.model.generator.dtype
        return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), params))

    def mask(self, batch: Batch, key: PRNGKey) -> Masked:
        """Draw the positions to predict."""
        keys = masking.row_keys(key, batch["row"])
        return masking.mask_tokens(self.masking, batch["input_ids"], is_real(batch), keys)

    def totals(self, batch: Batch, masked: Masked) -> dict[str, Float[Array, ""]]:
        """Number of predictions."""
        return {"mlm_loss": masked.weights.sum()}

    def sums(
        self,
        params: Params,
        batch: Batch,
        masked: Masked,
        key: PRNGKey,
        dropout_key: PRNGKey | None,
        evaluation: bool,
    ) -> Sums:
        """`mlm_loss` and `mlm_accuracy` as `[sum, weight]`."""
        logits = self.bind(params).generate(
            masked.masked_ids, context(batch), masked.masked_positions, dropout_key
        )
        return mlm_sums(logits, masked)


def is_real(batch: Batch) -> Array:
    """True for tokens, False for padding; bool [B, L]."""
    return batch["piece_ids"] > 0


def context(batch: Batch) -> Context:
    """What both towers read beside the ids."""
    return Context(batch["piece_ids"], batch["position_ids"], batch["token_type_ids"])


def pair(values: Float[Array, "*dims"], weights: Float[Array, "*dims"]) -> Float[Array, "2"]:
    """`[weighted sum, weight]`: divide the one by the other for the mean."""
    return jnp.stack([(values * weights).sum(), weights.sum()])


def mlm_sums(logits: Float[Array, "B P Vpad"], masked: Masked) -> Sums:
    """Loss and accuracy of the masked predictions (spec 3.4, 3.7)."""
    label_logit = jnp.take_along_axis(logits, masked.labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logit
    is_best = (label_logit >= logits.max(axis=-1)).astype(jnp.float32)
    return {
        "mlm_loss": pair(nll, masked.weights),
        "mlm_accuracy": pair(is_best, masked.weights),
    }
