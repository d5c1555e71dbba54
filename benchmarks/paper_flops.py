"""Training FLOPs as the ELECTRA paper counts them (spec 7.11), for comparison with its tables.

Unlike `flops.py`, which has what our program computes, this counts every elementwise operation,
looking up an embedding as a product with a one-hot vector, and a backward pass as one forward pass.
"""

from ml_collections import ConfigDict

from electra_jax.checks import objective_for
from electra_jax.modeling.electra import ElectraConfig
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.heads import CopyHead, MaskedLMHead, ReplacedTokenHead

# Operations per element.
DROPOUT, LAYER_NORM, ACTIVATION, SOFTMAX = 4, 5, 8, 5

# Share of positions that the vocabulary is projected to: 20 of 128, whatever is masked.
OUTPUT_SHARE = 0.15625


def layer(config: EncoderConfig, length: int) -> int:
    """Forward operations per token of one layer."""
    return attention(config, length, config.hidden_size) + feed_forward(config)


def attention(config: EncoderConfig, length: int, projected: int) -> int:
    """Of the attention of a layer; `projected` is the width of all its heads together."""
    h, heads = config.hidden_size, config.num_heads
    return (
        3 * 2 * h * projected + 3 * projected  # queries, keys, values and their biases
        + 2 * projected * length  # products of queries and keys
        + SOFTMAX * length * heads + DROPOUT * length * heads + length * heads  # and scaling
        + 2 * h * length  # weighted sum of values
        + 2 * h * h + h  # output
        + DROPOUT * h + h  # added to what came in
        + LAYER_NORM  # the script leaves its width out
    )  # fmt: skip


def feed_forward(config: EncoderConfig) -> int:
    """Of the feed-forward part of a layer."""
    h, i = config.hidden_size, config.intermediate_size
    inner = 2 * h * i + ACTIVATION * i + i + 2 * h * i + h
    return inner + DROPOUT * h + h + LAYER_NORM * h


def embeddings(config: EncoderConfig, length: int) -> int:
    """Forward operations per token in front of the layers."""
    e, h = config.embedding_size, config.hidden_size
    tables = 2 * e * config.vocab_size + 2 * e * (length + 2) + 2 * e
    projection = 2 * h * e + h if e != h else 0
    return tables + LAYER_NORM * e + DROPOUT * e + projection


def masked_lm_head(config: EncoderConfig) -> int:
    """Forward operations of predicting one token."""
    e, h, v = config.embedding_size, config.hidden_size, config.vocab_size
    hidden = 2 * h * e + e + ACTIVATION * e + LAYER_NORM * e
    return 2 * e * v + hidden + SOFTMAX * v + 2 * v


def replaced_token_head(config: EncoderConfig) -> int:
    """Forward operations of the head for one token."""
    h = config.hidden_size
    return 2 * h * h + h + ACTIVATION * h + 2 * h


def encoder(config: EncoderConfig, length: int) -> int:
    """Forward operations per token of embeddings and layers."""
    return config.num_layers * layer(config, length) + embeddings(config, length)


def step_flops_per_token(model: ElectraConfig, length: int) -> tuple[float, float]:
    """Forward operations per token of the generator and of the discriminator; 0 for none."""
    generator, main = model.generator, model.discriminator
    of_generator = of_main = 0.0
    if generator:
        of_generator += encoder(generator, length) + OUTPUT_SHARE * masked_lm_head(generator)
    if main:
        head = {
            ReplacedTokenHead: replaced_token_head(main),
            MaskedLMHead: OUTPUT_SHARE * masked_lm_head(main),
            CopyHead: masked_lm_head(main),
        }[model.discriminator_head]
        of_main += encoder(main, length) + head
    return of_generator, of_main


def train_flops(config: ConfigDict, vocab_size: int) -> float:
    """Operations of a whole training.

    A frozen generator has a forward pass only; in two stages, the discriminator is not run in the
    first one.
    """
    length = config.data.sequence_length
    generator, main = step_flops_per_token(objective_for(config, vocab_size).model, length)
    steps, first = config.num_train_steps, 0
    if config.algorithm == "two_stage":
        first = config.generator.mle_steps
    is_frozen = config.algorithm == "two_stage" or config.generator.kind == "frozen"
    per_token = first * 2 * generator
    per_token += (steps - first) * ((1 if is_frozen else 2) * generator + 2 * main)
    return per_token * config.batch_size * length


def inference_flops(model: ElectraConfig, length: int) -> int:
    """Operations of the discriminator on one input of `length` tokens."""
    return length * (encoder(model.main, length) + replaced_token_head(model.main))
