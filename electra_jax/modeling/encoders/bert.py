"""The encoder of BERT and ELECTRA: learned positions, post-LN layers (spec 1.1 to 1.4)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from electra_jax.modeling.attention import Segments, attend
from electra_jax.modeling.encoders.base import Context, Embeddings, Encoder, EncoderConfig, table
from electra_jax.modeling.encoders.naming import Dialect, Naming, Part
from electra_jax.modeling.layers import (
    LAYER_NORM_EPSILON,
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


# ELECTRA's names (spec 1.9); BERT's are read, too.
NAMING = Naming(
    model_type="electra",
    prefix="electra.",
    modules={
        "embeddings/word": ("electra.embeddings.word_embeddings",),
        "embeddings/position": ("electra.embeddings.position_embeddings",),
        "embeddings/token_type": ("electra.embeddings.token_type_embeddings",),
        "embeddings/norm": ("electra.embeddings.LayerNorm",),
        "encoder/projection": ("electra.embeddings_project",),
        "encoder/layers/attention/qkv": (
            "electra.encoder.layer.{}.attention.self.query",
            "electra.encoder.layer.{}.attention.self.key",
            "electra.encoder.layer.{}.attention.self.value",
        ),
        "encoder/layers/attention/out": ("electra.encoder.layer.{}.attention.output.dense",),
        "encoder/layers/attention_norm": ("electra.encoder.layer.{}.attention.output.LayerNorm",),
        "encoder/layers/up": ("electra.encoder.layer.{}.intermediate.dense",),
        "encoder/layers/down": ("electra.encoder.layer.{}.output.dense",),
        "encoder/layers/output_norm": ("electra.encoder.layer.{}.output.LayerNorm",),
    },
    parts={
        "encoder": Part(
            "ElectraModel", "An ELECTRA encoder: hidden states for every token, to be fine-tuned."
        ),
        "discriminator": Part(
            "ElectraForPreTraining",
            "An ELECTRA discriminator: a positive logit says that a token was replaced. It is the "
            "part to fine-tune. It does not fill masks; the generator does.",
            {
                "head/dense": "discriminator_predictions.dense",
                "head/output": "discriminator_predictions.dense_prediction",
            },
        ),
        "generator": Part(
            "ElectraForMaskedLM",
            "An ELECTRA generator, a masked language model: it fills masks. To fine-tune, use the "
            "discriminator where there is one.",
            {
                "head/dense": "generator_predictions.dense",
                "head/norm": "generator_predictions.LayerNorm",
                "head": "generator_lm_head",
            },
        ),
        "classifier": Part(
            "ElectraForSequenceClassification",
            "An ELECTRA encoder fine-tuned to classify or rate texts.",
            {"head/dense": "classifier.dense", "head/output": "classifier.out_proj"},
        ),
        "qa": Part(
            "ElectraForQuestionAnswering",
            "An ELECTRA encoder fine-tuned to find answers in a text.",
            {"head/output": "qa_outputs"},
        ),
        "tagger": Part(
            "ElectraForTokenClassification",
            "An ELECTRA encoder fine-tuned to label words.",
            {"head/output": "classifier"},
        ),
    },
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    sizes={
        "vocab_size": "vocab_size",
        "embedding_size": "embedding_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "token_types": "type_vocab_size",
    },
    rates={
        "dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
        "init_stddev": ("initializer_range", 0.02),
    },
    fixed={
        "hidden_act": "gelu",
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    },
    written={
        "hidden_act": "gelu",
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "tie_word_embeddings": True,
    },
    dialects={
        "electra": Dialect(),
        "bert": Dialect(
            {"embedding_size": "hidden_size"},
            ((r"^(classifier|qa_outputs)\.", "a fine-tuned head of BERT's"),),
        ),
    },
    spellings=(  # BERT's, those of a file without a head, those of old files
        (r"^bert\.", "electra."),
        (r"^(embeddings|embeddings_project|encoder|pooler)\.", r"electra.\1."),
        (r"^cls\.predictions\.transform\.", "generator_predictions."),
        (r"^cls\.predictions\.bias$", "generator_lm_head.bias"),
        (r"^cls\.predictions\.decoder\.", "generator_lm_head."),
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    ),
    without_a_place=(
        (
            r"^electra\.embeddings\.(position_ids|token_type_ids)$",
            "numbers 0, 1, 2 ..., no weights",
        ),
        (r"^electra\.pooler\.", "BERT's pooler; ELECTRA has none"),
        (r"^cls\.seq_relationship\.", "BERT's head for the next sentence; ELECTRA has none"),
    ),
)


class Bert(Encoder):
    """BERT's layers; ELECTRA adds a projection in front where the tables are narrower."""

    Config, Embeddings, Layer, naming = BertConfig, BertEmbeddings, BertLayer, NAMING
