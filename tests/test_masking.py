"""Masks: exact properties and distributions (spec 3.2, 3.3); `test_sampling.py` has the rest."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats
from stdlib_text import stdlib_documents
from tiny import CLS, MASK, PAD, SEP, UNK

from electra_jax.data import tokenizers
from electra_jax.objectives import masking
from electra_jax.objectives.masking import Masked

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0)
def jit_mask(config, input_ids, is_real, row):
    return masking.mask_tokens(config, input_ids, is_real, masking.row_keys(KEY, row))


@jax.jit
def jit_sample(logits, labels, row):
    return masking.sample_replacements(logits, labels, masking.row_keys(KEY, row))


def mask(batch, **changes) -> Masked:
    config = tiny.masking_config(**changes)
    masked = jit_mask(config, batch["input_ids"], batch["segment_ids"] > 0, batch["row"])
    return jax.device_get(masked)


def full_rows(num_rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of one piece of ordinary tokens, without padding."""
    tokens = np.random.default_rng(0).integers(MASK + 1, tiny.VOCAB, (num_rows, length - 2))
    return tiny.batch(list(tokens[:, None]), length)


def odd_rows(length: int) -> dict[str, np.ndarray]:
    """Rows of every size, rows with hardly anything to predict, a row of padding."""
    pieces = [[np.full(size, UNK)] for size in range(length - 1)]
    poor = [[7]] + [[]] * (length // 2 - 2)  # one ordinary token among special ones
    special = [[]] * (length // 2)
    return tiny.batch([*pieces, poor, special, [[MASK] * (length - 2)], []], length)


def is_predicted(masked: Masked, length: int) -> np.ndarray:
    """bool [B, length]"""
    hits = np.zeros((len(masked.weights), length + 1), bool)
    place = np.where(masked.weights > 0, masked.masked_positions, length)
    np.put_along_axis(hits, place, True, axis=1)
    return hits[:, :length]


def budgets(batch, rate: float) -> np.ndarray:
    """Spec 3.2 in exact arithmetic."""
    length = batch["input_ids"].shape[1]
    num_slots = max(1, int((rate + 0.005) * length))
    exact = Fraction(str(rate))
    sizes = (batch["segment_ids"] > 0).sum(axis=1)
    return np.array([max(1, min(num_slots, round(exact * int(size)))) for size in sizes])


def candidates(batch) -> np.ndarray:
    return (batch["segment_ids"] > 0) & ~np.isin(batch["input_ids"], [CLS, SEP, MASK])


@pytest.mark.parametrize(
    ("mode", "unit"),
    [("clean", "token"), ("clean", "word"), ("clean", "span"), ("faithful", "token")],
)
@pytest.mark.parametrize(("length", "rate"), [(16, 0.15), (128, 0.15), (128, 0.25)])
def test_budget_positions_and_labels(mode, unit, length, rate):
    batch = odd_rows(length)  # words of one token
    masked = mask(batch, mode=mode, unit=unit, rate=rate, starts_word=(True,) * tiny.VOCAB)
    allowed = candidates(batch)
    expected = budgets(batch, rate)
    if mode == "clean":
        expected = np.minimum(expected, allowed.sum(axis=1))
    expected = np.where(allowed.any(axis=1), expected, 0)

    np.testing.assert_array_equal(masked.weights.sum(axis=1), expected)
    for row, count in enumerate(expected):
        positions = masked.masked_positions[row, :count]
        assert allowed[row, positions].all()
        assert mode == "faithful" or len(set(positions)) == count
        labels = batch["input_ids"][row, positions]
        np.testing.assert_array_equal(masked.labels[row, :count], labels)
        assert not masked.weights[row, count:].any()
        assert not masked.masked_positions[row, count:].any()


@pytest.mark.parametrize(
    ("length", "rate", "slots"),
    [(128, 0.15, 19), (512, 0.15, 79), (512, 0.25, 130), (256, 0.999, 256)],
)
def test_number_of_slots(length, rate, slots):
    assert tiny.masking_config(rate=rate).max_predictions(length) == slots


def test_every_candidate_is_equally_likely():
    masked = mask(full_rows(2000, 32), rate=0.15)
    used = masked.masked_positions[masked.weights > 0]
    counts = np.bincount(used, minlength=32)
    assert counts[0] == counts[31] == 0
    assert stats.chisquare(counts[1:31]).pvalue > 0.01


def test_faithful_mode_repeats_positions():
    """19 independent draws from 126 candidates; spec 3.2 measured 17.6 unique ones."""
    masked = mask(full_rows(1000, 128), mode="faithful")
    unique = np.mean([len(set(positions)) for positions in masked.masked_positions])
    assert unique == pytest.approx(126 * (1 - (1 - 1 / 126) ** 19), abs=0.1)


@pytest.mark.parametrize(
    ("mode", "unit"), [("clean", "token"), ("clean", "word"), ("faithful", "token")]
)
def test_generator_sees_masks_at_predicted_positions_only(mode, unit):
    batch = odd_rows(128)
    masked = mask(batch, mode=mode, unit=unit)
    predicted = is_predicted(masked, 128)
    changed = masked.masked_ids != batch["input_ids"]
    assert changed.any()
    assert not (changed & ~(predicted & candidates(batch))).any()


def test_random_tokens_are_shown_at_their_share_and_uniform():
    batch = tiny.batch([[[7] * 126]] * 1500, 128)
    masked = mask(batch, mask_token_share=0.8, random_token_share=0.1)
    shown = np.take_along_axis(masked.masked_ids, masked.masked_positions, axis=1)
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (shown == 7).mean() == pytest.approx(0.1, abs=0.01)
    counts = np.bincount(shown.flat, minlength=tiny.VOCAB)
    counts = np.delete(counts, [MASK, 7])
    assert counts.sum() / shown.size == pytest.approx(0.1, abs=0.01)
    assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.parametrize(
    ("mode", "unit"), [("clean", "token"), ("clean", "span"), ("faithful", "token")]
)
def test_masks_and_samples_depend_on_the_row_not_on_the_batch(mode, unit):
    batch = tiny.packed(8)
    logits = jax.random.normal(KEY, (8, 4, 384))

    def draw(part):
        rows = {name: x[part] for name, x in batch.items()}
        masked = mask(rows, mode=mode, unit=unit)
        samples = jit_sample(logits[part], masked.labels, rows["row"])
        return [*jax.tree.leaves(masked), np.asarray(samples)]

    whole, left, right = (draw(slice(*ends)) for ends in ((0, 8), (0, 4), (4, 8)))
    for one, *two in zip(whole, left, right, strict=True):
        np.testing.assert_array_equal(one, np.concatenate(two))
    assert len({tuple(positions) for positions in whole[1]}) > 1  # rows differ from each other


# Words and spans


@functools.cache
def real_text(kind: str, length: int) -> tuple[dict[str, np.ndarray], tuple[bool, ...]]:
    """Packed rows of the standard library's documentation, and which tokens start a word."""
    lines = ["".join(f"{line} " for line in document) for document in stdlib_documents()]
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
    trained = tokenizers.train(kind, lines, 1000, **settings)
    assert trained.special_ids == (PAD, UNK, CLS, SEP, MASK)
    rows, free, size = [[]], length, length - 2
    for document in trained.encode_batch(lines):
        for piece in (document[start : start + size] for start in range(0, len(document), size)):
            if len(piece) + 2 > free:
                rows.append([])
                free = length
            rows[-1].append(piece)
            free -= len(piece) + 2
    return tiny.batch(rows, length), tuple(trained.starts_word.tolist())


def number_words(batch, starts_word: tuple[bool, ...]) -> np.ndarray:
    """The word of each token, counted through the batch; -1 for special tokens and padding."""
    allowed = candidates(batch)
    is_inside = np.pad(allowed[:, :-1], ((0, 0), (1, 0)))
    begins = allowed & (np.array(starts_word)[batch["input_ids"]] | ~is_inside)
    return np.where(allowed, np.cumsum(begins).reshape(begins.shape) - 1, -1)


@pytest.mark.parametrize(
    ("kind", "length", "rate"),
    [
        ("wordpiece", 128, 0.15),
        ("wordpiece", 128, 0.25),
        ("wordpiece", 512, 0.15),
        ("wordpiece", 512, 0.25),
        ("unigram", 128, 0.15),
        ("bpe", 512, 0.25),
    ],
)
@pytest.mark.parametrize("unit", ["word", "span"])
def test_words_of_real_text_are_predicted_and_shown_as_a_whole(unit, kind, length, rate):
    rows, starts_word = real_text(kind, length)
    words = number_words(rows, starts_word)
    times = -(100_000 // -words.max())
    batch = {name: np.tile(x, (times,) + (1,) * (x.ndim - 1)) for name, x in rows.items()}
    batch["row"] = np.arange(len(batch["row"]), dtype=np.int32)
    known = {"starts_word": starts_word, "vocab_size": len(starts_word)}
    masked = mask(batch, unit=unit, rate=rate, mask_token_share=0.5, **known)
    words = np.where(words < 0, -1, words + (words.max() + 1) * np.arange(times)[:, None, None])
    words = words.reshape(-1, length)
    assert words.max() > 99_000
    predicted = is_predicted(masked, length)
    sizes = np.bincount(words[words >= 0])
    hits = np.bincount(words[predicted], minlength=sizes.size)
    assert set(np.unique(hits / sizes)) == {0, 1}
    changed = masked.masked_ids != batch["input_ids"]
    shown = np.bincount(words[changed], minlength=sizes.size)
    assert set(np.unique(shown / sizes)) == {0, 1}
    assert (masked.masked_ids[changed] == MASK).all()
    assert shown.sum() / hits.sum() == pytest.approx(0.5, abs=0.02)

    assert (hits.sum() / (batch["segment_ids"] > 0).sum()) == pytest.approx(rate, abs=0.005)
    used = masked.weights.sum(axis=1)
    assert (used <= budgets(batch, rate)).all()
    assert used.sum() / budgets(batch, rate).sum() > 0.999


def rows_of_words(num_rows: int, length: int, sizes: list[int]) -> dict[str, np.ndarray]:
    """Rows of words of these many tokens: 7 starts one, 9 continues it (`tiny.STARTS_WORD`)."""
    assert tiny.STARTS_WORD[7]
    assert not tiny.STARTS_WORD[9]
    piece = [token for size in sizes for token in [7] + [9] * (size - 1)]
    return tiny.batch([[piece]] * num_rows, length)


def test_random_tokens_of_a_word_are_independent_of_each_other():
    batch = rows_of_words(1000, 128, [2] * 63)
    masked = mask(batch, unit="word", mask_token_share=0.0, random_token_share=0.5)
    first, second = masked.masked_ids[:, 1:-1].reshape(-1, 2).T
    is_random = first != 7
    assert ((second != 9) != is_random).sum() / is_random.sum() < 0.01  # random, but the same
    share = is_random.sum() * 2 / masked.weights.sum()
    assert share == pytest.approx(0.5, abs=0.02)
    assert (first == second)[is_random].mean() < 0.01
    assert abs(np.corrcoef(first[is_random], second[is_random])[0, 1]) < 0.05


def test_every_word_is_equally_likely():
    masked = mask(rows_of_words(3000, 128, [3] * 42), unit="word")
    assert (masked.weights.sum(axis=1) == 18).all()  # of a budget of 19
    counts = is_predicted(masked, 128)[:, 1:-1:3].sum(axis=0)
    assert stats.chisquare(counts).pvalue > 0.01


def test_long_words_are_less_likely_than_short_ones_but_not_much():
    """One-token words, here a quarter of all, fill up what is left of the budget."""
    sizes = [1, 2, 3, 4] * 12 + [6]
    starts = np.cumsum([1, *sizes[:-1]])
    chances = is_predicted(mask(rows_of_words(3000, 128, sizes), unit="word"), 128).mean(axis=0)
    by_size = [chances[starts[np.equal(sizes, size)]].mean() for size in (1, 2, 3, 4)]
    assert by_size == sorted(by_size, reverse=True)
    assert by_size[-1] > 0.6 * by_size[0]


def test_every_word_has_about_the_same_chance_to_be_in_a_span():
    chances = is_predicted(mask(rows_of_words(5000, 128, [1] * 126), unit="span"), 128).mean(axis=0)
    np.testing.assert_allclose(chances[1:-1], 19 / 126, rtol=0.15)


def test_spans_have_the_lengths_of_spanbert():
    starts = jax.vmap(lambda key: masking.draw_span_starts(jnp.ones(64, bool), key))(
        jax.random.split(KEY, 3000)
    )
    lengths = np.concatenate([np.diff(np.flatnonzero(row)[:5]) for row in np.asarray(starts)])
    counts = np.bincount(lengths)[1:]
    chances = 0.8 ** np.arange(1, 11)
    assert stats.chisquare(counts, chances / chances.sum() * lengths.size).pvalue > 0.01
    assert lengths.mean() == pytest.approx(3.8, abs=0.05)  # as the paper says


def test_masked_words_come_in_spans():
    runs = {}
    for unit in ("word", "span"):
        predicted = is_predicted(mask(rows_of_words(500, 512, [1] * 510), unit=unit), 512)
        runs[unit] = predicted.sum() / (predicted[:, 1:] & ~predicted[:, :-1]).sum()
    assert runs["word"] == pytest.approx(1 / 0.85, abs=0.03)
    assert 3.8 < runs["span"] < 4.8  # spans side by side look like one


@pytest.mark.parametrize("unit", ["word", "span"])
def test_words_end_at_special_tokens(unit):
    batch = tiny.batch([[[9, 9], [9, 9], [7, MASK, 9]]] * 2000, 13)
    predicted = is_predicted(mask(batch, unit=unit, rate=0.16), 13)  # two tokens
    found = {tuple(np.flatnonzero(row)) for row in predicted}
    assert found == {(1, 2), (5, 6), (9, 11)}


def test_spans_end_with_their_piece():
    masked = mask(tiny.batch([[[7], [7]]] * 2000, 6), unit="span", rate=0.4, mask_token_share=0.5)
    assert (masked.weights == 1).all()  # both words, each shown in its own way
    assert (masked.masked_ids[:, 1] == masked.masked_ids[:, 4]).mean() == pytest.approx(
        0.5, abs=0.04
    )


@pytest.mark.parametrize("unit", ["word", "span"])
def test_words_larger_than_the_budget_are_never_predicted(unit):
    giant = rows_of_words(50, 128, [126])
    masked = mask(giant, unit=unit)
    assert not masked.weights.any()
    assert not masked.labels.any()
    np.testing.assert_array_equal(masked.masked_ids, giant["input_ids"])

    predicted = is_predicted(mask(rows_of_words(50, 128, [60, 1, 65]), unit=unit), 128)
    assert {tuple(np.flatnonzero(row)) for row in predicted} == {(61,)}


@pytest.mark.parametrize("unit", ["word", "span"])
def test_budget_of_one_token(unit):
    predicted = is_predicted(mask(rows_of_words(500, 10, [1, 3, 1, 2, 1]), unit=unit), 10)
    assert {tuple(np.flatnonzero(row)) for row in predicted} == {(1,), (5,), (8,)}
