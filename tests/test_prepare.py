import gzip
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from stdlib_text import stdlib_documents

from electra_jax.data import sources
from electra_jax.data.tokenizer import SPECIAL_TOKENS
from electra_jax.errors import UserError
from electra_jax.prepare import prepare, store_directory


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join("\n".join(document) for document in stdlib_documents()))
    return path


@pytest.fixture
def config(tmp_path, corpus) -> ConfigDict:
    return ConfigDict(
        {
            "source": str(corpus),
            "dir": str(tmp_path / "stores"),
            "vocab": "",
            "vocab_size": 1000,
            "lower_case": True,
            "strip_accents": True,
            "max_word_chars": 200,
            "held_out": 0.1,
        }
    )


def all_tokens(store) -> np.ndarray:
    offsets = store.documents("train")
    return store.tokens("train").ranges(offsets[:1], offsets[-1:])


def test_store_is_made_once_then_used(config):
    messages: list[str] = []
    made = prepare(config, messages.append)
    assert made.directory == store_directory(config)
    assert made.tokenizer.vocab_size == 1000
    assert sum(counts["documents"] for counts in made.manifest["splits"].values()) == len(
        stdlib_documents()
    )
    assert any("tokens per word" in message for message in messages)

    again: list[str] = []
    assert prepare(config, again.append).hash == made.hash
    assert again == [f"using {made.directory}"]


def test_result_does_not_depend_on_the_run(config, tmp_path):
    first = prepare(config, lambda _: None)
    config.dir = str(tmp_path / "elsewhere")
    assert prepare(config, lambda _: None).hash == first.hash


def test_line_ends_make_no_difference(config, corpus):
    unix = prepare(config, lambda _: None)
    windows = corpus.with_name("windows.txt")
    windows.write_bytes(corpus.read_bytes().replace(b"\n", b"\r\n"))
    config.source = str(windows)
    np.testing.assert_array_equal(all_tokens(prepare(config, lambda _: None)), all_tokens(unix))


def test_given_vocabulary_is_used(config, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, "the", "return"]))
    config.vocab = str(vocab)
    store = prepare(config, lambda _: None)
    assert store.tokenizer.vocab[-2:] == ["the", "return"]
    assert set(np.unique(all_tokens(store))) == {1, 5, 6}


def test_whatever_changes_the_content_changes_the_directory(config, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("one content")
    changes = {
        "source": f"{config.source},more.txt",
        "vocab": str(vocab),
        "vocab_size": 2000,
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
    assert len(directories) == 9
    assert all(directory.parent == Path(config.dir) for directory in directories)


def test_changed_source_is_refused_but_a_deleted_one_is_not(config, corpus):
    made = prepare(config, lambda _: None)
    corpus.write_text(corpus.read_text() + "\n\nOne more document.\n")
    message = rf"^data\.source: {corpus} is not what {made.directory} was made from; delete"
    with pytest.raises(UserError, match=message):
        prepare(config, lambda _: None)
    corpus.unlink()
    assert prepare(config, lambda _: None).hash == made.hash


def test_failure_leaves_no_store(config, corpus):
    corpus.with_suffix(".txt.gz").write_bytes(gzip.compress(corpus.read_bytes())[:-100])
    config.source = str(corpus.with_suffix(".txt.gz"))
    with pytest.raises(UserError, match=r"corpus\.txt\.gz: cannot be read beyond line"):
        prepare(config, lambda _: None)
    assert not store_directory(config).exists()


def test_missing_vocabulary_names_the_field(config):
    config.vocab = "nowhere.txt"
    with pytest.raises(UserError, match=r"^data\.vocab: cannot read nowhere\.txt"):
        prepare(config, lambda _: None)


def test_docstrings_are_found_once_and_belong_to_the_installed_packages(config, monkeypatch):
    calls = []

    def docstrings():
        calls.append(1)
        return (("package", "\n".join(document)) for document in stdlib_documents())

    monkeypatch.setattr(sources, "docstrings", docstrings)
    config.source = "docstrings"
    store = prepare(config, lambda _: None)
    assert len(calls) == 1
    assert store.directory.name.startswith("docstrings-")
    assert prepare(config, lambda _: None).hash == store.hash
    assert len(calls) == 1

    monkeypatch.setattr(sources, "fingerprint", lambda _: {"python": "other", "packages": []})
    assert store_directory(config) != store.directory
