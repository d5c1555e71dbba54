"""What every encoder has: sizes, embeddings in front, and a stack of layers that is scanned over.

An encoder says in one file what is its own:

    @dataclasses.dataclass(frozen=True)
    class MyConfig(EncoderConfig):
        window: int = setting(64, "tokens to either side that local layers see", COUNT)

    class MyEmbeddings(Embeddings): ...  # its tables
    class MyLayer(nnx.Module): ...

    class MyEncoder(Encoder):
        Config, Embeddings, Layer = MyConfig, MyEmbeddings, MyLayer

What layers have in common, such as tables of relative positions, are parameters of the encoder that
`Encoder.shared` hands to all of them; in what they differ, `Encoder.layer_flags` says.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from electra_jax.modeling.attention import Segments
from electra_jax.modeling.encoders.naming import Naming
from electra_jax.modeling.layers import PRNGKey, dense, dropout, glorot_uniform, split_key
from electra_jax.modeling.params import ParamInfo, param
from electra_jax.modeling.products import DENSE_OUTPUT

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(DENSE_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}

# Fields that change how an encoder computes, and none of its parameters.
NUMERICS = ("dropout", "attention_dropout", "init_stddev", "remat", "scan_unroll", "dtype")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and numerics of one encoder.

    Subclasses add the settings that only theirs has, each made by `setting`: these join
    `config.model`.

    Attributes:
      encoder: which one it is, a key of `ENCODERS`.
      max_positions: tokens in a row at most.
      remat: what the backward pass recomputes; `none` keeps every intermediate value, `dots`
        keeps matrix products with parameters, `full` keeps the input of each layer only.
      scan_unroll: layers per iteration of the scan; `num_layers` unrolls it completely.
      dtype: of activations and matrix products. Parameters are always float32.
    """

    encoder: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    dropout: float
    attention_dropout: float
    init_stddev: float
    remat: str
    scan_unroll: int
    dtype: DTypeLike

    def sizes(self) -> dict[str, Any]:
        """All fields but the numerics: what weights must have been made with to fit."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in NUMERICS
        }

    def __post_init__(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.num_heads=} must divide {self.hidden_size=}")


def num_heads(hidden_size: int) -> int:
    """One attention head for every 64 of width, at least one (spec 1.1)."""
    return max(1, hidden_size // 64)


def compute_dtype(name: str) -> jnp.dtype:
    """What `config.model.dtype` stands for on this machine."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What an encoder reads beside the token ids; the same for original and corrupted ids."""

    segment_ids: Int[Array, "B L"]
    position_ids: Int[Array, "B L"]
    token_type_ids: Int[Array, "B L"]


class Embeddings(nnx.Module):
    """The sum of rows of tables, normalized and dropped out.

    Subclasses are made of a config, rngs and, if the tables are not to be drawn as usual, their
    initializer. They have tables, `word` among them, a module `norm` and a `rate` of dropout.
    """

    def look_up(self, ids: Int[Array, "B L"], context: Context) -> Float[Array, "B L E"]:
        """The sum of the tables' rows."""
        raise NotImplementedError

    def __call__(
        self,
        ids: Int[Array, "B L"],
        context: Context,
        key: PRNGKey | None,
        base: "Embeddings | None" = None,
    ) -> Float[Array, "B L E"]:
        """Embedded tokens.

        Args:
          key: seeds dropout, None switches it off.
          base: tables that these ones are added to. No gradient reaches them.
        """
        x = self.look_up(ids, context)
        if base is not None:
            x += jax.lax.stop_gradient(base.look_up(ids, context))
        return dropout(self.norm(x), self.rate, key)


def table(rows: int, width: int, init: nnx.Initializer, rngs: nnx.Rngs) -> nnx.Param:
    """A table of embeddings."""
    return param(init(rngs.params(), (rows, width)), ParamInfo(("vocab", "embed"), depth="input"))


