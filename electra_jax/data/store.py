"""The token store: a corpus tokenized once, from which examples of any length are cut.

A store is a directory:

    manifest.json              what is in the store, and what it was made from
    tokenizer/                 vocabulary and settings
    train-00000.tokens.npy     token ids of one document after the other, without special tokens
    train-00000.documents.npy  int64 [documents + 1]: where in tokens each document starts; the end
    train-00000.lines.npy      int64 [lines + 1]: where in tokens each line starts; the end
    train-00001.tokens.npy     the next shard, and so on
    held_out-00000.tokens.npy  the documents kept for evaluation, in the same form

Ids are uint16 when the vocabulary has at most 65,536 tokens, else uint32. A line is a line of the
input, by which a corpus may mark its sentences. Documents never cross shards. Say the train split
has two documents, ("it rains", "come in") and ("yes",), and each word is one token:

    tokens     17 42 8 11 93       it rains come in yes
    documents  0 4 5               it starts the first document, yes the second, 5 is the end
    lines      0 2 4 5             it, come and yes start a line

A document is held out if a hash of its text falls below the held-out fraction of the hash's range,
so the split depends neither on order nor on the rest of the corpus, and copies of a document are
always on the same side. A corpus of one document is divided: its end is held out. Documents lie in
the order of the source's entries; the manifest says how many there are of each.

Flat arrays read at memory speed through mmap by any number of processes, hold 2 bytes a token, and
fix neither length nor layout of the examples (`electra_jax.data.layout`). The manifest lists the
size and hash of each file. `electra_jax.data.writing` makes stores.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import parse_object, sha256

FORMAT_VERSION = 2
SPLITS = ("train", "held_out")
MANIFEST = "manifest.json"


class Tokens:
    """The token arrays of a split's shards, as if they were one array.

    Args:
      shards: arrays, or the paths of arrays on disk, which are mapped, not read.
    """

    def __init__(self, shards: Sequence[np.ndarray | Path]):
        self._shards = [_mapped(shard) if isinstance(shard, Path) else shard for shard in shards]
        self._starts = np.cumsum([0] + [shard.size for shard in self._shards])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def ranges(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Concatenates the ranges `[start, start + size)`, none of which may cross a shard."""
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        begins = starts - self._starts[shards]
        places = (x.tolist() for x in (shards, begins, begins + sizes))
        parts = [self._shards[shard][begin:end] for shard, begin, end in zip(*places, strict=True)]
        return np.concatenate(parts) if parts else self._shards[0][:0]


@dataclass(eq=False)
class TokenStore:
    """A store opened for reading."""

    directory: Path
    manifest: dict  # the content of `manifest.json`
    hash: str  # the sha256 of `manifest.json`, which covers all that is in the store
    tokenizer: Tokenizer  # the one that made the ids

    def tokens(self, split: str) -> Tokens:
        """The token ids of a split, mapped from disk."""
        return Tokens(self._paths(split, "tokens"))

    def token_counts(self, split: str) -> np.ndarray:
        """int64 [vocab_size]: how often each token is in a split. Reads all of it."""
        size = self.tokenizer.vocab_size
        paths = self._paths(split, "tokens")
        return sum(np.bincount(_mapped(path), minlength=size) for path in paths)

    def documents(self, split: str) -> np.ndarray:
        """int64 [documents + 1]: where in `tokens(split)` each document starts; the end."""
        return self._read_offsets(split, "documents")

    def lines(self, split: str) -> np.ndarray:
        """int64 [lines + 1]: where in `tokens(split)` each line starts; the end."""
        return self._read_offsets(split, "lines")

    def sources(self, split: str) -> np.ndarray:
        """int64 [entries + 1]: the document at which those of each entry start; the end."""
        return offsets(self.manifest["splits"][split]["documents_by_source"])

    def _paths(self, split: str, name: str) -> list[Path]:
        shards = range(len(self.manifest["splits"][split]["shards"]))
        return [self.directory / f"{split}-{shard:05d}.{name}.npy" for shard in shards]

    def _read_offsets(self, split: str, name: str) -> np.ndarray:
        parts = [np.zeros(1, np.int64)]
        for path in self._paths(split, name):
            parts.append(_mapped(path)[1:] + parts[-1][-1])
        return np.concatenate(parts)


def _mapped(path: Path) -> np.ndarray:
    # A plain array on top of the map: slicing a `np.memmap` is ten times slower.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def offsets(sizes: np.ndarray | list[int]) -> np.ndarray:
    """int64 [n + 1]: where each of n parts of these sizes begins; the end."""
    return np.append(0, np.cumsum(sizes, dtype=np.int64))


def open_store(directory: str | Path) -> TokenStore:
    """Opens a store after checking that all of its files are there and whole.

    Raises:
      UserError: the manifest is unreadable or of another version, or a file's size is wrong.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    again = f"delete {directory} to have it made again"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: not readable: {error.strerror}") from error
    manifest = parse_object(content, str(path))
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version is {version!r}; allowed: {FORMAT_VERSION}; {again}"
        )
    for entry in _files(manifest):
        file, size = directory / entry["file"], entry["bytes"]
        found = f"{file.stat().st_size} bytes" if file.exists() else "no such file"
        if found != f"{size} bytes":
            raise UserError(f"{file}: found {found}; expected {size} bytes; {again}")
    tokenizer = tokenizers.load(directory / "tokenizer")
    if tokenizer.hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'}: not the tokenizer that made this store")
    return TokenStore(directory, manifest, hashlib.sha256(content).hexdigest(), tokenizer)


def verify(store: TokenStore) -> int:
    """Compares every file with the hash in the manifest. Returns the number of files.

    Raises:
      UserError: names the files that have changed since they were written.
    """
    hashes = {store.directory / entry["file"]: entry["sha256"] for entry in _files(store.manifest)}
    changed = [str(path) for path, expected in hashes.items() if sha256(path) != expected]
    if changed:
        raise UserError(
            f"{', '.join(changed)}: not what was written; delete {store.directory} to have the "
            "store made again"
        )
    return len(hashes)


def _files(manifest: dict) -> Iterator[dict]:
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            yield from shard["files"]
