import time
from itertools import pairwise

import numpy as np
import pytest
from stdlib_text import stdlib_documents

from electra_jax.data import sources
from electra_jax.data.layout import LAYOUTS, Rows, _pack, rows
from electra_jax.data.store import TokenStore, open_store, write_store
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.errors import UserError

SETTINGS = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}


def make_store(directory, documents, tokenizer, held_out=0.1) -> TokenStore:
    write_store(directory, __file__, documents, tokenizer, held_out, log=lambda _: None)
    return open_store(directory)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    tokenizer = Tokenizer.train(stdlib_documents(), 1000, **SETTINGS)
    return make_store(tmp_path_factory.mktemp("layout") / "store", stdlib_documents(), tokenizer)


def all_rows(examples: Rows) -> dict[str, np.ndarray]:
    return examples.batch(np.arange(len(examples)))


def pieces(batch: dict[str, np.ndarray]) -> list[list[int]]:
    """The ids of every piece, in order of rows."""
    return [
        ids[piece_ids == piece].tolist()
        for ids, piece_ids in zip(batch["input_ids"], batch["piece_ids"], strict=True)
        for piece in range(1, piece_ids.max() + 1)
    ]


def test_batch_of_known_rows():
    examples = Rows(
        length=8,
        tokens=_FakeTokens(),
        starts=np.array([10, 20, 30]),
        sizes=np.array([2, 1, 5], np.int32),
        first=np.array([0, 2, 3]),
        pad_id=0,
        cls_id=2,
        sep_id=3,
    )
    batch = examples.batch(np.array([1, -1, 0]))
    assert batch["input_ids"].tolist() == [
        [2, 30, 31, 32, 33, 34, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [2, 10, 11, 3, 2, 20, 3, 0],
    ]
    assert batch["piece_ids"].tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 0],
    ]
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 0, 1, 2, 0],
    ]
    assert not batch["token_type_ids"].any()
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert (len(examples), examples.real_tokens) == (2, 14)


class _FakeTokens:
    """Tokens whose ids are their offsets."""

    def ranges(self, starts, sizes):
        return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [3, 16, 128, 4096])
def test_no_token_is_lost_or_added(store, layout, length):
    examples = rows(store, "train", length, layout)
    batch = all_rows(examples)
    found = pieces(batch)
    documents = store.documents("train")
    tokens = store.tokens("train").ranges(documents[:1], documents[-1:])
    expected = [
        [store.tokenizer.cls_id, *tokens[start : min(start + length - 2, end)].tolist(), 3]
        for begin, end in pairwise(documents)
        for start in range(begin, end, length - 2)
    ]
    if layout == "document":
        assert found == expected
    else:
        assert sorted(found) == sorted(expected)
    assert examples.real_tokens == sum(map(len, expected)) == np.count_nonzero(batch["piece_ids"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields_agree_with_each_other(store, layout):
    batch = all_rows(rows(store, "train", 64, layout))
    ids, piece_ids, position_ids = (
        batch[key] for key in ("input_ids", "piece_ids", "position_ids")
    )
    is_cls = ids == store.tokenizer.cls_id
    # Pieces are numbered from the left without gaps, and padding is at the end.
    np.testing.assert_array_equal(piece_ids, np.cumsum(is_cls, axis=1) * (piece_ids > 0))
    assert not np.any((piece_ids[:, :-1] == 0) & (piece_ids[:, 1:] > 0))
    np.testing.assert_array_equal(position_ids == 0, is_cls | (piece_ids == 0))
    assert np.all(ids[piece_ids == 0] == store.tokenizer.pad_id)
    if layout == "document":
        assert piece_ids.max() == 1


def test_batch_is_its_rows(store):
    examples = rows(store, "train", 64, "packed")
    whole = all_rows(examples)
    indices = np.array([5, 0, len(examples) - 1, 5])
    for key, array in examples.batch(indices).items():
        np.testing.assert_array_equal(array, whole[key][indices])


def test_result_is_reproducible(store):
    first, second = (all_rows(rows(store, "train", 64, "packed")) for _ in range(2))
    for key in first:
        np.testing.assert_array_equal(first[key], second[key])


def pack_one_by_one(widths: np.ndarray, length: int) -> list[int]:
    """Best-fit decreasing as textbooks have it: the sorted free space of the rows."""
    free: list[int] = []
    for width in sorted(widths.tolist(), reverse=True):
        fitting = [row for row in range(len(free)) if free[row] >= width]
        if fitting:
            free[min(fitting, key=free.__getitem__)] -= width
        else:
            free.append(length - width)
    return sorted(free)


@pytest.mark.parametrize("seed", range(10))
def test_packing_is_best_fit_decreasing(seed):
    generator = np.random.default_rng(seed)
    length = int(generator.integers(8, 70))
    widths = generator.integers(3, length + 1, int(generator.integers(1, 400)))
    row = _pack(widths, length)
    used = np.bincount(row, widths)
    assert np.all(used > 0)
    assert sorted((length - used).tolist()) == pack_one_by_one(widths, length)


def test_millions_of_pieces_pack_quickly():
    widths = np.random.default_rng(0).integers(3, 129, 2_000_000)
    started = time.monotonic()
    row = _pack(widths, 128)
    assert time.monotonic() - started < 3
    assert np.bincount(row, widths).max() == 128
    assert widths.sum() / ((row.max() + 1) * 128) > 0.99


def efficiency(store: TokenStore, length: int) -> float:
    examples = rows(store, "train", length, "packed")
    return examples.real_tokens / (len(examples) * length)


@pytest.mark.parametrize("length", [64, 128])
def test_packing_wastes_little_on_docstrings(store, length):
    assert efficiency(store, length) > 0.98


@pytest.mark.parametrize(
    "corpus", ["en_novels_0", "en_us_presidential_speeches", "en_wikipedia_squad_articles"]
)
def test_packing_wastes_little_on_corpora(shared_data, tmp_path, corpus):
    documents = sources.documents(str(shared_data / f"text/{corpus}.txt.xz"))
    vocab = shared_data / "vocab/bert-base-uncased.vocab.txt"
    tokenizer = Tokenizer.from_vocab_file(vocab, **SETTINGS)
    store = make_store(tmp_path / "store", documents, tokenizer)
    for length in (128, 512):
        assert efficiency(store, length) > 0.98


def test_bad_layout_and_length_are_refused(store):
    with pytest.raises(
        UserError, match=r"^data\.layout: found 'dense'; allowed are packed, document"
    ):
        rows(store, "train", 64, "dense")
    with pytest.raises(UserError, match=r"found 2; allowed are 3 and more"):
        rows(store, "train", 2, "packed")
