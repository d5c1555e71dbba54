"""The losses of fine-tuning (spec 6.2 to 6.4): an objective like those of pre-training.

Losses are means over examples (over words in tagging); the original's are sums over the batch.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from electra_jax.finetune import heads
from electra_jax.finetune.heads import EncoderWithHead, HeadConfig
from electra_jax.modeling.encoder import EncoderConfig
from electra_jax.modeling.flops import encoder_flops
from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params
from electra_jax.objectives.base import (
    Batch,
    Inputs,
    Objective,
    Sums,
    binary_cross_entropy,
    context,
    pair,
    split_key,
)
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.schedules import Step

Outputs = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class FineTuning(Objective):
    """A task's loss on an encoder with a head. Batches have the fields of `finetune.task`."""

    encoder: EncoderConfig
    head: HeadConfig

    metrics: ClassVar[dict[str, Metric]] = {
        "loss": Metric(
            "Loss", "nats; of a regression, squared error", better="lower", console="loss"
        ),
        "start_loss": Metric("start", "nats", figure="Losses of question answering"),
        "end_loss": Metric("end", "nats", figure="Losses of question answering"),
        "answerable_loss": Metric("answerable", "nats", figure="Losses of question answering"),
        "accuracy": Metric("accuracy", better="higher", console="acc", figure="Scores"),
    }

    @property
    def dtype(self) -> DTypeLike:
        """Of the computation."""
        return self.encoder.dtype

    def loss_weights(self, step: Step) -> dict[str, float]:
        """Weight of each mean loss in the total, the same at every step."""
        if self.head.kind != "qa":
            return {"loss": 1.0}
        spans = {"start_loss": 0.5, "end_loss": 0.5}
        return spans | ({"answerable_loss": 0.5} if self.head.style == "original" else {})

    def network(self, rngs: nnx.Rngs) -> EncoderWithHead:
        """The encoder and the head on it."""
        return EncoderWithHead(self.encoder, self.head, rngs)

    def flops_per_token(self, length: int) -> float:
        """Operations for one token of a training step; those of the head are left out."""
        return 3.0 * encoder_flops(self.encoder, length)

    def mask(self, batch: Batch, key: PRNGKey) -> tuple:
        """Nothing is drawn beforehand."""
        return ()

    def totals(self, batch: Batch, masked: tuple) -> dict[str, Float[Array, ""]]:
        """Number of examples, or of words."""
        weights = batch["label"] >= 0 if self.head.kind == "tagging" else is_example(batch)
        return dict.fromkeys(self.loss_terms, weights.sum(dtype=jnp.float32))

    def sums(self, params: Params, inputs: Inputs) -> Sums:
        """The loss terms and, where it has a meaning, the accuracy, as `[sum, weight]`."""
        batch = inputs.batch
        body_key, head_key = split_key(inputs.dropout_key)
        model = self.bind(params)
        hidden = model.hidden(batch["input_ids"], context(batch), body_key)
        weights = is_example(batch)
        match self.head.kind:
            case "classification":
                return label_sums(model.head(hidden, head_key), batch["label"], weights)
            case "multilabel":
                losses = binary_cross_entropy(model.head(hidden, head_key), batch["label"])
                return {"loss": pair(losses.mean(axis=-1), weights)}
            case "regression":
                errors = model.head(hidden, head_key)[:, 0] - batch["label"]
                return {"loss": pair(errors**2, weights)}
            case "tagging":
                labels = batch["label"]
                is_word = (labels >= 0).astype(jnp.float32)
                return label_sums(model.head(hidden), jnp.maximum(labels, 0), is_word)
        return self.span_sums(model, hidden, batch, weights)

    def span_sums(
        self,
        model: EncoderWithHead,
        hidden: Float[Array, "B L H"],
        batch: Batch,
        weights: Float[Array, "B"],
    ) -> Sums:
        """The terms of question answering. Ends are those of the true starts."""
        start, end, allowed = batch["start"], batch["end"], batch["allowed"]
        if self.head.style != "original":
            logits = model.head(hidden)
            start_logits, end_logits = (heads.only_allowed(logits[..., i], allowed) for i in (0, 1))
            answerable = {}
        else:
            start_logits = model.head.start_logits(hidden, allowed)
            end_logits = model.head.end_logits(hidden, start, allowed)
            logit = model.head.answerable_logit(hidden, start_logits)
            losses = binary_cross_entropy(logit, batch["is_impossible"].astype(jnp.float32))
            answerable = {"answerable_loss": pair(losses, weights)}
        return {
            "start_loss": pair(cross_entropy(start_logits, start), weights),
            "end_loss": pair(cross_entropy(end_logits, end), weights),
            **answerable,
        }

    def outputs(self, params: Params, batch: Batch) -> Outputs:
        """What `Task.predict` takes, for each row of the batch; dropout is off."""
        model = self.bind(params)
        hidden = model.hidden(batch["input_ids"], context(batch), None)
        match self.head.kind:
            case "tagging":
                return {"logits": model.head(hidden)}
            case "qa" if self.head.style == "original":
                return model.head.beam(hidden, batch["allowed"])
            case "qa":
                logits = model.head(hidden)
                return {
                    f"{name}_logits": heads.only_allowed(logits[..., i], batch["allowed"])
                    for i, name in enumerate(("start", "end"))
                }
        logits = model.head(hidden, None)
        return {"logits": logits[:, 0] if self.head.kind == "regression" else logits}


def is_example(batch: Batch) -> Float[Array, "B"]:
    """1 for rows of the data, 0 for rows that fill up the last batch."""
    return (batch["piece_ids"] > 0).any(axis=-1).astype(jnp.float32)


def cross_entropy(
    logits: Float[Array, "*dims C"], labels: Int[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Negative log-probabilities of the labels."""
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - right


def label_sums(
    logits: Float[Array, "*dims C"], labels: Int[Array, "*dims"], weights: Float[Array, "*dims"]
) -> Sums:
    """Loss and accuracy of one label out of C."""
    is_right = (logits.argmax(axis=-1) == labels).astype(jnp.float32)
    return {
        "loss": pair(cross_entropy(logits, labels), weights),
        "accuracy": pair(is_right, weights),
    }
