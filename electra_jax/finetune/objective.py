"""The objective of fine-tuning: the loss of a head on an encoder.

Losses are means over examples (over words in tagging); the original's are sums over the batch.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from electra_jax.finetune.heads.base import Head, Outputs
from electra_jax.modeling.encoders import encoder_class
from electra_jax.modeling.encoders.base import Context, EncoderConfig, encode
from electra_jax.modeling.layers import PRNGKey, split_key
from electra_jax.modeling.params import Params
from electra_jax.objectives.base import Batch, Inputs, Objective, Sums, context
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.schedules import Step


class EncoderWithHead(nnx.Module):
    """The network. Its parameters are `{"embeddings", "encoder", "head"}`."""

    def __init__(self, config: EncoderConfig, head: Head, rngs: nnx.Rngs):
        kind = encoder_class(config)
        self.embeddings = kind.Embeddings(config, rngs)
        self.encoder = kind(config, rngs)
        self.head = head.layers(config, rngs)

    def hidden(
        self, ids: Int[Array, "B L"], context: Context, key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """The last layer's states. `key` seeds dropout; None switches it off."""
        return encode(self.embeddings, self.encoder, ids, context, key)


@dataclasses.dataclass(frozen=True)
class FineTuning(Objective):
    """The loss of `head`. Batches hold features of a task, see `finetune.tasks`."""

    encoder: EncoderConfig
    head: Head

    @property
    def dtype(self) -> DTypeLike:
        """See `Objective.dtype`."""
        return self.encoder.dtype

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `Head.metrics`."""
        return self.head.metrics

    def loss_weights(self, step: Step) -> dict[str, float]:
        """Weight of each mean loss in the total, the same at every step."""
        return dict(self.head.loss_terms)

    def network(self, rngs: nnx.Rngs) -> EncoderWithHead:
        """The encoder and the head on it."""
        return EncoderWithHead(self.encoder, self.head, rngs)

    def flops_per_token(self, length: int) -> float:
        """Operations for one token of a training step; those of the head are left out."""
        return 3.0 * encoder_class(self.encoder).flops_per_token(self.encoder, length)

    def mask(self, batch: Batch, key: PRNGKey) -> tuple:
        """Nothing is drawn beforehand."""
        return ()

    def denominators(self, batch: Batch, masked: tuple) -> dict[str, Float[Array, ""]]:
        """Number of examples, or of words."""
        return dict.fromkeys(self.loss_terms, self.head.weights(batch).sum(dtype=jnp.float32))

    def sums(self, params: Params, inputs: Inputs) -> Sums:
        """See `Head.sums`."""
        batch = inputs.batch
        body_key, head_key = split_key(inputs.dropout_key)
        model = self.bind(params)
        hidden = model.hidden(batch["input_ids"], context(batch), body_key)
        return self.head.sums(model.head, hidden, batch, head_key)

    def outputs(self, params: Params, batch: Batch) -> Outputs:
        """What `Task.predict` takes, for each row of the batch; dropout is off."""
        model = self.bind(params)
        hidden = model.hidden(batch["input_ids"], context(batch), None)
        return self.head.outputs(model.head, hidden, batch)
