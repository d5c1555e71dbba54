"""What stands on an encoder in fine-tuning (spec 6.2 to 6.4), and the network made of both.

Its parameters are `{"embeddings", "encoder", "head"}`. Heads compute in the encoder's dtype; their
outputs are float32.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from electra_jax.modeling.electra import Context, run_tower
from electra_jax.modeling.encoder import Embeddings, Encoder, EncoderConfig
from electra_jax.modeling.layers import (
    PRNGKey,
    dense,
    dropout,
    gelu,
    glorot_uniform,
    truncated_normal,
)

KINDS = ("classification", "multilabel", "regression", "tagging", "qa")
SPAN_WIDTH = 512  # of the hidden layers in the joint head (spec 6.4)
BEAM = 20  # starts, and ends for each of them, that the joint head proposes
DISALLOWED = -1e3  # added to the scores of positions where no answer may start or end


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What to predict.

    Attributes:
      kind: one of `KINDS`.
      num_outputs: labels; 1 for a regression; not used by `qa`.
      style: `original`, or `huggingface` where the classes of `transformers` have another head:
        one more dense layer for sentences, independent starts and ends for `qa`.
    """

    kind: str
    num_outputs: int = 1
    style: str = "original"


class SentenceHead(nnx.Module):
    """Dropout and a linear layer on the state of `[CLS]` (spec 6.2).

    Hugging Face's has dropout, a dense layer and gelu before that.
    """

    def __init__(self, config: EncoderConfig, head: HeadConfig, rngs: nnx.Rngs):
        width, dtype = config.hidden_size, config.dtype
        init = truncated_normal(config.init_stddev)
        self.dense = dense(width, width, init, dtype, rngs) if head.style == "huggingface" else None
        self.output = dense(width, head.num_outputs, glorot_uniform, dtype, rngs)
        self.rate = config.dropout

    def __call__(
        self, hidden: Float[Array, "B L H"], key: PRNGKey | None
    ) -> Float[Array, "B outputs"]:
        """One row of outputs for each text."""
        first, second = (None, None) if key is None else jax.random.split(key)
        x = dropout(hidden[:, 0], self.rate, first)
        if self.dense is not None:
            x = dropout(gelu(self.dense(x)), self.rate, second)
        return self.output(x).astype(jnp.float32)


class TokenHead(nnx.Module):
    """A linear layer on every token, without dropout (spec 6.3)."""

    def __init__(self, config: EncoderConfig, num_outputs: int, rngs: nnx.Rngs):
        self.output = dense(config.hidden_size, num_outputs, glorot_uniform, config.dtype, rngs)

    def __call__(self, hidden: Float[Array, "B L H"]) -> Float[Array, "B L outputs"]:
        """Outputs of every token."""
        return self.output(hidden).astype(jnp.float32)


class TwoLayers(nnx.Module):
    """Dense, gelu, one output."""

    def __init__(self, features: int, config: EncoderConfig, rngs: nnx.Rngs):
        self.dense = dense(features, SPAN_WIDTH, glorot_uniform, config.dtype, rngs)
        self.output = dense(SPAN_WIDTH, 1, glorot_uniform, config.dtype, rngs)

    def __call__(self, x: Float[Array, "*dims features"]) -> Float[Array, "*dims"]:
        """Float32 logits."""
        return self.second(self.dense(x))

    def second(self, x: Float[Array, "*dims width"]) -> Float[Array, "*dims"]:
        """Float32 logits, from the first layer's outputs."""
        return self.output(gelu(x))[..., 0].astype(jnp.float32)


