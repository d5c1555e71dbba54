"""The transformer encoder: embeddings in front, post-LN BERT layers behind (spec 1.1 to 1.4)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from electra_jax.modeling.layers import (
    DENSE_OUTPUT,
    PRNGKey,
    dense,
    dropout,
    float32_einsum,
    gelu,
    glorot_uniform,
    layer_norm,
    truncated_normal,
)

MASKED_SCORE = -1e9  # added to the scores of keys that a query may not attend to

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(DENSE_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and numerics of one tower.

    Attributes:
      remat: what the backward pass recomputes; `none` keeps every intermediate value, `dots`
        keeps matrix products with parameters, `full` keeps the input of each layer only.
      scan_unroll: layers per iteration of the scan; `num_layers` unrolls it completely.
      dtype: of activations and matrix products. Parameters are always float32.
    """

    vocab_size: int
    embedding_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int = 512
    token_types: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    init_stddev: float = 0.02
    remat: str = "none"
    scan_unroll: int = 1
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.num_heads=} must divide {self.hidden_size=}")


class Embeddings(nnx.Module):
    """Word, position and token-type tables, summed, normalised and dropped out (spec 1.2)."""

    def __init__(
        self, config: EncoderConfig, rngs: nnx.Rngs, table_init: nnx.Initializer | None = None
    ):
        init = table_init or truncated_normal(config.init_stddev)

        def table(rows: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (rows, config.embedding_size)))

        self.word = table(config.vocab_size)
        self.position = table(config.max_positions)
        self.token_type = table(config.token_types)
        self.norm = layer_norm(config.embedding_size, config.dtype, rngs)
        self.rate = config.dropout

    def __call__(
        self,
        ids: Int[Array, "B L"],
        position_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
        key: PRNGKey | None,
        base: "Embeddings | None" = None,
    ) -> Float[Array, "B L E"]:
        """Embedded tokens.

        Args:
          key: seeds dropout, None switches it off.
          base: tables that these ones are added to. No gradient reaches them.
        """
        x = self.look_up(ids, position_ids, token_type_ids)
        if base is not None:
            x += jax.lax.stop_gradient(base.look_up(ids, position_ids, token_type_ids))
        return dropout(self.norm(x), self.rate, key)

    def look_up(
        self,
        ids: Int[Array, "B L"],
        position_ids: Int[Array, "B L"],
        token_type_ids: Int[Array, "B L"],
    ) -> Float[Array, "B L E"]:
        """The sum of the three tables' rows."""
        return self.word[ids] + self.position[position_ids] + self.token_type[token_type_ids]


class SelfAttention(nnx.Module):
    """Multi-head attention with dropout on the probabilities."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        heads = (config.num_heads, config.hidden_size // config.num_heads)
        init = truncated_normal(config.init_stddev)
        self.qkv = dense(config.hidden_size, (3, *heads), init, config.dtype, rngs)
        self.out = dense(heads, config.hidden_size, init, config.dtype, rngs)
        self.rate = config.attention_dropout

    def __call__(
        self, x: Float[Array, "B L H"], bias: Float[Array, "B 1 L L"], key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """Attend where `bias` is 0."""
        qkv = jnp.split(self.qkv(x), 3, axis=2)  # each [B, L, 1, A, D]
        query, key_, value = (part[:, :, 0] for part in qkv)
        query = query / math.sqrt(query.shape[-1])
        scores = float32_einsum("bqad,bkad->baqk", query, key_)
        weights = dropout(jax.nn.softmax(scores + bias).astype(x.dtype), self.rate, key)
        return self.out(jnp.einsum("baqk,bkad->bqad", weights, value))


class EncoderLayer(nnx.Module):
    """One post-LN layer: attention, then feed-forward, each added and normalised (spec 1.4)."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        init = truncated_normal(config.init_stddev)
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = layer_norm(config.hidden_size, config.dtype, rngs)
        self.up = dense(config.hidden_size, config.intermediate_size, init, config.dtype, rngs)
        self.down = dense(config.intermediate_size, config.hidden_size, init, config.dtype, rngs)
        self.output_norm = layer_norm(config.hidden_size, config.dtype, rngs)
        self.rate = config.dropout

    def __call__(
        self, x: Float[Array, "B L H"], bias: Float[Array, "B 1 L L"], key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """Attend where `bias` is 0, then transform each token."""
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        with jax.named_scope("attention"):
            attended = dropout(self.attention(x, bias, keys[0]), self.rate, keys[1])
            x = self.attention_norm(x + attended)
        with jax.named_scope("feed_forward"):
            x = self.output_norm(x + dropout(self.down(gelu(self.up(x))), self.rate, keys[2]))
        return x


class Encoder(nnx.Module):
    """A stack of layers over embedded input.

    The layers' parameters are stacked, `[N, ...]`, and scanned over. `projection` exists only
    where the embedding width differs from the hidden width (spec 1.2).
    """

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.projection = (
            dense(config.embedding_size, config.hidden_size, glorot_uniform, config.dtype, rngs)
            if config.embedding_size != config.hidden_size
            else None
        )
        keys = jax.random.split(rngs.params(), config.num_layers)
        graph = nnx.graphdef(nnx.eval_shape(lambda: EncoderLayer(config, nnx.Rngs(0))))
        self.layers = nnx.merge(
            graph, jax.vmap(lambda key: nnx.state(EncoderLayer(config, nnx.Rngs(params=key))))(keys)
        )
        self.num_layers = config.num_layers
        self.remat = config.remat
        self.scan_unroll = config.scan_unroll

    def __call__(
        self,
        embedded: Float[Array, "B L E"],
        bias: Float[Array, "B 1 L L"],
        key: PRNGKey | None,
    ) -> Float[Array, "B L H"]:
        """Hidden states of the last layer."""
        return self.hidden_states(embedded, bias, key)[0]

    def hidden_states(
        self,
        embedded: Float[Array, "B L E"],
        bias: Float[Array, "B 1 L L"],
        key: PRNGKey | None,
        every_layer: bool = False,
    ) -> tuple[Float[Array, "B L H"], Float[Array, "states B L H"] | None]:
        """The last layer and, when asked for, the input of the stack and all its layers."""
        graph, stacked = nnx.split(self.layers)

        def layer(x, params_and_key):
            params, layer_key = params_and_key
            x = nnx.merge(graph, params)(x, bias, layer_key)
            return x, (x if every_layer else None)

        if self.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=False)
        x = embedded if self.projection is None else self.projection(embedded)
        keys = None if key is None else jax.random.split(key, self.num_layers)
        last, states = jax.lax.scan(layer, x, (stacked, keys), unroll=self.scan_unroll)
        return last, jnp.concatenate([x[None], states]) if every_layer else None


def attention_bias(piece_ids: Int[Array, "B L"]) -> Float[Array, "B 1 L L"]:
    """0 where query and key belong to the same piece of text, `MASKED_SCORE` elsewhere.

    Pieces packed into one row are numbered from 1. Padding, 0, attends to itself, so that every
    query has a key; nothing else attends to it.
    """
    same = piece_ids[:, :, None] == piece_ids[:, None, :]
    return jnp.where(same, 0.0, MASKED_SCORE)[:, None]
