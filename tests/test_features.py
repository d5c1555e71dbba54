"""Texts as rows of tokens: pairs, windows over long texts, padding."""

import numpy as np
from tiny_tasks import CLS, PAD, SEP, TOKENIZER, A, B, C, E

from electra_jax.data.features import FeatureRows, encode_texts, owners, pair_lengths, windows


def test_pairs_are_cut_like_popping_from_the_longer():
    def popped(first: int, second: int, room: int) -> tuple[int, int]:
        while first + second > room:
            first, second = (first - 1, second) if first > second else (first, second - 1)
        return first, second

    for first in range(12):
        for second in range(12):
            for room in range(12):
                expected = popped(first, second, room)
                assert pair_lengths(first, second, room) == expected, (first, second, room)


def test_rows_hold_one_text_or_two():
    texts = [("a b", None), ("a b c d", "e b a"), ("", ""), ("ee " * 9, None)]
    rows = encode_texts(TOKENIZER, texts, max_length=8)
    ee = TOKENIZER.vocab.index("##e")
    assert rows["input_ids"].tolist() == [
        [CLS, A, B, SEP, PAD, PAD, PAD, PAD],
        [CLS, A, B, C, SEP, E, B, SEP],
        [CLS, SEP, SEP, PAD, PAD, PAD, PAD, PAD],
        [CLS, E, ee, E, ee, E, ee, SEP],
    ]
    assert rows["segment_ids"].sum(axis=1).tolist() == [4, 8, 3, 8]
    assert rows["token_type_ids"].tolist() == [
        [0] * 8,
        [0, 0, 0, 0, 0, 1, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert rows["position_ids"].tolist() == [[*range(8)]] * 4
    assert {rows[name].dtype for name in rows} == {np.dtype(np.int32)}


def test_windows_overlap_and_hold_all():
    assert [*windows(10, 4, 2)] == [(0, 4), (2, 6), (4, 8), (6, 10)]
    assert [*windows(10, 4, 9)] == [(0, 4), (4, 8), (8, 10)]
    assert [*windows(4, 4, 2)] == [(0, 4)]
    assert [*windows(0, 4, 2)] == [(0, 0)]


def test_each_token_belongs_to_the_window_that_shows_most_around_it():
    def owner(spans: list[tuple[int, int]], place: int) -> int:  # as in BERT
        best, best_score = -1, float("-inf")
        for number, (begin, end) in enumerate(spans):
            if begin <= place < end:
                score = min(place - begin, end - 1 - place) + 0.01 * (end - begin)
                if score > best_score:
                    best, best_score = number, score
        return best

    for length, room, stride in [(30, 10, 3), (31, 9, 4), (12, 5, 9), (7, 9, 2)]:
        spans = [*windows(length, room, stride)]
        expected = [owner(spans, place) for place in range(length)]
        assert owners(length, spans).tolist() == expected


def test_rows_of_padding_have_no_labels():
    rows = FeatureRows({"segment_ids": np.ones((2, 3), int), "label": np.ones((2, 3), int)})
    batch = rows.batch(np.array([1, -1]))
    np.testing.assert_array_equal(batch["segment_ids"], [[1] * 3, [0] * 3])
    np.testing.assert_array_equal(batch["label"], [[1] * 3, [-1] * 3])
