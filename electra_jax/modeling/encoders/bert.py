"""The encoder of BERT and ELECTRA: learned positions, post-LN layers (spec 1.1 to 1.4)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from electra_jax.modeling.attention import Segments, attend
from electra_jax.modeling.encoders.base import Context, Embeddings, Encoder, EncoderConfig, table
from electra_jax.modeling.layers import (
    PRNGKey,
    dense,
    dropout,
    gelu,
    layer_norm,
    split_key,
    truncated_normal,
)
from electra_jax.settings import COUNT, setting


@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """Beside what all encoders have, segments of two kinds."""

    token_types: int = setting(2, "rows of the table that tells first from second text", COUNT)


class BertEmbeddings(Embeddings):
    """Word, position and token-type tables (spec 1.2)."""

    def __init__(
        self, config: BertConfig, rngs: nnx.Rngs, table_init: nnx.Initializer | None = None
    ):
        width, init = config.embedding_size, table_init or truncated_normal(config.init_stddev)
        self.word = table(config.vocab_size, width, init, rngs)
        self.position = table(config.max_positions, width, init, rngs)
        self.token_type = table(config.token_types, width, init, rngs)
        self.norm = layer_norm(width, config.dtype, rngs, depth="input")
        self.rate = config.dropout

    def look_up(self, ids: Int[Array, "B L"], context: Context) -> Float[Array, "B L E"]:
        """The sum of the three tables' rows."""
        position, token_type = context.position_ids, context.token_type_ids
        return self.word[ids] + self.position[position] + self.token_type[token_type]


class SelfAttention(nnx.Module):
    """Multi-head attention with dropout on the probabilities."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        width, heads = (
            config.hidden_size,
            (config.num_heads, config.hidden_size // config.num_heads),
        )
        init = truncated_normal(config.init_stddev)
        qkv_axes, out_axes = ("embed", None, "heads", None), ("heads", None, "embed")
        self.qkv = dense(width, (3, *heads), init, config.dtype, rngs, qkv_axes)
        self.out = dense(heads, width, init, config.dtype, rngs, out_axes)
        self.rate = config.attention_dropout

    def __call__(
        self, x: Float[Array, "B L H"], segments: Segments, key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """Attend within the own segment."""
        qkv = jnp.split(self.qkv(x), 3, axis=2)  # each [B, L, 1, A, D]
        query, key_, value = (part[:, :, 0] for part in qkv)
        return self.out(attend(query, key_, value, segments, dropout=self.rate, dropout_key=key))


class BertLayer(nnx.Module):
    """Attention, then feed-forward, each added to its input and normalized (spec 1.4)."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        width, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        init = truncated_normal(config.init_stddev)
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = layer_norm(width, dtype, rngs)
        self.up = dense(width, inner, init, dtype, rngs, ("embed", "mlp"))
        self.down = dense(inner, width, init, dtype, rngs, ("mlp", "embed"))
        self.output_norm = layer_norm(width, dtype, rngs)
        self.rate = config.dropout

    @staticmethod
    def flops_per_token(config: BertConfig, length: int) -> int:
        """Forward operations for a token in a row of `length` tokens."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return 8 * hidden * hidden + 4 * hidden * inner + 4 * length * hidden

    def __call__(
        self, x: Float[Array, "B L H"], segments: Segments, key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """Attend within the own segment, then transform each token."""
        keys = split_key(key, 3)
        with jax.named_scope("attention"):
            attended = dropout(self.attention(x, segments, keys[0]), self.rate, keys[1])
            x = self.attention_norm(x + attended)
        with jax.named_scope("feed_forward"):
            x = self.output_norm(x + dropout(self.down(gelu(self.up(x))), self.rate, keys[2]))
        return x


class Bert(Encoder):
    """BERT's layers; ELECTRA adds a projection in front where the tables are narrower."""

    Config, Embeddings, Layer = BertConfig, BertEmbeddings, BertLayer
