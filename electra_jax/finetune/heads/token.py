"""A label for each word, from the state of its first token (spec 6.3)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from electra_jax.finetune.heads import base
from electra_jax.finetune.heads.base import Hidden, HuggingFace, Outputs
from electra_jax.finetune.scores import ACCURACY
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.layers import PRNGKey, dense, glorot_uniform
from electra_jax.objectives.base import Batch, Sums
from electra_jax.objectives.metrics import Metric


class TokenLayer(nnx.Module):
    """A linear layer on every token, without dropout."""

    def __init__(self, config: EncoderConfig, num_outputs: int, rngs: nnx.Rngs):
        self.output = dense(config.hidden_size, num_outputs, glorot_uniform, config.dtype, rngs)

    def __call__(self, hidden: Hidden) -> Float[Array, "B L outputs"]:
        """Float32 outputs of every token."""
        return self.output(hidden).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tagging(base.Head):
    """One of the labels for each word; both styles are the same. Outputs: `logits` [B, L, C].

    Rows to train on have `label` int32 [B, L]: that of a word at its first token, else -1.
    """

    metrics: ClassVar[Mapping[str, Metric]] = {"loss": base.LOSS, "accuracy": ACCURACY}
    huggingface: ClassVar[HuggingFace] = HuggingFace("tagger")

    def layers(self, encoder: EncoderConfig, rngs: nnx.Rngs) -> TokenLayer:
        """See `Head.layers`."""
        return TokenLayer(encoder, len(self.labels), rngs)

    def sums(self, layers: TokenLayer, hidden: Hidden, batch: Batch, key: PRNGKey | None) -> Sums:
        """Loss and accuracy of words."""
        is_word = self.weights(batch).astype(jnp.float32)
        return base.label_sums(layers(hidden), jnp.maximum(batch["label"], 0), is_word)

    def outputs(self, layers: TokenLayer, hidden: Hidden, batch: Batch) -> Outputs:
        """Logits of every label at every token."""
        return {"logits": layers(hidden)}

    def weights(self, batch: Batch) -> Bool[Array, "B L"]:
        """True at the first token of each word."""
        return batch["label"] >= 0
