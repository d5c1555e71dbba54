import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from stdlib_text import stdlib_documents
from stores import groups, make_store

from electra_jax.data import store as store_module
from electra_jax.data import tokenizers
from electra_jax.data.formats.base import Damage
from electra_jax.data.reader import Group
from electra_jax.data.store import Tokens, open_store, unfinished, verify
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS, Tokenizer
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError

SETTINGS = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers.train("wordpiece", chain.from_iterable(stdlib_documents()), 1000, **SETTINGS)


@pytest.fixture
def write(tmp_path, tokenizer):
    def write(documents, *, tokenizer=tokenizer, name="store", **arguments):
        return make_store(tmp_path / name, documents, tokenizer, **arguments)

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
        [["it rains", "come in"], ["yes"], ["in"]], tokenizer=WordPiece(vocab, **SETTINGS)
    )
    assert np.load(store.directory / "train-00000.tokens.npy").tolist() == [5, 6, 7, 8, 9]
    assert store.documents("train").tolist() == [0, 4, 5]
    assert store.lines("train").tolist() == [0, 2, 4, 5]
    counts = store.manifest["splits"]["train"]
    del counts["shards"]
    assert counts.pop("documents_by_source") == [2]
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
    shards = write(stdlib_documents(), name="shards", size=10)
    assert len(shards.manifest["splits"]["train"]["shards"]) > 10
    for split in ("train", "held_out"):
        assert encoded_documents(shards, split) == encoded_documents(whole, split)
        np.testing.assert_array_equal(shards.lines(split), whole.lines(split))


def test_token_counts_are_those_of_all_shards(write, monkeypatch):
    monkeypatch.setattr(store_module, "_COUNTED_AT_ONCE", 300)
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 1000)
    store = write(stdlib_documents(), size=10)
    counts = store.token_counts("train")
    everything = np.concatenate([[], *encoded_documents(store, "train")]).astype(int)
    assert counts.sum() == store.manifest["splits"]["train"]["tokens"] > 10_000
    assert len(store.manifest["splits"]["train"]["shards"]) > 1
    np.testing.assert_array_equal(
        counts, np.bincount(everything, minlength=store.tokenizer.vocab_size)
    )


def test_tokens_fetches_ranges_of_many_shards():
    tokens = Tokens([np.arange(0, 5), np.arange(5, 6), np.arange(6, 10)])
    starts, sizes = np.array([6, 0, 5, 3, 2]), np.array([4, 2, 1, 2, 0])
    assert tokens.ranges(starts, sizes).tolist() == [6, 7, 8, 9, 0, 1, 5, 3, 4]
    assert tokens.ranges(starts[:0], sizes[:0]).size == 0
    assert len(tokens) == 10


def test_mapped_tokens_travel_as_paths(write):
    tokens = write(stdlib_documents()).tokens("train")
    assert len(pickle.dumps(tokens)) < 1000
    again = copy.deepcopy(tokens)  # the same way, without the bytes
    everything = np.array([0]), np.array([len(tokens)])
    np.testing.assert_array_equal(again.ranges(*everything), tokens.ranges(*everything))


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
        store = write(documents, tokenizer=WordPiece(vocab, **SETTINGS), name=str(extra))
        array = np.load(store.directory / "train-00000.tokens.npy")
        assert array.dtype == dtype
        assert array[0] == len(vocab) - 1


def test_documents_and_lines_without_tokens_are_left_out(write):
    documents = [["\u200b"], *stdlib_documents(), ["\u00ad", "\ufffd"]]
    store = write(documents, name="with")
    assert store.manifest["dropped"] == {"documents without tokens": 2}
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
    assert not (tmp_path / "store").exists()


def tally(store) -> tuple[int, int]:
    """Documents and characters that are in the splits."""
    counts = store.manifest["splits"].values()
    return tuple(sum(count[name] for count in counts) for name in ("documents", "characters"))


