import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from stdlib_text import stdlib_documents
from stores import ENVIRONMENT, UNCASED

from electra_jax.data.formats import docstrings
from electra_jax.data.preparation import prepare, store_directory
from electra_jax.data.store import TokenStore
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.writing import unfinished
from electra_jax.errors import UserError

pytestmark = pytest.mark.process

SPLITS = ("train", "held_out")


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join("\n".join(document) for document in stdlib_documents()))
    return path


@pytest.fixture
def config(tmp_path, corpus) -> ConfigDict:
    where = {"source": str(corpus), "dir": str(tmp_path / "stores"), "on_error": "raise"}
    vocab = {"vocab": "", "tokenizer": "wordpiece", "vocab_size": 1000}
    settings = {"special_tokens": SPECIAL_TOKENS, **UNCASED}
    return ConfigDict({**where, **vocab, **settings, "held_out": 0.1})


@pytest.fixture
def made(config) -> Callable[..., TokenStore]:
    """Prepares the configuration with some fields changed; words of a vocabulary may be given."""

    def made(log=lambda _: None, words=(), **changes) -> TokenStore:
        if words:
            vocab = Path(config.dir).with_name("vocab.txt")
            vocab.write_text("\n".join([*SPECIAL_TOKENS, *words]))
            changes["vocab"] = str(vocab)
        return prepare(ConfigDict({**config, **changes}), log)

    return made


def test_store_is_made_once_then_used(made, config, tmp_path):
    messages: list[str] = []
    store = made(messages.append)
    assert store.directory == store_directory(config)
    assert store.tokenizer.vocab_size == 1000
    documents = (counts["documents"] for counts in store.manifest["splits"].values())
    assert sum(documents) == len(stdlib_documents())
    assert any("tokens per word" in message for message in messages)

    again: list[str] = []
    assert made(again.append).hash == store.hash
    assert again == [f"using {store.directory}"]
    assert made(dir=str(tmp_path / "elsewhere")).hash == store.hash


def test_line_ends_make_no_difference(made, corpus):
    unix = made()
    for name, ends in {"windows": b"\r\n", "old": b"\r"}.items():
        other = corpus.with_name(f"{name}.txt")
        other.write_bytes(corpus.read_bytes().replace(b"\n", ends))
        store = made(source=str(other))
        for path in unix.directory.glob("*.npy"):
            assert (store.directory / path.name).read_bytes() == path.read_bytes()


HOSTILE = "form\x0cfeed \ufeff bom nul\x00nul joined\u200djoined next\x85line para\u2028graph"


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_tokens_in_are_tokens_out_however_lines_are_cut(made, config, tmp_path, kind):
    words = [word for document in stdlib_documents() for line in document for word in line.split()]
    words = (words * 3)[:50_000] + HOSTILE.split(" ")
    lines = [" ".join(words[i : i + 100]) for i in range(0, len(words), 100)]
    config.update(tokenizer=kind, vocab_size=1500, lower_case=False, strip_accents=False)
    trained = made()
    vocab = str(trained.directory / "tokenizer" / trained.tokenizer.vocab_file)
    for number, joint in enumerate([" ", "\n", "\r\n", "\r"]):
        path = tmp_path / f"{number}.txt"
        blank = 2 * joint.replace(" ", "\n")
        # Enough of other documents for both splits.
        text = blank.join([joint.join(lines), "other", "and more"])
        path.write_text(text, newline="", encoding="utf-8")
        store = made(source=str(path), vocab=vocab, held_out=0.5)
        assert store.tokenizer.hash == trained.tokenizer.hash
        assert store.manifest["dropped"] == {}
        assert store.manifest["read"]["documents"] == 3
        direct = store.tokenizer.encode_batch([*lines, "other", "and more"])
        assert sum(len(store.tokens(split)) for split in SPLITS) == sum(map(len, direct))


@pytest.mark.parametrize(
    ("content", "held_out", "facts"),
    [
        ("\n \n\u3000\n", 0.1, r"data\.source: .* 0 documents"),
        ("a", 0.5, r"data\.held_out: 0\.5 .* 1 documents .* split"),
    ],
)
def test_too_little_text_is_refused_and_leaves_nothing(made, tmp_path, content, held_out, facts):
    path = tmp_path / "little.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=facts):
        made(words=["just", "one"], source=str(path), held_out=held_out)
    assert not (tmp_path / "stores").exists()


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("\n".join(f"one line {number}" for number in range(100)), 30),
        (" ".join(["word"] * 50_000), 5_000),
        ("水" * 1000, 100),
    ],
)
def test_end_of_an_only_document_is_held_out(made, tmp_path, content, end):
    path = tmp_path / "one.txt"
    path.write_text(content)
    store = made(words=["one", "line", "word", "水"], source=str(path))
    counts = store.manifest["splits"]
    assert [counts[split]["documents"] for split in counts] == [1, 1]
    total = len(store.tokenizer.encode_batch([content])[0])
    assert counts["train"]["tokens"] + counts["held_out"]["tokens"] == total
    assert abs(counts["held_out"]["tokens"] - end) <= 1
    assert store.manifest["read"]["divided"] == 0


