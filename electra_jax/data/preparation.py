"""Vocabulary and token store of a configuration: found, or made."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from electra_jax.data import reader, sources, tokenizers
from electra_jax.data.reader import Group, logged, take_apart
from electra_jax.data.sources import Source
from electra_jax.data.store import FORMAT_VERSION, TokenStore, open_store
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.data.workers import map_in_order
from electra_jax.data.writing import can_go_on, unfinished, write_store
from electra_jax.errors import UserError

Log = Callable[[str], None]


def prepare(data_config: Any, log: Log = print) -> TokenStore:
    """Opens the token store for a configuration; makes it first when it is missing.

    Stores live side by side in `data_config.dir`, each under a name made from the source and a
    hash of all that determines its content, so that a changed setting gives another store. Where
    several processes of a machine want the same store, one makes it and the others wait.

    Args:
      data_config: `config.data`.
      log: receives lines of progress.

    Raises:
      UserError: the source or the vocabulary cannot be used, or the source has changed since the
        store was made. Nothing is left behind.
    """
    entries = sources.parse(data_config.source)
    directory = store_directory(data_config)
    if directory.exists():
        store = open_store(directory)
        _check_unchanged(store, entries)
        log(f"using {directory}")
        return store
    started = time.monotonic()
    origin = {
        "sources": [str(entry) for entry in entries],
        "fingerprint": sources.fingerprint(entries),
    }
    while not directory.exists():
        with _held(unfinished(directory), log) as is_ours:
            if is_ours:
                log(f"making {directory}")
                _make(directory, data_config, entries, origin, log)
    store = open_store(directory)
    _report(store, time.monotonic() - started, log)
    return store


def store_directory(data_config: Any) -> Path:
    """Where `prepare` keeps the store for a configuration."""
    entries = sources.parse(data_config.source)
    trained = {"tokenizer": data_config.tokenizer, "vocab_size": data_config.vocab_size}
    identity = {
        "format_version": FORMAT_VERSION,
        "sources": [str(entry) for entry in entries],
        "on_error": data_config.on_error,
        "vocab": _sha256(data_config.vocab) if data_config.vocab else trained,
        "held_out": data_config.held_out,
        # Updating a package or data set is normal and gives another corpus. A changed file is a
        # surprise, and is reported instead.
        "versions": sources.versions(entries),
        **_tokenizer_settings(data_config),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    short_name = re.sub(r"[^A-Za-z0-9]+", "-", data_config.source)[-40:].strip("-")
    return Path(data_config.dir).expanduser() / f"{short_name}-{digest[:12]}"


@contextlib.contextmanager
def _held(place: Path, log: Log) -> Iterator[bool]:
    """Keeps other processes out of a directory, which is made; waits for one that is there.

    Yields whether the directory is still there, under this name: it is not when that other
    process has completed or given up its work. The end of a process ends its hold.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.dir: cannot make {place}: {error.strerror}") from error
    handle = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that works in {place}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield place.exists() and os.path.samestat(os.fstat(handle), os.stat(place))
    finally:
        os.close(handle)


def _make(directory: Path, data_config: Any, entries: list[Source], origin: dict, log: Log) -> None:
    place = unfinished(directory)
    try:
        if can_go_on(place, origin):
            tokenizer = tokenizers.load(place / "tokenizer")
        else:
            for left_over in place.iterdir():
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
            tokenizer = _tokenizer(data_config, entries, log)
        write_store(
            directory,
            reader.groups(entries),
            tokenizer,
            data_config.held_out,
            origin=origin,
            on_error=data_config.on_error,
            log=log,
        )
    except UserError:
        shutil.rmtree(place)
        with contextlib.suppress(OSError):  # It holds other stores.
            place.parent.rmdir()
        raise


def _tokenizer(data_config: Any, entries: list[Source], log: Log) -> Tokenizer:
    settings = _tokenizer_settings(data_config)
    if data_config.vocab:
        return tokenizers.from_file(data_config.vocab, **settings)
    kind, size = data_config.tokenizer, data_config.vocab_size
    trainer = tokenizers.trainer(kind, size, **settings)
    summarize = functools.partial(_summarize, trainer.summarize, data_config.on_error)
    groups = logged(reader.groups(entries), "read for the vocabulary", log)
    for summary in map_in_order(summarize, groups):
        trainer.add(summary)
    log(f"training a {kind} vocabulary of {size:,} tokens")
    return trainer.finish()


def _summarize(summarize: Callable[[list[str]], Any], on_error: str, group: Group) -> Any:
    """What training a vocabulary needs to know of a group. Runs in a worker process."""
    documents = take_apart(group, on_error).documents
    return summarize([line for _, lines in documents for line in lines])


def _tokenizer_settings(data_config: Any) -> dict:
    return {
        "special_tokens": tuple(data_config.special_tokens),
        "lower_case": data_config.lower_case,
        "strip_accents": data_config.strip_accents,
        "max_word_chars": data_config.max_word_chars,
    }


def _sha256(vocab: str) -> str:
    try:
        return hashlib.sha256(Path(vocab).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"data.vocab: cannot read {vocab}: {error.strerror}") from error


def _check_unchanged(store: TokenStore, entries: list[Source]) -> None:
    changed = sources.changed(entries, store.manifest["fingerprint"])
    if changed:
        raise UserError(
            f"data.source: {changed} is not what {store.directory} was made from; delete that "
            "directory to have it made again"
        )


def _report(store: TokenStore, seconds: float, log: Log) -> None:
    manifest = store.manifest
    read = manifest["read"]
    log(f"read: {read['documents']:,} documents, {read['characters']:,} characters")
    for reason, count in manifest["dropped"].items():
        log(f"left out: {count:,} {reason}")
    for split, counts in manifest["splits"].items():
        log(
            f"{split}: {counts['documents']:,} documents, {counts['characters']:,} characters, "
            f"{counts['tokens']:,} tokens, {counts['tokens'] / counts['words']:.2f} tokens per "
            f"word, {counts['unknown'] / counts['tokens']:.3%} unknown"
        )
    log(f"vocabulary of {store.tokenizer.vocab_size:,} tokens; made in {seconds:.0f} s")
