"""The start and the end of an answer in a text, and whether there is one (spec 6.4)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy

from electra_jax.finetune.heads import base
from electra_jax.finetune.heads.base import Hidden, HuggingFace, Outputs
from electra_jax.finetune.heads.token import TokenLayer
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.layers import PRNGKey, dense, gelu, glorot_uniform
from electra_jax.objectives.base import Batch, Sums, binary_cross_entropy, pair
from electra_jax.objectives.metrics import Metric

WIDTH = 512  # of the hidden layers in the joint head
BEAM = 20  # starts, and ends for each of them, that the joint head proposes
DISALLOWED = -1e3  # added to the scores of positions where no answer may start or end

Losses = dict[str, Float[Array, " B"]]
PerToken = Float[Array, "B L"]
Allowed = Int[Array, "B L"]


class TwoLayers(nnx.Module):
    """Dense, gelu, one output."""

    def __init__(self, features: int, config: EncoderConfig, rngs: nnx.Rngs):
        self.dense = dense(features, WIDTH, glorot_uniform, config.dtype, rngs)
        self.output = dense(WIDTH, 1, glorot_uniform, config.dtype, rngs)

    def __call__(self, x: Float[Array, "*dims features"]) -> Float[Array, "*dims"]:
        """Float32 logits."""
        return self.second(self.dense(x))

    def second(self, x: Float[Array, "*dims width"]) -> Float[Array, "*dims"]:
        """Float32 logits, from the first layer's outputs."""
        return self.output(gelu(x))[..., 0].astype(jnp.float32)


class JointSpans(nnx.Module):
    """Start, end given the start, and whether there is an answer at all: the original's head."""

    loss_terms: ClassVar[dict[str, float]] = dict.fromkeys(
        ("start_loss", "end_loss", "answerable_loss"), 0.5
    )
    null_threshold: ClassVar[float] = -2.75  # the original's

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.start = dense(config.hidden_size, 1, glorot_uniform, config.dtype, rngs)
        self.end = TwoLayers(2 * config.hidden_size, config, rngs)
        # Its output is `null_logit`, positive for "no answer"; checkpoints have this name for it.
        self.answerable = TwoLayers(2 * config.hidden_size, config, rngs)

    def losses(self, hidden: Hidden, batch: Batch) -> Losses:
        """Of each row. Ends are those of the true starts."""
        start_logits = self.start_logits(hidden, batch["allowed"])
        end_logits = self.ends(hidden, batch["allowed"])(batch["start"])
        null_logit = self.null_logit(hidden, start_logits)
        is_impossible = batch["is_impossible"].astype(jnp.float32)
        answerable_loss = binary_cross_entropy(null_logit, is_impossible)
        return {
            "start_loss": cross_entropy(start_logits, batch["start"]),
            "end_loss": cross_entropy(end_logits, batch["end"]),
            "answerable_loss": answerable_loss,
        }

    def outputs(self, hidden: Hidden, batch: Batch) -> Outputs:
        """The best starts, and for each of them the best ends, by log-probability.

        Returns:
          `start_top`, `start_log_prob` [B, K], `end_top`, `end_log_prob` [B, K, K] and `null_logit`
          [B], where K is `BEAM`, or L if that is less.
        """
        allowed = batch["allowed"]
        size = min(BEAM, hidden.shape[1])
        start_logits = self.start_logits(hidden, allowed)
        start_log_prob, start_top = jax.lax.top_k(jax.nn.log_softmax(start_logits), size)

        scores = self.ends(hidden, allowed)

        def best(start: Int[Array, " B"]) -> list[Array]:
            return jax.lax.top_k(jax.nn.log_softmax(scores(start)), size)

        end_log_prob, end_top = jax.lax.map(best, start_top.T)  # one start at a time: [K, B, K]
        return {
            "start_top": start_top,
            "start_log_prob": start_log_prob,
            "end_top": end_top.swapaxes(0, 1),
            "end_log_prob": end_log_prob.swapaxes(0, 1),
            "null_logit": self.null_logit(hidden, start_logits),
        }

    def start_logits(self, hidden: Hidden, allowed: Allowed) -> PerToken:
        """Scores of every position as a start."""
        return only_allowed(self.start(hidden)[..., 0].astype(jnp.float32), allowed)

    def ends(self, hidden: Hidden, allowed: Allowed) -> Callable[[Int[Array, " B"]], PerToken]:
        """A function from starts to the scores of every position as the end.

        The first layer reads the states of start and end side by side. It is linear, so their parts
        are computed apart: that of the end once, however many starts there are.
        """
        of_start, of_end = jnp.split(self.end.dense.kernel[...], 2)  # each [H, WIDTH]
        of_end = hidden @ of_end + self.end.dense.bias[...][None, None]

        def scores(start: Int[Array, " B"]) -> PerToken:
            begin = jnp.take_along_axis(hidden, start[:, None, None], axis=1)
            return only_allowed(self.end.second(begin @ of_start + of_end), allowed)

        return scores

    def null_logit(self, hidden: Hidden, start_logits: PerToken) -> Float[Array, " B"]:
        """Positive where there is no answer."""
        weights = jax.nn.softmax(start_logits).astype(hidden.dtype)
        mean = jnp.einsum("bl,blh->bh", weights, hidden)
        return self.answerable(jnp.concatenate([hidden[:, 0], mean], axis=-1))


