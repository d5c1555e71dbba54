"""The token store: a corpus tokenised once, from which examples of any length are cut.

A store is a directory:

    manifest.json              what is in the store, and what it was made from
    tokenizer/                 vocab.txt and tokenizer_config.json
    train-00000.tokens.npy     token ids of one document after the other, without special tokens
    train-00000.documents.npy  int64 [documents + 1]: where in tokens each document starts; the end
    train-00000.lines.npy      int64 [lines + 1]: where in tokens each line starts; the end
    train-00001.tokens.npy     the next shard, and so on
    held_out-00000.tokens.npy  the documents kept for evaluation, in the same form

Ids are uint16 when the vocabulary has at most 65,536 tokens, else uint32. A line is a line of the
input, by which a corpus may mark its sentences. Documents and lines never cross shards. Say the
train split has two documents, ("it rains", "come in") and ("yes",), and each word is one token:

    tokens     17 42 8 11 93       it rains come in yes
    documents  0 4 5               it starts the first document, yes the second, 5 is the end
    lines      0 2 4 5             it, come and yes start a line

A document is held out if a hash of its text falls below the held-out fraction of the hash's range,
so the split depends neither on order nor on the rest of the corpus, and two copies of a document
are never on different sides.

Flat arrays read at memory speed through mmap by any number of processes, hold 2 bytes a token, and
fix neither length nor layout of the examples (`electra_jax.data.layout`). The manifest lists the
size and hash of each file. The directory appears under its name only when it is complete.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from electra_jax.data import sources
from electra_jax.data.tokenizer import CONTINUATION, Tokenizer
from electra_jax.errors import UserError

FORMAT_VERSION = 1
SPLITS = ("train", "held_out")
SHARD_TOKENS = 2**26

_ARRAYS = ("tokens", "documents", "lines")
_BATCH_CHARACTERS = 2**20
_LOG_SECONDS = 5


def write_store(
    directory: str | Path,
    source: str,
    documents: Iterable[list[str]],
    tokenizer: Tokenizer,
    held_out: float,
    log: Callable[[str], None] = print,
) -> None:
    """Tokenises documents (lists of lines) into a new store at `directory`.

    Holds one shard of each split in memory at most.

    Args:
      directory: where the store will be; must not exist.
      source: the `config.data.source` that `documents` come from, for the manifest.
      documents: the documents.
      tokenizer: makes the ids; saved with the store.
      held_out: the fraction of documents kept for evaluation.
      log: receives a line of progress every few seconds.

    Raises:
      UserError: nothing is left of the documents, or one of the splits is empty.
    """
    directory = Path(directory)
    unfinished = directory.with_name(f"{directory.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        manifest = {
            "format_version": FORMAT_VERSION,
            "source": source,
            "fingerprint": sources.fingerprint(source),
            "held_out": held_out,
            "tokenizer": {
                "hash": tokenizer.hash,
                "vocab_size": tokenizer.vocab_size,
                **tokenizer.settings,
            },
            **_write_splits(unfinished, documents, tokenizer, held_out, log),
        }
        tokenizer.save(unfinished / "tokenizer")
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _write_splits(
    directory: Path,
    documents: Iterable[list[str]],
    tokenizer: Tokenizer,
    held_out: float,
    log: Callable[[str], None],
) -> dict:
    """Writes the arrays of all splits. Returns the manifest's entries about them."""
    writers = {split: _SplitWriter(directory, split, tokenizer) for split in SPLITS}
    started = logged = time.monotonic()
    read = characters = empty = 0
    for batch in _batches(documents):
        encoded = iter(tokenizer.encode_batch([line for document in batch for line in document]))
        for document in batch:
            lines = [ids for ids in (next(encoded) for _ in document) if ids]
            if lines:
                split = "held_out" if _is_held_out(document, held_out) else "train"
                writers[split].add(document, lines)
            else:
                empty += 1
            characters += sum(map(len, document))
        read += len(batch)
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            speed = characters / 1e6 / (logged - started)
            log(f"tokenised {read:,} documents, {speed:.2f} M characters/s")
    if empty == read:
        raise UserError(f"data.source: none of the {read} documents found holds any text")
    for split, writer in writers.items():
        if writer.counts["documents"] == 0:
            raise UserError(
                f"data.held_out: {held_out} puts none of the {read} documents into the {split} "
                "split; allowed are fractions between 0 and 1 that leave documents for both splits"
            )
    splits = {split: writer.finish() for split, writer in writers.items()}
    return {"splits": splits, "dropped": {"empty": empty}}