class Encoder(nnx.Module):
    """A stack of layers over embedded input.

    The layers' parameters are stacked, `[N, ...]`, and scanned over. `projection` exists only
    where the embedding width differs from the hidden width (spec 1.2).

    Attributes:
      Config: a subclass of `EncoderConfig`.
      Embeddings: a subclass of `Embeddings`.
      Layer: a module, made of a config and rngs. It is called with its input [B, L, H], what
        `shared` returns, a key for its dropout or None, and its element of each of `layer_flags`.
      naming: of its counterpart among Hugging Face's models, if there is one.
    """

    Config: ClassVar[type]
    Embeddings: ClassVar[type]
    Layer: ClassVar[type]
    naming: ClassVar[Naming | None] = None

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        sizes = config.embedding_size, config.hidden_size
        self.projection = (
            dense(*sizes, glorot_uniform, config.dtype, rngs, depth="input")
            if config.embedding_size != config.hidden_size
            else None
        )
        keys = jax.random.split(rngs.params(), config.num_layers)
        make = lambda key: nnx.state(self.Layer(config, nnx.Rngs(params=key)))  # noqa: E731
        stacked = jax.vmap(make)(keys)
        for _, variable in nnx.to_flat_state(stacked):
            variable.set_metadata(info=variable.get_metadata("info").stacked())
        graph = nnx.graphdef(nnx.eval_shape(lambda: self.Layer(config, nnx.Rngs(0))))
        self.layers = nnx.merge(graph, stacked)
        self.num_layers = config.num_layers
        self.remat = config.remat
        self.scan_unroll = config.scan_unroll

    @classmethod
    def flops_per_token(cls, config: EncoderConfig, length: int) -> int:
        """Forward operations of the layers and the projection, for a token in a row of `length`."""
        projected = config.embedding_size * (config.embedding_size != config.hidden_size)
        layers = config.num_layers * cls.Layer.flops_per_token(config, length)
        return layers + 2 * projected * config.hidden_size

    def shared(self, context: Context) -> PyTree:
        """What all layers read beside their input, computed once; by default, the segments."""
        return Segments.of(context.segment_ids)

    def layer_flags(self) -> tuple[Array, ...]:
        """Arrays `[N, ...]` of constants in which the layers differ."""
        return ()

    def __call__(
        self, embedded: Float[Array, "B L E"], context: Context, key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """Hidden states of the last layer."""
        return self.hidden_states(embedded, context, key)[0]

    def states_at(
        self,
        positions: Int[Array, "B P"],
        embedded: Float[Array, "B L E"],
        context: Context,
        key: PRNGKey | None,
    ) -> Float[Array, "B P H"]:
        """What a head reads that predicts the words at `positions`."""
        hidden = self(embedded, context, key)
        return jnp.take_along_axis(hidden, positions[..., None], axis=1)

    def hidden_states(
        self,
        embedded: Float[Array, "B L E"],
        context: Context,
        key: PRNGKey | None,
        every_layer: bool = False,
    ) -> tuple[Float[Array, "B L H"], Float[Array, "states B L H"] | None]:
        """The last layer and, when asked for, the input of the stack and all its layers."""
        graph, stacked = nnx.split(self.layers)
        shared = self.shared(context)

        def layer(x, of_layer):
            params, layer_key, flags = of_layer
            x = nnx.merge(graph, params)(x, shared, layer_key, *flags)
            return x, (x if every_layer else None)

        if self.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=False)
        x = embedded if self.projection is None else self.projection(embedded)
        keys = None if key is None else jax.random.split(key, self.num_layers)
        of_layers = (stacked, keys, self.layer_flags())
        last, states = jax.lax.scan(layer, x, of_layers, unroll=self.scan_unroll)
        return last, jnp.concatenate([x[None], states]) if every_layer else None


def encode(
    embeddings: Embeddings,
    encoder: Encoder,
    ids: Int[Array, "B L"],
    context: Context,
    key: PRNGKey | None,
    base: Embeddings | None = None,
) -> Float[Array, "B L H"]:
    """Hidden states of `ids`. `key` seeds dropout; None switches it off.

    Args:
      base: see `Embeddings`.
    """
    embedding_key, encoder_key = split_key(key)
    return encoder(embeddings(ids, context, embedding_key, base), context, encoder_key)