def test_formats_and_options_are_mixed(made, corpus):
    whole = made()
    records = corpus.with_name("records.jsonl")
    documents = [{"body": document} for document in corpus.read_text().split("\n\n")]
    records.write_text("\n".join(map(json.dumps, documents)))
    vocab = str(whole.directory / "tokenizer" / "vocab.txt")
    store = made(source=f"{records}#field=body#weight=1,{corpus}#weight=3", vocab=vocab)
    once, twice = (np.load(x.directory / "train-00000.tokens.npy") for x in (whole, store))
    np.testing.assert_array_equal(twice, np.tile(once, 2))
    half = whole.documents("train").size - 1
    assert store.sources("train").tolist() == [0, half, 2 * half]
    assert store.manifest["sources"] == [f"{records}#field=body", str(corpus)]
    other_weight = made(source=f"{records}#field=body#weight=1,{corpus}#weight=5", vocab=vocab)
    assert other_weight.hash == store.hash  # it is no matter of the store


def test_what_cannot_be_read_is_counted_on_request(made, config, corpus):
    corpus.write_bytes(corpus.read_bytes() + b"\n\nna\xefve\n")
    with pytest.raises(UserError, match=rf"^{corpus}: line \d+ .*UTF-8"):
        made()
    assert not Path(config.dir).exists()
    messages: list[str] = []
    store = made(messages.append, on_error="skip")
    assert store.manifest["dropped"] == {"lines that are not UTF-8": 1}
    assert "left out: 1 lines that are not UTF-8" in messages


def command_line(config: ConfigDict) -> list[str]:
    recipe = Path(config.dir).with_name("recipe.py")
    recipe.write_text("from electra_jax.config import get_config")
    changed = ("source", "dir", "vocab_size", "held_out")
    return [
        *(sys.executable, "-m", "electra_jax.prepare", f"--config={recipe}"),
        *(f"--config.data.{name}={config[name]}" for name in changed),
    ]


def test_processes_that_want_the_same_store_make_it_once(config):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command_line(config), text=True, **pipes) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [errors for _, errors in outputs] == ["", "", ""]
    assert sum("making" in output for output, _ in outputs) == 1
    assert [path.name for path in Path(config.dir).iterdir()] == [store_directory(config).name]


HOLDER = """
import sys, time
from pathlib import Path
from electra_jax.files import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_waiting_process_takes_over_from_one_that_dies(config):
    directory = store_directory(config)
    pipe = {"stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HOLDER, f"{directory}.lock"]
    holder = subprocess.Popen(command, env=ENVIRONMENT, **pipe)
    assert holder.stdout.readline() == "held\n"
    unfinished(directory).mkdir()
    (unfinished(directory) / "train-00007.tokens.npy").write_text("left over")
    waiting = subprocess.Popen(command_line(config), **pipe)
    assert f"waiting for process {holder.pid} on " in waiting.stdout.readline()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert "made in" in waiting.communicate(timeout=120)[0]
    assert not (directory / "train-00007.tokens.npy").exists()
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_whatever_changes_the_content_changes_the_directory(config, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("one content")
    changes = {
        "source": f"{config.source},more.txt",
        "vocab": str(vocab),
        "vocab_size": 2000,
        "tokenizer": "bpe",
        "special_tokens": ("<pad>", *SPECIAL_TOKENS[1:]),
        "on_error": "skip",
        "lower_case": False,
        "strip_accents": False,
        "max_word_chars": 100,
        "held_out": 0.2,
    }
    directories = {store_directory(config)}
    for field, value in changes.items():
        directories.add(store_directory(ConfigDict({**config, field: value})))
    vocab.write_text("another content")
    directories.add(store_directory(ConfigDict({**config, "vocab": str(vocab)})))
    assert len(directories) == 12
    assert all(directory.parent == Path(config.dir) for directory in directories)


def test_changed_source_is_refused_but_a_deleted_one_is_not(made, corpus):
    store = made()
    corpus.write_text(corpus.read_text() + "\n\nOne more document.\n")
    with pytest.raises(UserError, match=rf"^data\.source: {corpus} .*{store.directory}"):
        made()
    corpus.unlink()
    assert made().hash == store.hash


def test_what_fails_leaves_no_store(made, config, corpus):
    archive = corpus.with_suffix(".txt.gz")
    archive.write_bytes(gzip.compress(corpus.read_bytes())[:-100])
    with pytest.raises(UserError, match=rf"^{archive}: .*beyond line"):
        made(source=str(archive))
    with pytest.raises(UserError, match=r"^data\.vocab: .*nowhere\.txt"):
        made(vocab="nowhere.txt")
    assert not Path(config.dir).exists()


def test_docstrings_belong_to_the_installed_packages(made, config, monkeypatch):
    found = ["\n".join(document) for document in stdlib_documents()]
    monkeypatch.setattr(docstrings, "docstrings", lambda: found)
    config.source = "docstrings"
    store = made()
    assert store.directory.name.startswith("docstrings-")
    assert made().hash == store.hash
    monkeypatch.setattr(docstrings.platform, "python_version", lambda: "4.0.0")
    assert store_directory(config) != store.directory
