import json
from itertools import chain

import numpy as np
import pytest
from stdlib_text import stdlib_documents

from electra_jax.data import store as store_module
from electra_jax.data.store import Tokens, open_store, write_store
from electra_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from electra_jax.errors import UserError

SETTINGS = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(stdlib_documents(), 1000, **SETTINGS)


@pytest.fixture
def write(tmp_path, tokenizer):
    source = tmp_path / "text.txt"
    source.write_text("the fingerprint is made of this")

    def write(documents, *, tokenizer=tokenizer, held_out=0.1, name="store"):
        write_store(
            tmp_path / name, str(source), documents, tokenizer, held_out, log=lambda _: None
        )
        return open_store(tmp_path / name)

    return write


def encoded_documents(store, split: str) -> list[list[int]]:
    tokens, documents = store.tokens(split), store.documents(split)
    return [
        tokens.ranges(documents[i : i + 1], documents[i + 1 : i + 2] - documents[i]).tolist()
        for i in range(documents.size - 1)
    ]


def test_worked_example_of_the_description(write, monkeypatch):
    vocab = [*SPECIAL_TOKENS, "it", "rains", "come", "in", "yes"]
    monkeypatch.setattr(store_module, "_is_held_out", lambda document, _: document == ["in"])
    store = write(
        [["it rains", "come in"], ["yes"], ["in"]], tokenizer=Tokenizer(vocab, **SETTINGS)
    )
    assert np.load(store.directory / "train-00000.tokens.npy").tolist() == [5, 6, 7, 8, 9]
    assert store.documents("train").tolist() == [0, 4, 5]
    assert store.lines("train").tolist() == [0, 2, 4, 5]
    counts = store.manifest["splits"]["train"]
    del counts["shards"]
    assert counts == {
        "documents": 2,
        "lines": 3,
        "characters": 18,
        "tokens": 5,
        "words": 5,
        "unknown": 0,
    }


def test_every_token_of_every_document_is_in_one_split(write, tokenizer):
    store = write(stdlib_documents())
    expected = sorted(
        list(chain.from_iterable(tokenizer.encode_batch(document)))
        for document in stdlib_documents()
    )
    train, held_out = (encoded_documents(store, split) for split in ("train", "held_out"))
    assert sorted(train + held_out) == expected
    assert 0.05 < len(held_out) / len(expected) < 0.15
    for split, encoded in (("train", train), ("held_out", held_out)):
        counts = store.manifest["splits"][split]
        assert counts["documents"] == len(encoded)
        assert counts["tokens"] == sum(map(len, encoded)) == len(store.tokens(split))
        assert counts["lines"] == store.lines(split).size - 1
        assert counts["unknown"] == sum(ids.count(tokenizer.unk_id) for ids in encoded)


def test_shards_read_as_one(write, monkeypatch):
    whole = write(stdlib_documents(), name="whole")
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(store_module, "_BATCH_CHARACTERS", 500)
    shards = write(stdlib_documents(), name="shards")
    assert len(shards.manifest["splits"]["train"]["shards"]) > 10
    for split in ("train", "held_out"):
        assert encoded_documents(shards, split) == encoded_documents(whole, split)
        np.testing.assert_array_equal(shards.lines(split), whole.lines(split))


def test_tokens_fetches_ranges_of_many_shards():
    tokens = Tokens([np.arange(0, 5), np.arange(5, 6), np.arange(6, 10)])
    starts, sizes = np.array([6, 0, 5, 3, 2]), np.array([4, 2, 1, 2, 0])
    assert tokens.ranges(starts, sizes).tolist() == [6, 7, 8, 9, 0, 1, 5, 3, 4]
    assert tokens.ranges(starts[:0], sizes[:0]).size == 0
    assert len(tokens) == 10


def test_split_depends_on_the_text_only(write):
    documents = stdlib_documents()
    store = write(documents, name="once")
    again = write(documents[::-1] + documents, name="twice")
    once = set(map(tuple, encoded_documents(store, "held_out")))
    assert set(map(tuple, encoded_documents(again, "held_out"))) == once


def test_ids_are_as_narrow_as_the_vocabulary_allows(write):
    for extra, dtype in ((2**16 - 5, np.uint16), (2**16 - 4, np.uint32)):
        vocab = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(extra))]
        documents = [[vocab[-1], f"w{i}"] for i in range(100)]
        store = write(documents, tokenizer=Tokenizer(vocab, **SETTINGS), name=str(extra))
        array = np.load(store.directory / "train-00000.tokens.npy")
        assert array.dtype == dtype
        assert array[0] == len(vocab) - 1


def test_documents_and_lines_without_tokens_are_left_out(write):
    documents = [["\u200b"], *stdlib_documents(), ["\u00ad", "\ufffd"]]
    store = write(documents, name="with")
    assert store.manifest["dropped"] == {"empty": 2}
    more_lines = [["\u200b", *document] for document in stdlib_documents()]
    total = sum(counts["lines"] for counts in store.manifest["splits"].values())
    other = write(more_lines, name="more")
    assert sum(counts["lines"] for counts in other.manifest["splits"].values()) == total


@pytest.mark.parametrize(
    ("documents", "held_out", "message"),
    [
        ([], 0.1, r"^data\.source: none of the 0 documents"),
        ([["\u200b"]], 0.1, r"^data\.source: none of the 1 documents"),
        (stdlib_documents(), 0.0, r"^data\.held_out: 0\.0 puts none .* the held_out split"),
        (stdlib_documents(), 1.0, r"^data\.held_out: 1\.0 puts none .* the train split"),
    ],
)
def test_empty_results_are_refused_and_leave_nothing(write, tmp_path, documents, held_out, message):
    with pytest.raises(UserError, match=message):
        write(documents, held_out=held_out)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_interrupted_store_does_not_appear(write, tmp_path):
    def interrupted():
        yield from stdlib_documents()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(interrupted())
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_hash_is_reproducible_and_covers_the_tokens(write):
    documents = stdlib_documents()
    first, second, other = (
        write(documents, name="first"),
        write(documents, name="second"),
        write([["rain", *documents[0][1:]], *documents[1:]], name="other"),
    )
    assert first.hash == second.hash != other.hash


def test_damage_is_named(write):
    store = write(stdlib_documents())
    path = store.directory / "train-00000.lines.npy"
    content = path.read_bytes()

    path.write_bytes(content[:-1])
    message = rf"^{path}: found {len(content) - 1} bytes, expected {len(content)} bytes"
    with pytest.raises(UserError, match=message):
        open_store(store.directory)
    path.unlink()
    with pytest.raises(UserError, match=rf"^{path}: found no such file"):
        open_store(store.directory)
    path.write_bytes(content)

    vocab = store.directory / "tokenizer" / "vocab.txt"
    vocab.write_text(vocab.read_text() + "another token\n")
    with pytest.raises(UserError, match=rf"^{vocab.parent}: not the tokenizer"):
        open_store(store.directory)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"format_version": 0})])
def test_bad_manifest_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'manifest.json'}: "):
        open_store(tmp_path)
