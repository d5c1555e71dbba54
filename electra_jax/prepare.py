"""Build the tokenizer and the token store of a recipe, or find them already there.

    python -m electra_jax.prepare --config=configs/tiny.py
    python -m electra_jax.prepare --config=configs/large.py --config.data.source='text/*.txt'

Training does this by itself. As a command of its own it runs on a machine without accelerators, and
shows what a corpus holds before anything is trained on it. Often used are

    --config.data.source='a.txt,b/*.txt.gz'   text files
    --config.data.dir=DIR                     where token stores are kept
    --config.data.vocab=vocab.txt             a given vocabulary instead of a trained one
    --config.data.vocab_size=32000            pieces of a trained one
    --config.data.held_out=0.01               share of the documents kept for evaluation
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from electra_jax import cli
from electra_jax.config import validate
from electra_jax.data import sources
from electra_jax.data.store import FORMAT_VERSION, TokenStore, open_store, write_store
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.errors import UserError


def prepare(data_config: Any, log: Callable[[str], None] = print) -> TokenStore:
    """Opens the token store for a configuration; makes it first when it is missing.

    Stores live side by side in `data_config.dir`, each under a name made from the source and a
    hash of all that determines its content, so that a changed setting gives another store.
    Meant to be called by a single process at a time.

    Args:
      data_config: has `source`, `dir`, `vocab` (a vocabulary file, or "" to train one),
        `vocab_size` (of a trained vocabulary), `lower_case`, `strip_accents`, `max_word_chars` and
        `held_out`.
      log: receives lines of progress.

    Raises:
      UserError: the source or the vocabulary cannot be used, or the source files have changed
        since the store was made.
    """
    directory = store_directory(data_config)
    if directory.exists():
        store = open_store(directory)
        _check_unchanged(store, data_config.source)
        log(f"using {directory}")
        return store

    started = time.monotonic()
    log(f"making {directory}")
    documents = _documents(data_config.source)
    tokenizer = _tokenizer(data_config, documents, log)
    write_store(
        directory, data_config.source, documents(), tokenizer, data_config.held_out, log=log
    )
    store = open_store(directory)
    _report(store, time.monotonic() - started, log)
    return store


def store_directory(data_config: Any) -> Path:
    """Where `prepare` keeps the store for a configuration."""
    source = data_config.source
    identity = {
        "format_version": FORMAT_VERSION,
        "source": source,
        "vocab": _sha256(data_config.vocab) if data_config.vocab else data_config.vocab_size,
        "held_out": data_config.held_out,
        **_tokenizer_settings(data_config),
    }
    if source == sources.DOCSTRINGS:
        # Updating a package is normal and gives another corpus. Changed files are a surprise, and
        # are reported instead.
        identity["fingerprint"] = sources.fingerprint(source)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    short_name = re.sub(r"[^A-Za-z0-9]+", "-", source)[-40:].strip("-")
    return Path(data_config.dir).expanduser() / f"{short_name}-{digest[:12]}"


def _documents(source: str) -> Callable[[], Iterable[list[str]]]:
    """A function that gives the documents, however often it is called."""
    if source == sources.DOCSTRINGS:
        # They fit in memory, and take longer to find than to tokenise.
        found = list(sources.documents(source))
        return lambda: found
    return lambda: sources.documents(source)


def _tokenizer(
    data_config: Any, documents: Callable[[], Iterable[list[str]]], log: Callable[[str], None]
) -> Tokenizer:
    settings = _tokenizer_settings(data_config)
    if data_config.vocab:
        return Tokenizer.from_vocab_file(data_config.vocab, **settings)
    log(f"training a vocabulary of {data_config.vocab_size:,} tokens")
    return Tokenizer.train(documents(), data_config.vocab_size, **settings)


def _tokenizer_settings(data_config: Any) -> dict:
    return {
        "lower_case": data_config.lower_case,
        "strip_accents": data_config.strip_accents,
        "max_word_chars": data_config.max_word_chars,
    }


def _sha256(vocab: str) -> str:
    try:
        return hashlib.sha256(Path(vocab).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"data.vocab: cannot read {vocab}: {error.strerror}") from error


def _check_unchanged(store: TokenStore, source: str) -> None:
    if source == sources.DOCSTRINGS:
        return  # The fingerprint is part of the directory's name.
    changed = sources.changed_file(source, store.manifest["fingerprint"])
    if changed:
        raise UserError(
            f"data.source: {changed} is not what {store.directory} was made from; delete that "
            "directory to have it made again"
        )


def _report(store: TokenStore, seconds: float, log: Callable[[str], None]) -> None:
    for split, counts in store.manifest["splits"].items():
        log(
            f"{split}: {counts['documents']:,} documents, {counts['characters']:,} characters, "
            f"{counts['tokens']:,} tokens, {counts['tokens'] / counts['words']:.2f} tokens per "
            f"word, {counts['unknown'] / counts['tokens']:.3%} unknown"
        )
    log(f"vocabulary of {store.tokenizer.vocab_size:,} tokens; made in {seconds:.0f} s")


def main() -> None:
    """Prepare the data of the recipe."""
    config, _ = cli.parse_with_recipe(cli.recipe_flags(), __doc__)
    mesh = config.parallel
    validate(config, num_devices=max(1, mesh.data) * mesh.fsdp * mesh.tensor)  # not those of here
    prepare(config.data)


if __name__ == "__main__":
    cli.run(main)
