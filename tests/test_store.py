import json
import signal
import subprocess
import sys
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
from stdlib_text import stdlib_documents
from stores import ENVIRONMENT, UNCASED, groups, make_store, store_of, trained

from electra_jax.data.formats.base import Damage
from electra_jax.data.reader import Group
from electra_jax.data.store import Tokens, open_store, verify
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.data.writing import unfinished
from electra_jax.errors import UserError

SPLITS = ("train", "held_out")


@pytest.fixture
def write(tmp_path):
    def write(documents, *, tokenizer=None, name="store", **arguments):
        return make_store(tmp_path / name, documents, tokenizer or trained(), **arguments)

    return write


def encoded_documents(store, split: str) -> list[list[int]]:
    ids = np.concatenate([np.load(path) for path in sorted(store.directory.glob(f"{split}*tok*"))])
    return [ids[begin:end].tolist() for begin, end in pairwise(store.documents(split))]


def test_worked_example_of_the_description(write):
    vocab = [*SPECIAL_TOKENS, "it", "rains", "come", "in", "yes"]
    documents = [["it rains", "come in"], ["yes"], ["come it it"]]
    # The hash of the last one is 0.0019 of the range, and the smallest.
    store = write(documents, tokenizer=WordPiece(vocab, **UNCASED), held_out=0.0025)
    assert np.load(store.directory / "train-00000.tokens.npy").tolist() == [5, 6, 7, 8, 9]
    assert store.documents("train").tolist() == [0, 4, 5]
    assert store.lines("train").tolist() == [0, 2, 4, 5]
    counts = store.manifest["splits"]["train"]
    del counts["shards"]
    assert counts.pop("documents_by_source") == [2]
    expected = {"documents": 2, "lines": 3, "characters": 18}
    assert counts == {**expected, "tokens": 5, "words": 5, "unknown": 0}


def test_every_token_of_every_document_is_in_one_split(write):
    store = write(stdlib_documents())
    encode = trained().encode_batch
    expected = sorted([*chain.from_iterable(encode(lines))] for lines in stdlib_documents())
    train, held_out = (encoded_documents(store, split) for split in SPLITS)
    assert sorted(train + held_out) == expected
    assert 0.05 < len(held_out) / len(expected) < 0.15
    for split, encoded in (("train", train), ("held_out", held_out)):
        counts = store.manifest["splits"][split]
        assert counts["documents"] == len(encoded)
        assert counts["tokens"] == sum(map(len, encoded)) == len(store.tokens(split))
        assert counts["lines"] == store.lines(split).size - 1
        assert counts["unknown"] == sum(ids.count(trained().unk_id) for ids in encoded)


def test_shards_read_as_one(write):
    whole = write(stdlib_documents(), name="whole")
    shards = write(stdlib_documents(), name="shards", size=10, shard_tokens=1000)
    assert len(shards.manifest["splits"]["train"]["shards"]) > 10
    for split in SPLITS:
        assert encoded_documents(shards, split) == encoded_documents(whole, split)
        np.testing.assert_array_equal(shards.lines(split), whole.lines(split))
        counts = np.bincount(np.concatenate(encoded_documents(whole, split)), None, 1000)
        np.testing.assert_array_equal(shards.token_counts(split), counts)


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
        store = write(documents, tokenizer=WordPiece(vocab, **UNCASED), name=str(extra))
        array = np.load(store.directory / "train-00000.tokens.npy")
        assert array.dtype == dtype
        assert array[0] == len(vocab) - 1


@pytest.mark.parametrize(
    ("documents", "held_out", "facts"),
    [
        ([], 0.1, r"^data\.source: .* 0 documents"),
        ([["\u200b"]], 0.1, r"^data\.source: .* 1 documents"),
        (stdlib_documents(), 0.0, r"^data\.held_out: 0\.0 .* held_out split"),
        (stdlib_documents(), 1.0, r"^data\.held_out: 1\.0 .* train split"),
    ],
)
def test_empty_results_are_refused_and_leave_nothing(write, tmp_path, documents, held_out, facts):
    with pytest.raises(UserError, match=facts):
        write(documents, held_out=held_out)
    assert not (tmp_path / "store").exists()