class JointSpanHead(nnx.Module):
    """Start, end given the start, and whether there is an answer at all (spec 6.4)."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.start = dense(config.hidden_size, 1, glorot_uniform, config.dtype, rngs)
        self.end = TwoLayers(2 * config.hidden_size, config, rngs)
        self.answerable = TwoLayers(2 * config.hidden_size, config, rngs)

    def start_logits(
        self, hidden: Float[Array, "B L H"], allowed: Int[Array, "B L"]
    ) -> Float[Array, "B L"]:
        """Scores of every position as a start."""
        return only_allowed(self.start(hidden)[..., 0].astype(jnp.float32), allowed)

    def end_logits(
        self,
        hidden: Float[Array, "B L H"],
        start: Int[Array, "B"],
        allowed: Int[Array, "B L"],
    ) -> Float[Array, "B L"]:
        """Scores of every position as the end of the answer that begins at `start`."""
        return self.ends(hidden, allowed)(start)

    def ends(
        self, hidden: Float[Array, "B L H"], allowed: Int[Array, "B L"]
    ) -> Callable[[Int[Array, "B"]], Float[Array, "B L"]]:
        """A function from starts to the scores of every position as the end.

        The first layer reads the states of start and end side by side. It is linear, so their parts
        are computed apart: that of the end once, however many starts there are.
        """
        of_start, of_end = jnp.split(self.end.dense.kernel[...], 2)  # each [H, SPAN_WIDTH]
        of_end = hidden @ of_end + self.end.dense.bias[...][None, None]

        def scores(start: Int[Array, "B"]) -> Float[Array, "B L"]:
            begin = jnp.take_along_axis(hidden, start[:, None, None], axis=1)
            return only_allowed(self.end.second(begin @ of_start + of_end), allowed)

        return scores

    def answerable_logit(
        self, hidden: Float[Array, "B L H"], start_logits: Float[Array, "B L"]
    ) -> Float[Array, "B"]:
        """Positive where there is no answer."""
        weights = jax.nn.softmax(start_logits).astype(hidden.dtype)
        mean = jnp.einsum("bl,blh->bh", weights, hidden)
        return self.answerable(jnp.concatenate([hidden[:, 0], mean], axis=-1))

    def beam(self, hidden: Float[Array, "B L H"], allowed: Int[Array, "B L"]) -> dict[str, Array]:
        """The best starts, and for each of them the best ends, by log-probability.

        Returns:
          `start_top`, `start_log_prob` [B, K], `end_top`, `end_log_prob` [B, K, K] and
          `answerable_logit` [B], where K is `BEAM`, or L where that is less.
        """
        size = min(BEAM, hidden.shape[1])
        start_logits = self.start_logits(hidden, allowed)
        start_log_prob, start_top = jax.lax.top_k(jax.nn.log_softmax(start_logits), size)

        scores = self.ends(hidden, allowed)

        def best(start: Int[Array, "B"]) -> list[Array]:
            return jax.lax.top_k(jax.nn.log_softmax(scores(start)), size)

        end_log_prob, end_top = jax.lax.map(best, start_top.T)  # one start at a time: [K, B, K]
        return {
            "start_top": start_top,
            "start_log_prob": start_log_prob,
            "end_top": end_top.swapaxes(0, 1),
            "end_log_prob": end_log_prob.swapaxes(0, 1),
            "answerable_logit": self.answerable_logit(hidden, start_logits),
        }


def only_allowed(logits: Float[Array, "B L"], allowed: Int[Array, "B L"]) -> Float[Array, "B L"]:
    """`logits`, far lower where `allowed` is 0."""
    return logits + jnp.where(allowed > 0, 0.0, DISALLOWED)


class EncoderWithHead(nnx.Module):
    """An encoder, its embeddings and a head."""

    def __init__(self, config: EncoderConfig, head: HeadConfig, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        if head.kind == "tagging":
            self.head = TokenHead(config, head.num_outputs, rngs)
        elif head.kind != "qa":
            self.head = SentenceHead(config, head, rngs)
        elif head.style == "original":
            self.head = JointSpanHead(config, rngs)
        else:
            self.head = TokenHead(config, 2, rngs)

    def hidden(
        self, ids: Int[Array, "B L"], context: Context, key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """The last layer's states. `key` seeds dropout; None switches it off."""
        return run_tower(self.embeddings, self.encoder, ids, context, key)
