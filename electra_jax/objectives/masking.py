"""Which positions are predicted, what the generator sees there, and what is sampled back.

Everything happens on the device and anew in every step (spec 3.1 to 3.5). Random numbers come
from one key per row, folded from the row's index in the global batch, so that the same rows get
the same masks and samples on any number of devices, hosts or micro-batches.

Two modes say how positions are drawn (spec 3.2):

* `clean`: without replacement, so that the whole budget is spent on distinct positions.
* `faithful`: with replacement, as in the original code. Where several draws hit one position their
  samples are averaged with integer division, which writes an arbitrary token (spec 0.3).

In `clean` mode there are three units, which are predicted as a whole and shown in one way:

* `token`: every token for itself.
* `word`: a token that starts a word and those that continue it.
* `span`: some words in a row, as in SpanBERT (Joshi et al., TACL 2020). The budget may end one.

    tokens   [CLS] token ##isation of some cor ##pora [SEP] yes [SEP]
    words            0       0      1   2   3     3          4
    spans            0       0      0   1   1     1          2
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from electra_jax.modeling.heads import VOCAB_BLOCK
from electra_jax.settings import Config, not_allowed

RowKeys = Key[Array, " B"]
TokenCounts = Int[np.ndarray, " V"] | None  # how often each token is in the text

# Spans have 1 to 10 words, k of them in proportion to 0.8 ** k: 3.8 on average (SpanBERT, 3.1).
SPAN_END = 0.2
MAX_SPAN_WORDS = 10

# Words are gone through so many times for some that fit what is left of the budget. Even of words
# with three tokens on average, only one row in hundreds then lacks a token of its budget.
ROUNDS = 4


@runtime_checkable
class Vocabulary(Protocol):
    """What objectives need to know of a tokenizer."""

    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int
    starts_word: Bool[np.ndarray, " V"]


@dataclasses.dataclass(frozen=True)
class MaskingConfig:
    """How a row is masked; the module's docstring has modes and units."""

    rate: float  # share of the real tokens of a row that is predicted
    mask_token_share: float  # of these, shown to the generator as `[MASK]`
    random_token_share: float  # of these, shown as a random token; the rest stay as they are
    mode: str
    vocab_size: int
    mask_id: int
    unmaskable_ids: tuple[int, ...]  # never predicted: `[CLS]`, `[SEP]` and `[MASK]`
    unit: str = "token"
    starts_word: tuple[bool, ...] = dataclasses.field(default=(), repr=False)  # by id

    @classmethod
    def from_config(
        cls, config: Config, tokenizer: Vocabulary, is_read: bool = True
    ) -> "MaskingConfig":
        """What the section `masking` says; what is shown matters only where it `is_read`."""
        masking = config.masking
        shares = (masking.mask_token_share, masking.random_token_share) if is_read else (1.0, 0.0)
        if sum(shares) > 1:
            name, other = "masking.mask_token_share", "masking.random_token_share"
            raise not_allowed(config, name, "at most 1 in sum", other)
        if masking.mode == "faithful" and masking.unit != "token":
            raise not_allowed(config, "masking.unit", "'token'", "masking.mode")
        return cls(
            rate=masking.rate,
            mask_token_share=shares[0],
            random_token_share=shares[1],
            mode=masking.mode,
            unit=masking.unit,
            vocab_size=tokenizer.vocab_size,
            mask_id=tokenizer.mask_id,
            unmaskable_ids=(tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id),
            starts_word=() if masking.unit == "token" else tuple(tokenizer.starts_word.tolist()),
        )

    def max_predictions(self, length: int) -> int:
        """Static number of prediction slots in a row of `length` tokens (spec 3.1)."""
        return min(length, max(1, int((self.rate + 0.005) * length)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masked:
    """A masked batch. Slots beyond a row's budget have weight 0 and position 0."""

    masked_ids: Int[Array, "B L"]  # what the generator reads
    masked_positions: Int[Array, "B P"]
    labels: Int[Array, "B P"]  # original ids at these positions
    weights: Float[Array, "B P"]  # 1 for slots in use, 0 for the others


def row_keys(key: Key[Array, ""], rows: Int[Array, " B"]) -> RowKeys:
    """One key for each row, folded from its index in the global batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def mask_tokens(
    config: MaskingConfig,
    input_ids: Int[Array, "B L"],
    is_real: Bool[Array, "B L"],
    keys: RowKeys,
) -> Masked:
    """Draw positions and build the generator's input.

    A row's budget is its number of real tokens times the rate, rounded half to even, at least
    one and at most the number of slots; `clean` mode also stops at the maskable tokens there are.
    Of words, those are predicted that fit the budget, which may leave a little of it.
    """

    def mask_row(ids: Int[Array, " L"], real: Bool[Array, " L"], key: Key[Array, ""]) -> Masked:
        position_key, show_key, random_key = jax.random.split(key, 3)
        num_slots = config.max_predictions(len(ids))
        candidates = real & ~jnp.isin(ids, jnp.array(config.unmaskable_ids))
        budget = jnp.clip(jnp.round(real.sum() * config.rate), 1, num_slots)

        if config.unit != "token":
            drawn, unit, budget = draw_words(config, ids, candidates, budget, position_key)
        elif config.mode == "clean":  # the largest of independent uniforms: no position twice
            noise = jnp.where(candidates, jax.random.uniform(position_key, ids.shape), -1.0)
            drawn = jax.lax.top_k(noise, num_slots)[1]
            budget = jnp.minimum(budget, candidates.sum())
        else:
            scores = jnp.where(candidates, 0.0, -jnp.inf)
            drawn = jax.random.categorical(position_key, scores, shape=(num_slots,))
            budget = jnp.where(candidates.any(), budget, 0)

        in_use = jnp.arange(num_slots) < budget
        positions = jnp.where(in_use, drawn, 0)
        labels = jnp.where(in_use, ids[positions], 0)

        if config.unit == "token":
            shown = jax.random.uniform(show_key, (num_slots,))
        else:  # the same for all tokens of a unit
            shown = jax.random.uniform(show_key, ids.shape)[unit]
        as_mask = in_use & (shown < config.mask_token_share)
        as_random = (
            in_use & ~as_mask & (shown < config.mask_token_share + config.random_token_share)
        )
        random_ids = jax.random.randint(random_key, (num_slots,), 0, config.vocab_size)
        outside = len(ids)  # writes there are dropped
        masked_ids = ids.at[jnp.where(as_random, positions, outside)].set(random_ids, mode="drop")
        masked_ids = masked_ids.at[jnp.where(as_mask, positions, outside)].set(
            config.mask_id, mode="drop"
        )
        return Masked(masked_ids, positions, labels, in_use.astype(jnp.float32))

    return jax.vmap(mask_row)(input_ids, is_real, keys)


def draw_words(
    config: MaskingConfig,
    ids: Int[Array, " L"],
    candidates: Bool[Array, " L"],
    budget: Float[Array, ""],
    key: Key[Array, ""],
) -> tuple[Int[Array, " P"], Int[Array, " P"], Int[Array, ""]]:
    """Draw whole words that together fit the budget, alone or in spans.

    The row is cut into units, words or spans, and these are put in random order. Their words are
    taken in this order until one does not fit. Those after it fill up what is left, if they fit.

    Returns:
      Positions; for each the number of its unit, below L; and how many positions are in use.
    """
    length = len(ids)
    order_key, span_key = jax.random.split(key)
    # What cannot be predicted ends words and spans. The borders of pieces are such tokens.
    is_first = ~jnp.append(False, candidates[:-1])
    starts_word = candidates & (jnp.array(config.starts_word)[ids] | is_first)
    starts_unit = starts_word
    if config.unit == "span":
        starts_unit &= draw_span_starts(starts_word, span_key) | is_first
    unit = jnp.cumsum(starts_unit) - 1
    noise = jnp.where(candidates, jax.random.uniform(order_key, (length,))[unit], jnp.inf)
    order = jnp.argsort(noise)  # stable: the tokens of a unit stay in order

    candidates = candidates[order]  # from here on, tokens come in this order
    word = jnp.cumsum(starts_word[order]) - 1
    sizes = jnp.zeros(length, jnp.int32).at[word].add(candidates)
    taken = jnp.zeros(length, bool)
    for _ in range(ROUNDS):
        left = budget - sizes.sum(where=taken)
        fits = ~taken & (sizes <= left)
        taken |= fits & (jnp.cumsum(jnp.where(fits, sizes, 0)) <= left)
    predicted = candidates & taken[word]
    slots = jnp.nonzero(predicted, size=config.max_predictions(length), fill_value=0)[0]
    return order[slots], unit[order[slots]], predicted.sum()


def draw_span_starts(starts_word: Bool[Array, " L"], key: Key[Array, ""]) -> Bool[Array, " L"]:
    """True for the first words of spans that follow each other through a row."""
    chances = (1 - SPAN_END) ** jnp.arange(MAX_SPAN_WORDS)
    lengths = jax.random.choice(key, MAX_SPAN_WORDS, starts_word.shape, p=chances / chances.sum())
    is_start = jnp.zeros(starts_word.shape, bool)
    is_start = is_start.at[jnp.cumsum(lengths + 1)].set(True, mode="drop")  # in words
    return starts_word & is_start[jnp.cumsum(starts_word) - 1]


def proposal_logits(
    logits: Float[Array, "B P Vpad"],
    labels: Int[Array, "B P"],
    temperature: float | Float[Array, ""] = 1.0,
    disallow_correct: bool = False,
) -> Float[Array, "B P Vpad"]:
    """Logits of the distribution that replacements are drawn from (spec 3.5)."""
    logits = logits / temperature
    if disallow_correct:
        is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
        logits = jnp.where(is_label, -jnp.inf, logits)
    return logits


def sample_replacements(
    logits: Float[Array, "B P Vpad"],
    labels: Int[Array, "B P"],
    keys: RowKeys,
    temperature: float | Float[Array, ""] = 1.0,
    disallow_correct: bool = False,
) -> Int[Array, "B P"]:
    """Exact draws from softmax(logits / temperature) by Gumbel noise (spec 3.5).

    Adding Gumbel noise to all logits and taking the maximum draws from the softmax. The maximum
    over a block of the vocabulary is itself distributed as the block's log-sum-exp plus Gumbel
    noise, so choosing a block first and then a token inside it gives the same distribution from
    two small draws in place of one number for every word of the vocabulary.
    """
    logits = jax.lax.stop_gradient(logits)
    logits = proposal_logits(logits, labels, temperature, disallow_correct)
    blocks = logits.reshape(*logits.shape[:-1], -1, VOCAB_BLOCK)

    def sample_row(blocks: Float[Array, "P K W"], key: Key[Array, ""]) -> Int[Array, " P"]:
        block_key, token_key = jax.random.split(key)
        block = jax.random.categorical(block_key, jax.nn.logsumexp(blocks, axis=-1))
        inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        return block * VOCAB_BLOCK + jax.random.categorical(token_key, inside)

    return jax.vmap(sample_row)(blocks, keys)


def is_selected(masked: Masked, length: int) -> Bool[Array, "B {length}"]:
    """Which positions of rows of `length` tokens are predicted."""

    def select_row(positions: Int[Array, " P"], weights: Float[Array, " P"]) -> Bool[Array, " L"]:
        outside = length  # writes there are dropped
        positions = jnp.where(weights > 0, positions, outside)
        return jnp.zeros(length, bool).at[positions].set(True, mode="drop")

    return jax.vmap(select_row)(masked.masked_positions, masked.weights)


def corrupt(
    mode: str, input_ids: Int[Array, "B L"], masked: Masked, samples: Int[Array, "B P"]
) -> Int[Array, "B L"]:
    """The discriminator's input: the original ids with the samples written in.

    In `faithful` mode position 0 is never written and repeated draws of a position are averaged.
    """

    def corrupt_row(
        ids: Int[Array, " L"],
        positions: Int[Array, " P"],
        weights: Float[Array, " P"],
        samples: Int[Array, " P"],
    ) -> Int[Array, " L"]:
        outside = len(ids)  # writes there are dropped
        positions = jnp.where(weights > 0, positions, outside)
        if mode == "clean":
            return ids.at[positions].set(samples, mode="drop")
        hits = jnp.zeros_like(ids).at[positions].add(1, mode="drop")
        totals = jnp.zeros_like(ids).at[positions].add(samples, mode="drop")
        written = (hits > 0) & (jnp.arange(len(ids)) != 0)
        return jnp.where(written, totals // jnp.maximum(hits, 1), ids)

    return jax.vmap(corrupt_row)(
        input_ids, masked.masked_positions, masked.weights, samples.astype(input_ids.dtype)
    )
