"""Vocabulary and token store of a configuration: opened, or made first."""

import contextlib
import functools
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.data import reader, sources, tokenizers
from electra_jax.data.reader import Group, logged, take_apart
from electra_jax.data.sources import Source
from electra_jax.data.store import FORMAT_VERSION, TokenStore, open_store
from electra_jax.data.tokenizers.base import SETTINGS, Tokenizer
from electra_jax.data.workers import map_in_order
from electra_jax.data.writing import read_progress, unfinished, write_store
from electra_jax.errors import UserError
from electra_jax.files import locked, sha256

Log = Callable[[str], None]


def prepare(data: ConfigDict, log: Log = print) -> TokenStore:
    """Opens the token store of `config.data`; makes it first when it is missing.

    Stores live side by side in `data.dir`, each under a name made from the source and a hash of
    all that determines its content, so that a changed setting gives another store. Where several
    processes of a machine want the same store, one makes it and the others wait.

    Raises:
      UserError: the source or the vocabulary cannot be used, or the source has changed since the
        store was made. Nothing is left behind.
    """
    entries = sources.parse(data.source)
    directory = store_directory(data)
    if directory.exists():
        store = open_store(directory)
        changed = sources.changed(entries, store.manifest["fingerprint"])
        if changed:
            raise UserError(
                f"data.source: {changed} is not what {directory} was made from; delete that "
                "directory to have it made again"
            )
        log(f"using {directory}")
        return store
    started = time.monotonic()
    origin = {
        "sources": [str(entry) for entry in entries],
        "fingerprint": sources.fingerprint(entries),
    }
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.dir: cannot make {data.dir}: {error.strerror}") from error
    lock = directory.with_name(f"{directory.name}.lock")
    with locked(lock, lambda holder: log(f"waiting for {holder}, which makes {directory}")):
        try:
            if not directory.exists():
                log(f"making {directory}")
                _make(directory, data, entries, origin, log)
        finally:
            lock.unlink()
            with contextlib.suppress(OSError):  # It holds stores.
                directory.parent.rmdir()
    store = open_store(directory)
    _report(store, time.monotonic() - started, log)
    return store


def store_directory(data: ConfigDict) -> Path:
    """Where `prepare` keeps the store of `config.data`.

    Raises:
      UserError: the vocabulary's file cannot be read, or the source has a mistake.
    """
    entries = sources.parse(data.source)
    vocab: Any = {"tokenizer": data.tokenizer, "vocab_size": data.vocab_size}
    if data.vocab:
        try:
            vocab = sha256(Path(data.vocab))
        except OSError as error:
            raise UserError(f"data.vocab: cannot read {data.vocab}: {error.strerror}") from error
    identity = {
        "format_version": FORMAT_VERSION,
        "sources": [str(entry) for entry in entries],
        "on_error": data.on_error,
        "vocab": vocab,
        "held_out": data.held_out,
        # Updating a package or data set is normal and gives another corpus. A changed file is a
        # surprise, and is reported instead.
        "versions": sources.versions(entries),
        **_tokenizer_settings(data),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    short_name = re.sub(r"[^A-Za-z0-9]+", "-", data.source)[-40:].strip("-")
    return Path(data.dir).expanduser() / f"{short_name}-{digest[:12]}"


def _tokenizer_settings(data: ConfigDict) -> dict[str, Any]:
    return {name: data[name] for name in SETTINGS}


def _make(directory: Path, data: ConfigDict, entries: list[Source], origin: dict, log: Log) -> None:
    """Makes a store; after a UserError, nothing of it is left."""
    place = unfinished(directory)
    try:
        if read_progress(place, origin):
            tokenizer = tokenizers.load(place / "tokenizer")
        else:
            shutil.rmtree(place, ignore_errors=True)  # what another source has left
            tokenizer = _tokenizer(data, entries, log)
        groups = reader.groups(entries)
        options = {"origin": origin, "on_error": data.on_error, "log": log}
        write_store(directory, groups, tokenizer, data.held_out, **options)
    except UserError:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _tokenizer(data: ConfigDict, entries: list[Source], log: Log) -> Tokenizer:
    """The tokenizer of the given vocabulary, or of one that is trained on the source."""
    settings = _tokenizer_settings(data)
    if data.vocab:
        return tokenizers.from_file(data.vocab, **settings)
    trainer = tokenizers.TRAINERS[data.tokenizer](data.tokenizer, data.vocab_size, settings)
    summarize = functools.partial(_summarize, trainer.summarize, data.on_error)
    groups = logged(reader.groups(entries), "read for the vocabulary", log)
    for summary in map_in_order(summarize, groups):
        trainer.add(summary)
    log(f"training a {data.tokenizer} vocabulary of {data.vocab_size:,} tokens")
    return trainer.finish()


def _summarize(summarize: Callable[[list[str]], Any], on_error: str, group: Group) -> Any:
    """What training a vocabulary needs to know of a group. Runs in a worker process."""
    documents = take_apart(group, on_error).documents
    return summarize([line for _, lines in documents for line in lines])


def _report(store: TokenStore, seconds: float, log: Log) -> None:
    read = store.manifest["read"]
    log(f"read: {read['documents']:,} documents, {read['characters']:,} characters")
    for reason, count in store.manifest["dropped"].items():
        log(f"left out: {count:,} {reason}")
    for split, counts in store.manifest["splits"].items():
        log(
            f"{split}: {counts['documents']:,} documents, {counts['characters']:,} characters, "
            f"{counts['tokens']:,} tokens, {counts['tokens'] / counts['words']:.2f} tokens per "
            f"word, {counts['unknown'] / counts['tokens']:.3%} unknown"
        )
    log(f"vocabulary of {store.tokenizer.vocab_size:,} tokens; made in {seconds:.0f} s")