class IndependentSpans(TokenLayer):
    """Start and end as two outputs of every token: what Hugging Face has."""

    loss_terms: ClassVar[dict[str, float]] = {"start_loss": 0.5, "end_loss": 0.5}
    null_threshold: ClassVar[float] = 0.0  # no answer is as good as the best one

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        super().__init__(config, 2, rngs)

    def losses(self, hidden: Hidden, batch: Batch) -> Losses:
        """Of each row."""
        logits = self.outputs(hidden, batch)
        return {
            "start_loss": cross_entropy(logits["start_logits"], batch["start"]),
            "end_loss": cross_entropy(logits["end_logits"], batch["end"]),
        }

    def outputs(self, hidden: Hidden, batch: Batch) -> Outputs:
        """`start_logits` and `end_logits` [B, L]."""
        logits = self(hidden)
        return {
            f"{name}_logits": only_allowed(logits[..., i], batch["allowed"])
            for i, name in enumerate(("start", "end"))
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans(base.Head):
    """A span of a text, or none; the style decides which layers propose it.

    All rows have `allowed` int32 [B, L]: where an answer may start or end. Rows to train on have
    `start`, `end` int32 [B], 0 if the row does not hold the whole answer, and `is_impossible`.
    """

    metrics: ClassVar[Mapping[str, Metric]] = {"loss": base.LOSS} | {
        f"{name}_loss": Metric(name, "nats", better="lower", figure="Losses of question answering")
        for name in ("start", "end", "answerable")
    }
    inputs: ClassVar[tuple[str, ...]] = ("allowed",)
    from_data: ClassVar[tuple[str, ...]] = ()
    huggingface: ClassVar[HuggingFace] = HuggingFace("qa")

    @property
    def kind(self) -> type[JointSpans] | type[IndependentSpans]:
        """The layers of this style."""
        return JointSpans if self.style == "original" else IndependentSpans

    @property
    def loss_terms(self) -> Mapping[str, float]:
        """Those of the layers."""
        return self.kind.loss_terms

    def layers(self, encoder: EncoderConfig, rngs: nnx.Rngs) -> nnx.Module:
        """See `Head.layers`."""
        return self.kind(encoder, rngs)

    def sums(self, layers: nnx.Module, hidden: Hidden, batch: Batch, key: PRNGKey | None) -> Sums:
        """The loss terms."""
        weights = self.weights(batch)
        return {name: pair(x, weights) for name, x in layers.losses(hidden, batch).items()}

    def outputs(self, layers: nnx.Module, hidden: Hidden, batch: Batch) -> Outputs:
        """Those of the layers."""
        return layers.outputs(hidden, batch)


def only_allowed(logits: PerToken, allowed: Allowed) -> PerToken:
    """`logits`, far lower where `allowed` is 0."""
    return logits + jnp.where(allowed > 0, 0.0, DISALLOWED)