def test_all_that_was_read_is_in_a_split_or_counted(write):
    documents = [["\u200b"], *stdlib_documents(), [""], ["\u00ad", "\ufffd"]]
    damage = Group([Damage("lines that are not UTF-8", "a.txt: line 3 is not UTF-8")] * 12)
    messages: list[str] = []
    store = make_store_of([*groups(documents), damage], write, messages)
    manifest = store.manifest
    assert manifest["dropped"] == {
        "documents without tokens": 2,
        "documents without text": 1,
        "lines that are not UTF-8": 12,
    }
    assert manifest["read"] == {
        "documents": len(documents) - 1,
        "characters": sum(len(line) for document in documents for line in document),
        "divided": 0,
    }
    kept, characters = tally(store)
    assert kept == len(stdlib_documents())
    assert characters == manifest["read"]["characters"] - 3
    left_out = [message for message in messages if message.startswith("left out: a.txt: line 3")]
    assert len(left_out) == 10  # the counts tell the rest


def make_store_of(read: list[Group], write, messages: list[str]):
    from unittest import mock

    with mock.patch("stores.groups", lambda *_: read):
        return write([], on_error="skip", log=messages.append)


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from stores import make_store
from electra_jax.data import store, tokenizers

def killed(writers, real=store._write_json):
    def write(path, content):
        real(path, content)
        if path.name == "progress.json" and content["groups"] >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    return write

if __name__ == "__main__":
    store.SHARD_TOKENS = 1000
    store._write_json = killed(store._write_json)
    directory = Path(sys.argv[1])
    made = tokenizers.load(directory.parent / "tokenizer")
    documents = json.loads((directory.parent / "documents.json").read_text())
    make_store(directory, documents, made, size=10)
"""


def test_killed_writer_goes_on_where_it_was(tmp_path, write, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 1000)
    whole = write(stdlib_documents(), name="whole", size=10)
    tokenizer.save(tmp_path / "tokenizer")
    # What documentation there is depends on what has been imported before.
    (tmp_path / "documents.json").write_text(json.dumps(stdlib_documents()))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    directory = tmp_path / "store"
    paths = [*sys.path, str(Path(__file__).parent)]
    result = subprocess.run(
        [sys.executable, program, directory, "12"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert result.returncode == -signal.SIGKILL
    assert not directory.exists()
    assert any(unfinished(directory).glob("train-*.npy"))

    messages: list[str] = []
    seen = []
    real = store_module._encode
    monkeypatch.setattr(
        store_module, "_encode", lambda *arguments: seen.append(1) or real(*arguments)
    )
    monkeypatch.setattr(store_module, "map_in_order", map)
    resumed = write(stdlib_documents(), log=messages.append, size=10)
    assert messages[0] == "going on after 120 documents"
    assert len(seen) == len(groups(stdlib_documents(), 10)) - 12
    assert resumed.hash == whole.hash
    assert not unfinished(directory).exists()

    # Another origin does not go on from there.
    subprocess.run(
        [sys.executable, program, tmp_path / "other", "12"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    other = write(
        stdlib_documents(), name="other", origin={"sources": ["memory"], "fingerprint": ["new"]}
    )
    assert tally(other) == tally(whole)


def test_number_of_processes_changes_nothing(write, monkeypatch):
    one = write(stdlib_documents(), name="one", size=10)
    monkeypatch.setattr(store_module, "map_in_order", map)
    assert write(stdlib_documents(), name="other", size=10).hash == one.hash


def test_documents_of_an_entry_lie_together(write, monkeypatch):
    documents = stdlib_documents()
    read = groups(documents[:100]) + groups(documents[100:], source=1)
    monkeypatch.setattr("stores.groups", lambda *_: read)
    store = write([], origin={"sources": ["a", "b", "c"], "fingerprint": []})
    train, held_out = (store.sources(split) for split in ("train", "held_out"))
    assert train.tolist() == [0, train[1], store.documents("train").size - 1, train[2]]
    assert train[1] + held_out[1] == 100
    assert train[2] + held_out[2] == len(documents)


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

    changed = path.with_name("held_out-00000.tokens.npy")
    assert verify(open_store(store.directory)) == 6
    original = changed.read_bytes()
    changed.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"^{changed}: not what was written; delete"):
        verify(open_store(store.directory))
    changed.write_bytes(original)

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
