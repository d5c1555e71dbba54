"""The heads of pre-training, and what they cost (spec 1.6, 1.7, 7.5)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.layers import dense, gelu, glorot_uniform, layer_norm, truncated_normal
from electra_jax.modeling.params import ParamInfo, param
from electra_jax.modeling.products import float32_einsum

VOCAB_BLOCK = 128  # output columns are padded to a multiple of this: hardware tiles, see masking.py
PADDED_LOGIT = -1e9


class MaskedLMHead(nnx.Module):
    """Dense, gelu, LayerNorm, then the transposed word table and a bias (spec 1.7)."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        init = truncated_normal(config.init_stddev)
        self.dense = dense(config.hidden_size, config.embedding_size, init, config.dtype, rngs)
        self.norm = layer_norm(config.embedding_size, config.dtype, rngs)
        self.bias = param(jnp.zeros(config.vocab_size), ParamInfo(("vocab",), decays=False))

    @staticmethod
    def flops(config: EncoderConfig) -> int:
        """Forward operations of predicting one token."""
        embedding = config.embedding_size
        return 2 * config.hidden_size * embedding + 2 * embedding * config.vocab_size

    @classmethod
    def flops_per_token(cls, config: EncoderConfig, predicted_share: float) -> float:
        """Forward operations for each token of a row, of which a share is predicted."""
        return cls.flops(config) * predicted_share

    def __call__(
        self, hidden: Float[Array, "B P H"], word: Float[Array, "V E"]
    ) -> Float[Array, "B P Vpad"]:
        """Float32 logits; columns from V on are padding with the logit `PADDED_LOGIT`."""
        padding = -len(word) % VOCAB_BLOCK
        x = self.norm(gelu(self.dense(hidden)))
        word = jnp.pad(word, ((0, padding), (0, 0))).astype(x.dtype)
        bias = jnp.pad(self.bias[...], (0, padding), constant_values=PADDED_LOGIT)
        logits = float32_einsum("bpe,ve->bpv", x, word)
        return logits + bias.astype(jnp.float32)[None, None]


class CopyHead(MaskedLMHead):
    """A masked language model's head and a gate: keep the token that is there (spec 7.5)?"""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        init = truncated_normal(config.init_stddev)
        self.copy = dense(config.hidden_size, 1, init, config.dtype, rngs)

    @classmethod
    def flops_per_token(cls, config: EncoderConfig, predicted_share: float) -> float:
        """Forward operations for each token; all of them are predicted."""
        return cls.flops(config) + 2.0 * config.hidden_size

    def gate(self, hidden: Float[Array, "B P H"]) -> Float[Array, "B P"]:
        """Float32 logits of copying."""
        return self.copy(hidden)[..., 0].astype(jnp.float32)


class ReplacedTokenHead(nnx.Module):
    """Dense, gelu, one output: a positive logit says "replaced" (spec 0.1, 1.6)."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        init = truncated_normal(config.init_stddev)
        self.dense = dense(config.hidden_size, config.hidden_size, init, config.dtype, rngs)
        self.output = dense(config.hidden_size, 1, glorot_uniform, config.dtype, rngs)

    @staticmethod
    def flops_per_token(config: EncoderConfig, predicted_share: float) -> float:
        """Forward operations for each token; all of them count."""
        return 2.0 * config.hidden_size * (config.hidden_size + 1)

    def __call__(self, hidden: Float[Array, "B L H"]) -> Float[Array, "B L"]:
        """Float32 logits."""
        return self.output(gelu(self.dense(hidden)))[..., 0].astype(jnp.float32)
