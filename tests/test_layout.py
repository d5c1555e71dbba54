import lzma
import time
from functools import partial
from itertools import chain, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from stdlib_text import stdlib_documents
from stores import UNCASED, make_store, rows_of, trained

from electra_jax.data import tokenizers
from electra_jax.data.layout import BEGINS_PIECE, ENDS_SEGMENT, SECOND_SEGMENT, Rows, rows
from electra_jax.data.store import Tokens, TokenStore, offsets
from electra_jax.errors import UserError

PAD, CLS, SEP = 0, 2, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("layout") / "store", stdlib_documents(), trained())


class MadeStore(TokenStore):
    """A store of made-up documents, given by the sizes of their lines. Ids tell the place."""

    tokenizer = SimpleNamespace(pad_id=PAD, cls_id=CLS, sep_id=SEP)

    def __init__(self, documents: list[list[int]], sources: list[int] | None = None):
        self.sizes = documents
        self.documents = lambda split: offsets([*map(sum, documents)])
        self.lines = lambda split: offsets([*chain.from_iterable(documents)])
        self.sources = lambda split: offsets(sources)
        self.num_tokens = sum(map(sum, documents))

    def tokens(self, split: str) -> Tokens:
        return Tokens([np.arange(10, 10 + self.num_tokens, dtype=np.uint32)])


def all_rows(examples: Rows) -> dict[str, np.ndarray]:
    return examples.batch(np.arange(len(examples)))


def pieces(batch: dict[str, np.ndarray]) -> list[list[int]]:
    """The ids of every piece, in order of rows."""
    return [
        ids[segment_ids == piece].tolist()
        for ids, segment_ids in zip(batch["input_ids"], batch["segment_ids"], strict=True)
        for piece in range(1, segment_ids.max() + 1)
    ]


make_rows = partial(rows_of, Tokens([np.arange(100)]), length=8)