def _batches(documents: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Groups documents until a group has work enough for all cores."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, document))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _is_held_out(document: list[str], held_out: float) -> bool:
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < held_out * 2**32


class _SplitWriter:
    """Collects the documents of a split and writes a shard whenever enough have come."""

    def __init__(self, directory: Path, split: str, tokenizer: Tokenizer):
        self.counts = {
            "documents": 0,
            "lines": 0,
            "characters": 0,
            "tokens": 0,
            "words": 0,
            "unknown": 0,
        }
        self._directory = directory
        self._split = split
        self._shards: list[dict] = []
        self._dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        self._unk_id = tokenizer.unk_id
        self._starts_word = np.array([not t.startswith(CONTINUATION) for t in tokenizer.vocab])
        self._clear()

    def add(self, document: list[str], lines: list[list[int]]) -> None:
        """Appends a document, given as its text and as the ids of its lines that have any."""
        tokens = np.fromiter(chain.from_iterable(lines), self._dtype)
        line_ends = np.cumsum([len(ids) for ids in lines]) + self._num_tokens
        self._tokens.append(tokens)
        self._lines.append(line_ends)
        self._num_tokens += tokens.size
        self._documents.append(self._num_tokens)
        self.counts["documents"] += 1
        self.counts["lines"] += len(lines)
        self.counts["characters"] += sum(map(len, document))
        self.counts["tokens"] += tokens.size
        self.counts["words"] += int(np.count_nonzero(self._starts_word[tokens]))
        self.counts["unknown"] += int(np.count_nonzero(tokens == self._unk_id))
        if self._num_tokens >= SHARD_TOKENS:
            self._write_shard()

    def finish(self) -> dict:
        """Writes what is left. Returns the counts and the list of shards."""
        if self._num_tokens:
            self._write_shard()
        return {**self.counts, "shards": self._shards}

    def _clear(self) -> None:
        self._num_tokens = 0
        self._tokens: list[np.ndarray] = []
        self._documents: list[int] = [0]
        self._lines: list[np.ndarray] = [np.zeros(1, np.int64)]

    def _write_shard(self) -> None:
        arrays = {
            "tokens": np.concatenate(self._tokens),
            "documents": np.array(self._documents, np.int64),
            "lines": np.concatenate(self._lines).astype(np.int64, copy=False),
        }
        files = []
        for name in _ARRAYS:
            path = self._directory / f"{self._split}-{len(self._shards):05d}.{name}.npy"
            np.save(path, arrays[name], allow_pickle=False)
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files.append({"file": path.name, "bytes": path.stat().st_size, "sha256": sha256})
        self._shards.append({"files": files})
        self._clear()


class Tokens:
    """The token arrays of a split's shards, as if they were one array."""

    def __init__(self, shards: list[np.ndarray]):
        self._shards = shards
        self._starts = np.cumsum([0] + [shard.size for shard in shards])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def ranges(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Concatenates the ranges `[start, start + size)`, none of which may cross a shard."""
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        begins = starts - self._starts[shards]
        parts = [
            self._shards[shard][begin:end]
            for shard, begin, end in zip(
                shards.tolist(), begins.tolist(), (begins + sizes).tolist(), strict=True
            )
        ]
        return np.concatenate(parts) if parts else self._shards[0][:0]


class TokenStore:
    """A store opened for reading.

    Attributes:
      directory: where it is.
      manifest: the content of `manifest.json`.
      hash: the sha256 of `manifest.json`, which covers all that is in the store.
      tokenizer: the tokenizer that made the ids.
    """

    def __init__(self, directory: Path, manifest: dict, hash: str, tokenizer: Tokenizer):
        self.directory = directory
        self.manifest = manifest
        self.hash = hash
        self.tokenizer = tokenizer

    def tokens(self, split: str) -> Tokens:
        """The token ids of a split, mapped from disk."""
        # Plain arrays on top of the maps: slicing a `np.memmap` is ten times slower.
        return Tokens([np.asarray(array) for array in self._arrays(split, "tokens")])

    def documents(self, split: str) -> np.ndarray:
        """int64 [documents + 1]: where in `tokens(split)` each document starts; the end."""
        return self._offsets(split, "documents")

    def lines(self, split: str) -> np.ndarray:
        """int64 [lines + 1]: where in `tokens(split)` each line starts; the end."""
        return self._offsets(split, "lines")

    def _arrays(self, split: str, name: str) -> Iterator[np.ndarray]:
        for shard in range(len(self.manifest["splits"][split]["shards"])):
            path = self.directory / f"{split}-{shard:05d}.{name}.npy"
            yield np.load(path, mmap_mode="r", allow_pickle=False)

    def _offsets(self, split: str, name: str) -> np.ndarray:
        offsets = [np.zeros(1, np.int64)]
        for array in self._arrays(split, name):
            offsets.append(array[1:] + offsets[-1][-1])
        return np.concatenate(offsets)


def open_store(directory: str | Path) -> TokenStore:
    """Opens a store after checking that all of its files are there and whole.

    Raises:
      UserError: the manifest is unreadable or of another version, or a file's size is wrong.
    """
    directory = Path(directory)
    path = directory / "manifest.json"
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: not readable as the manifest of a token store: {error}"
        ) from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version is {manifest.get('format_version')!r}, but this program reads "
            f"{FORMAT_VERSION}; delete {directory} to have it made again"
        )
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            for entry in shard["files"]:
                _check_size(directory / entry["file"], entry["bytes"])
    tokenizer = Tokenizer.load(directory / "tokenizer")
    if tokenizer.hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'}: not the tokenizer that made this store")
    return TokenStore(directory, manifest, hashlib.sha256(content).hexdigest(), tokenizer)


def _check_size(path: Path, size: int) -> None:
    found = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
    if found != f"{size} bytes":
        raise UserError(
            f"{path}: found {found}, expected {size} bytes; delete the directory to have the store "
            "made again"
        )