def test_all_that_was_read_is_in_a_split_or_counted(tmp_path):
    documents = [["\u200b"], *stdlib_documents(), [""], ["\u200b", "\u00ad", "\ufffd"]]
    damage = Group([Damage("lines that are not UTF-8", "a.txt: line 3 is not UTF-8")] * 12)
    messages: list[str] = []
    read = [*groups(documents), damage]
    options = {"on_error": "skip", "log": messages.append}
    manifest = store_of(tmp_path / "store", read, trained(), **options).manifest
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
    kept, characters, lines = (
        sum(counts[name] for counts in manifest["splits"].values())
        for name in ("documents", "characters", "lines")
    )
    assert kept == len(stdlib_documents())
    assert characters == manifest["read"]["characters"] - 4
    assert lines == sum(map(len, stdlib_documents()))
    left_out = [message for message in messages if message.startswith("left out: a.txt: line 3")]
    assert len(left_out) == 10  # the counts tell the rest


PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from stdlib_text import stdlib_documents
documents = stdlib_documents()  # which grow with what is imported
from stores import groups, store_of, trained

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    progress = directory.with_name(f"{directory.name}.unfinished") / "progress.json"

    def read():
        for group in groups(documents, 10):
            if progress.exists() and json.loads(progress.read_text())["groups"] >= 12:
                os.kill(os.getpid(), signal.SIGKILL)
            yield group

    store_of(directory, read(), trained(), shard_tokens=1000)
"""


def test_killed_writer_goes_on_where_it_was(tmp_path, write):
    whole = write(stdlib_documents(), name="whole", size=10, shard_tokens=1000)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for name in ("store", "other"):
        command = [sys.executable, program, tmp_path / name]
        result = subprocess.run(command, env=ENVIRONMENT, check=False)
        assert result.returncode == -signal.SIGKILL
        assert not (tmp_path / name).exists()

    place = unfinished(tmp_path / "store")
    assert any(place.glob("train-*.npy"))
    done = json.loads((place / "progress.json").read_text())["groups"]
    messages: list[str] = []
    read = groups(stdlib_documents(), 10)
    read[:done] = [Group()] * done  # what is in shards already is not looked at again
    options = {"log": messages.append, "shard_tokens": 1000}
    resumed = store_of(tmp_path / "store", read, trained(), **options)
    assert messages[0] == f"going on after {10 * done} documents"
    assert resumed.hash == whole.hash
    assert not place.exists()

    other = store_of(tmp_path / "other", read, trained(), sources="e")
    assert other.manifest["read"]["documents"] == len(stdlib_documents()) - 10 * done


def test_hash_covers_the_tokens_and_does_not_depend_on_processes(write):
    documents = stdlib_documents()
    in_other_processes = write(documents, name="processes", size=10)
    assert write(documents, name="here", size=1000).hash == in_other_processes.hash
    other = write([["rain", *documents[0][1:]], *documents[1:]], name="other")
    assert other.hash != in_other_processes.hash


def test_documents_of_an_entry_lie_together(tmp_path):
    documents = stdlib_documents()
    read = groups(documents[:100]) + groups(documents[100:], source=1)
    store = store_of(tmp_path / "store", read, trained(), sources="abc")
    train, held_out = map(store.sources, SPLITS)
    assert train.tolist() == [0, train[1], store.documents("train").size - 1, train[2]]
    assert train[1] + held_out[1] == 100
    assert train[2] + held_out[2] == len(documents)


def test_damage_is_named(write):
    store = write(stdlib_documents())
    path = store.directory / "train-00000.lines.npy"
    content = path.read_bytes()
    refused = partial(pytest.raises, UserError)
    path.write_bytes(content[:-1])
    with refused(match=rf"^{path}: .*{len(content) - 1} .*{len(content)} bytes"):
        open_store(store.directory)
    path.unlink()
    with refused(match=rf"^{path}: .*no such file"):
        open_store(store.directory)
    path.write_bytes(content)
    assert verify(open_store(store.directory)) == 6
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refused(match=rf"^{path}: not what was written"):
        verify(open_store(store.directory))
    vocab = store.directory / "tokenizer" / "vocab.txt"
    vocab.write_text(vocab.read_text() + "another token\n")
    with refused(match=rf"^{vocab.parent}: not the tokenizer"):
        open_store(store.directory)


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"format_version": 0})])
def test_bad_manifest_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'manifest.json'}: "):
        open_store(tmp_path)