def test_batch_of_known_pieces():
    piece = BEGINS_PIECE | ENDS_SEGMENT
    examples = make_rows([10, 20, 30], [2, 1, 5], [piece] * 3, first=[0, 2, 3])
    batch = examples.batch(np.array([1, -1, 0]))
    assert batch["input_ids"].tolist() == [
        [2, 30, 31, 32, 33, 34, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [2, 10, 11, 3, 2, 20, 3, 0],
    ]
    assert batch["segment_ids"].tolist() == [
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
    padding = examples.batch(np.array([-1, -1]))
    assert all(array.shape == (2, 8) and not array.any() for array in padding.values())
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert (len(examples), examples.real_tokens) == (2, 14)


def test_batch_of_known_segments():
    marks = [BEGINS_PIECE, ENDS_SEGMENT, ENDS_SEGMENT | SECOND_SEGMENT, BEGINS_PIECE | ENDS_SEGMENT]
    examples = make_rows([10, 20, 30, 40], [1, 2, 2, 4], marks, first=[0, 3, 4])
    batch = examples.batch(np.array([0, 1, -1]))
    assert batch["input_ids"].tolist() == [
        [2, 10, 20, 21, 3, 30, 31, 3],
        [2, 40, 41, 42, 43, 3, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["segment_ids"].tolist() == [[1] * 8, [1] * 6 + [0] * 2, [0] * 8]
    assert batch["position_ids"].tolist() == [[*range(8)], [*range(6), 0, 0], [0] * 8]
    assert batch["token_type_ids"].tolist() == [[0] * 5 + [1] * 3, [0] * 8, [0] * 8]
    assert (len(examples), examples.real_tokens) == (2, 14)


@pytest.mark.parametrize("layout", ["packed", "document"])
@pytest.mark.parametrize("length", [3, 16, 128, 4096])
def test_no_token_is_lost_or_added(store, layout, length):
    examples = rows(store, "train", length, layout)
    batch = all_rows(examples)
    documents = store.documents("train")
    tokens = store.tokens("train").ranges(documents[:1], documents[-1:])
    expected = [
        [store.tokenizer.cls_id, *tokens[start : min(start + length - 2, end)].tolist(), 3]
        for begin, end in pairwise(documents)
        for start in range(begin, end, length - 2)
    ]
    order = list if layout == "document" else sorted
    assert order(pieces(batch)) == order(expected)
    assert examples.real_tokens == sum(map(len, expected)) == np.count_nonzero(batch["segment_ids"])
    assert examples.dropped_tokens == 0
    assert examples.groups.tolist() == [0, len(examples)]


@pytest.mark.parametrize("layout", ["packed", "electra"])
def test_batch_is_its_rows_and_they_are_the_same_again(store, layout):
    whole = all_rows(rows(store, "train", 64, layout))
    examples = rows(store, "train", 64, layout)
    indices = np.array([5, 0, len(examples) - 1, 5])
    for key, array in examples.batch(indices).items():
        np.testing.assert_array_equal(array, whole[key][indices])
        np.testing.assert_array_equal(all_rows(examples)[key], whole[key])


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


def packed(widths: np.ndarray, length: int) -> np.ndarray:
    """How many tokens each row has that pieces of these widths are packed into."""
    store = MadeStore([])
    store.documents = lambda split: np.append(0, np.cumsum(widths - 2))
    examples = rows(store, "train", length, "packed")
    np.testing.assert_array_equal(np.sort(examples.sizes + 2), np.sort(widths))
    return np.add.reduceat(examples.sizes + 2, examples.first[:-1])


@pytest.mark.parametrize("seed", range(10))
def test_packing_is_best_fit_decreasing(seed):
    generator = np.random.default_rng(seed)
    length = int(generator.integers(8, 70))
    widths = generator.integers(3, length + 1, int(generator.integers(1, 400)))
    used = packed(widths, length)
    assert np.all(used > 0)
    assert sorted((length - used).tolist()) == pack_one_by_one(widths, length)


def test_millions_of_pieces_pack_quickly():
    widths = np.random.default_rng(0).integers(3, 129, 2_000_000)
    started = time.monotonic()
    used = packed(widths, 128)
    assert time.monotonic() - started < 3
    assert used.max() == 128
    assert widths.sum() / (used.size * 128) > 0.99


@pytest.mark.parametrize(
    "corpus", ["en_novels_0", "en_us_presidential_speeches", "en_wikipedia_squad_articles"]
)
def test_packing_wastes_little_on_corpora(shared_data, tmp_path, corpus):
    with lzma.open(shared_data / f"text/{corpus}.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read()
    documents = [document.split("\n") for document in text.split("\n\n")]
    vocab = tokenizers.from_file(shared_data / "vocab/bert-base-uncased.vocab.txt", **UNCASED)
    store = make_store(tmp_path / "store", documents, vocab, size=50)
    for length in (128, 512):
        examples = rows(store, "train", length, "packed")
        assert examples.real_tokens / (len(examples) * length) > 0.98


# Layout `electra`


def original_examples(store: MadeStore, length: int, seed: int) -> list[tuple[list, list]]:
    """The program of spec 5.2 as it is told there, on lists of ids: A and B of each example."""
    generator = np.random.default_rng(seed)
    ids = store.tokens("train").ranges(np.array([0]), np.array([store.num_tokens])).tolist()
    place, target, buffer, examples = 0, length, [], []

    def emit():
        nonlocal target
        limit = 100_000 if generator.random() < 0.1 else (target - 3) // 2
        a, b = [], []
        for line in buffer:
            goes_to_a = len(a) == 0 or len(a) + len(line) < limit
            if not goes_to_a and len(b) == 0 and len(a) < limit:
                goes_to_a = generator.random() < 0.5
            (a if goes_to_a else b).extend(line)
        a = a[: length - 2]
        b = b[: max(0, length - len(a) - 3)]
        examples.append((a, b))
        buffer.clear()
        is_short = generator.random() < 0.05
        target = int(generator.integers(5, length, endpoint=True)) if is_short else length

    for document in store.sizes:
        for size in document:
            buffer.append(ids[place : place + size])
            place += size
            if sum(map(len, buffer)) >= target:
                emit()
        if buffer:
            emit()
    return examples


def made_documents(seed: int, count: int, most_lines: int, longest: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(1, longest + 1, generator.integers(1, most_lines + 1)).tolist()
        for _ in range(count)
    ]


ELECTRA_CASES = {
    "sentences": made_documents(0, 40, 60, 40),
    "short lines": made_documents(1, 40, 60, 4),
    "long lines": made_documents(2, 40, 10, 300),
    "short documents": made_documents(3, 300, 2, 9),
    "documents of one token": [[1]] * 50,
    "documents without a token": [[], [7, 30], [], [], [9] * 30, []],
    "a giant line": [[50_000], [3, 50_000, 3], [20] * 10],
    "lines beyond what is taken for unlimited": [[5, 120_000, 120_000, 5]] * 40,
}


@pytest.mark.parametrize("case", ELECTRA_CASES)
@pytest.mark.parametrize("length", [5, 8, 64, 128])
def test_electra_layout_equals_the_original_program(case, length):
    store = MadeStore(ELECTRA_CASES[case])
    examples = rows(store, "train", length, "electra", seed=length)
    batch = all_rows(examples)
    expected = original_examples(store, length, seed=length)
    assert len(examples) == len(expected)
    for row, (a, b) in enumerate(expected):
        ids = [CLS, *a, SEP, *b, *[SEP] * bool(b)]
        padding = [0] * (length - len(ids))
        types = [0] * (len(a) + 2) + [1] * (len(ids) - len(a) - 2)
        assert batch["input_ids"][row].tolist() == ids + padding
        assert batch["token_type_ids"][row].tolist() == types + padding
        assert batch["segment_ids"][row].tolist() == [1] * len(ids) + padding
        assert batch["position_ids"][row].tolist() == [*range(len(ids)), *padding]
    kept = sum(len(a) + len(b) for a, b in expected)
    assert store.num_tokens == kept + examples.dropped_tokens
    assert examples.real_tokens == np.count_nonzero(batch["segment_ids"])


def test_cases_of_the_electra_layout_cover_what_is_special():
    """A line goes to the first segment after the second has begun; giants are cut."""
    examples = rows(MadeStore(ELECTRA_CASES["sentences"]), "train", 128, "electra")
    assert np.diff(examples.first).max() > 2
    examples = rows(MadeStore([[50_000]]), "train", 128, "electra")
    assert (len(examples), examples.sizes.tolist(), examples.dropped_tokens) == (1, [126], 49_874)


@pytest.mark.parametrize(
    ("length", "shortest", "longest", "kept", "single"),
    [
        (128, 5, 40, 0.90, 0.18),
        (512, 5, 40, 0.98, 0.52),
        (128, 60, 200, 0.67, None),
        (128, 600, 600, 0.21, 1.0),
    ],
)
def test_electra_layout_keeps_as_much_as_the_original(length, shortest, longest, kept, single):
    """Numbers of spec 5.2, for documents of 30 lines."""
    sizes = np.random.default_rng(0).integers(shortest, longest + 1, (2000, 30)).tolist()
    store = MadeStore(sizes)
    examples = rows(store, "train", length, "electra")
    assert 1 - examples.dropped_tokens / store.num_tokens == pytest.approx(kept, abs=0.01)
    ends = examples.marks & ENDS_SEGMENT > 0
    segments = np.add.reduceat(ends, examples.first[:-1], dtype=int)
    if single is not None:
        assert (segments == 1).mean() == pytest.approx(single, abs=0.01)


# Groups


@pytest.mark.parametrize("layout", ["packed", "document", "electra"])
def test_each_source_has_rows_of_its_own(layout):
    documents = made_documents(0, 60, 20, 30)
    counts = [10, 1, 49]
    store = MadeStore(documents, counts)
    examples = rows(store, "train", 64, layout, by_source=True)
    ends = store.documents("train")[offsets(counts)] + 10  # ids tell the place
    assert examples.groups.size == 4
    assert examples.groups[0] == 0
    assert examples.groups[-1] == len(examples)
    for group in range(3):
        part = range(*examples.groups[group : group + 2])
        ids = examples.batch(np.array(part))["input_ids"]
        ids = np.sort(ids[ids > SEP])
        assert (ends[group] <= ids).all()
        assert (ids < ends[group + 1]).all()
        if layout != "electra":
            np.testing.assert_array_equal(ids, np.arange(ends[group], ends[group + 1]))
    whole = rows(store, "train", 64, layout)
    assert whole.groups.tolist() == [0, len(whole)]
    alone = rows(MadeStore(documents[:10]), "train", 64, layout)
    for key, array in all_rows(alone).items():
        np.testing.assert_array_equal(all_rows(examples)[key][: len(alone)], array)


def test_source_without_documents_is_refused():
    store = MadeStore([[3], [4]], [1, 0, 1])
    with pytest.raises(UserError, match=r"^data\.source: entry 2 of 3 .* held_out"):
        rows(store, "held_out", 16, "packed", by_source=True)
    assert len(rows(store, "held_out", 16, "packed")) == 1
