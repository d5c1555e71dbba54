"""Generator, discriminator and the parent that owns what they share (spec 1.6, 1.7, 2).

The modules hold parameters; training code sees a plain nested dict of arrays and pure functions:

    graph, params = init(config, key)
    logits = nnx.merge(graph, params).discriminate(ids, context, key)
"""

import dataclasses
import functools

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from electra_jax.modeling.encoders import encoder_class
from electra_jax.modeling.encoders.base import Context, EncoderConfig, encode
from electra_jax.modeling.heads import MaskedLMHead, ReplacedTokenHead
from electra_jax.modeling.layers import PRNGKey, dense, split_key, truncated_normal
from electra_jax.modeling.params import Params


@dataclasses.dataclass(frozen=True)
class ElectraConfig:
    """What to build.

    Attributes:
      discriminator: the encoder that is kept after pre-training; None for masked language
        modeling, where the generator, at full size, is the model.
      generator: the encoder that proposes replacements; None where a fixed distribution does.
      sharing: `embeddings` (one set of tables for both), `none` (the generator has tables of its
        own width), `all` (one encoder plays both roles, only the heads differ; spec 2.2) or `gdes`
        (the discriminator reads the generator's tables plus residual ones, zero at first, and its
        gradients reach the latter alone; He et al., DeBERTaV3, ICLR 2023).
      discriminator_head: a class of `modeling.heads`, or one like these.
      baseline: the generator has an output that predicts how well its samples will do.
    """

    discriminator: EncoderConfig | None
    generator: EncoderConfig | None
    sharing: str = "embeddings"
    discriminator_head: type[nnx.Module] = ReplacedTokenHead
    baseline: bool = False

    @property
    def main(self) -> EncoderConfig:
        """The encoder that is kept."""
        return self.discriminator or self.generator


class Generator(nnx.Module):
    """A small masked language model. `encoder` and `embeddings` are None where shared."""

    def __init__(self, config: EncoderConfig, sharing: str, baseline: bool, rngs: nnx.Rngs):
        kind = encoder_class(config)
        self.embeddings = kind.Embeddings(config, rngs) if sharing == "none" else None
        self.encoder = None if sharing == "all" else kind(config, rngs)
        self.head = MaskedLMHead(config, rngs)
        init = truncated_normal(config.init_stddev)
        self.baseline = dense(config.hidden_size, 1, init, config.dtype, rngs) if baseline else None


class Discriminator(nnx.Module):
    """It reads corrupted text. `embeddings` exist with `gdes` alone: they are residual ones."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        encoder, zeros = config.discriminator, nnx.initializers.zeros
        kind = encoder_class(encoder)
        self.encoder = kind(encoder, rngs)
        self.head = config.discriminator_head(encoder, rngs)
        self.embeddings = (
            kind.Embeddings(encoder, rngs, zeros) if config.sharing == "gdes" else None
        )


class Electra(nnx.Module):
    """The parent: owns the shared embeddings and runs either network."""

    def __init__(self, config: ElectraConfig, rngs: nnx.Rngs):
        self.embeddings = encoder_class(config.main).Embeddings(config.main, rngs)
        self.generator = (
            Generator(config.generator, config.sharing, config.baseline, rngs)
            if config.generator
            else None
        )
        self.discriminator = Discriminator(config, rngs) if config.discriminator else None

    def generate(
        self,
        masked_ids: Int[Array, "B L"],
        context: Context,
        masked_positions: Int[Array, "B P"],
        key: PRNGKey | None,
    ) -> Float[Array, "B P Vpad"]:
        """Float32 logits over the vocabulary, at the masked positions only."""
        return self.propose(self.generator_states(masked_ids, context, masked_positions, key))

    def generator_states(
        self,
        masked_ids: Int[Array, "B L"],
        context: Context,
        masked_positions: Int[Array, "B P"],
        key: PRNGKey | None,
    ) -> Float[Array, "B P H"]:
        """What the generator's head reads."""
        embeddings = self.generator.embeddings or self.embeddings
        encoder = self.generator.encoder or self.discriminator.encoder
        embedding_key, encoder_key = split_key(key)
        with jax.named_scope("generator"):
            embedded = embeddings(masked_ids, context, embedding_key)
            return encoder.states_at(masked_positions, embedded, context, encoder_key)

    def propose(self, states: Float[Array, "B P H"]) -> Float[Array, "B P Vpad"]:
        """Float32 logits over the vocabulary from `generator_states`."""
        embeddings = self.generator.embeddings or self.embeddings
        with jax.named_scope("generator"):
            return self.generator.head(states, embeddings.word[...])

    def discriminate(
        self, ids: Int[Array, "B L"], context: Context, key: PRNGKey | None
    ) -> Float[Array, "B L"]:
        """Float32 logits of every token having been replaced."""
        states = self.discriminator_states(ids, context, key)
        with jax.named_scope("discriminator"):
            return self.discriminator.head(states)

    def discriminator_states(
        self, ids: Int[Array, "B L"], context: Context, key: PRNGKey | None
    ) -> Float[Array, "B L H"]:
        """What the discriminator's head reads."""
        own, encoder = self.discriminator.embeddings, self.discriminator.encoder
        with jax.named_scope("discriminator"):
            if own is None:
                return encode(self.embeddings, encoder, ids, context, key)
            return encode(own, encoder, ids, context, key, base=self.embeddings)

    def discriminator_words(self) -> Float[Array, "V E"]:
        """The word table that the discriminator reads; its head's, where that predicts words."""
        own, shared = self.discriminator.embeddings, self.embeddings.word[...]
        return shared if own is None else jax.lax.stop_gradient(shared) + own.word[...]


def network_of(params: Params, name: str) -> Params:
    """`{"embeddings", "encoder", "head"}` that a network reads, however it shares them.

    Args:
      params: of an `Electra`.
      name: `generator` or `discriminator`.
    """
    own, shared = params[name], params["embeddings"]
    embeddings = own.get("embeddings", shared)
    if name == "discriminator" and "embeddings" in own:  # tables are differences to the shared ones
        embeddings = {
            part: x if isinstance(x, dict) else shared[part] + x for part, x in embeddings.items()
        }
    return {
        "embeddings": embeddings,
        "encoder": own["encoder"] if "encoder" in own else params["discriminator"]["encoder"],
        "head": own["head"],
    }


def init(config: ElectraConfig, key: PRNGKey) -> tuple[nnx.GraphDef, Params]:
    """The model's structure and freshly initialized float32 parameters."""
    graph, state = nnx.split(Electra(config, nnx.Rngs(params=key)))
    return graph, nnx.to_pure_dict(state)


def structure(config: ElectraConfig) -> tuple[nnx.GraphDef, Params]:
    """As `init`, with shapes in place of values: costs no memory at any size."""
    graph, shapes = _structure(config)
    return graph, jax.tree.map(lambda x: x, shapes)  # the caller's own


@functools.cache
def _structure(config: ElectraConfig) -> tuple[nnx.GraphDef, Params]:
    graph, state = nnx.split(nnx.eval_shape(lambda: Electra(config, nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)
