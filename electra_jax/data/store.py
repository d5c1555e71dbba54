"""The token store: a corpus tokenised once, from which examples of any length are cut.

A store is a directory:

    manifest.json              what is in the store, and what it was made from
    tokenizer/                 vocabulary and settings
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
are never on different sides. A corpus of one document is divided: its end is held out. The
documents of one entry of the source lie together, in the order of the entries; the manifest says
how many there are of each.

Flat arrays read at memory speed through mmap by any number of processes, hold 2 bytes a token, and
fix neither length nor layout of the examples (`electra_jax.data.layout`). The manifest lists the
size and hash of each file.

A store grows under another name, `NAME.unfinished`, and gets its own when it is complete. With
every shard, `progress.json` says there how far reading has come. Who finds such a directory goes
on from there.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from electra_jax.data import tokenizers
from electra_jax.data.formats.base import Document
from electra_jax.data.reader import Group, logged, take_apart
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.data.workers import map_in_order
from electra_jax.errors import UserError
from electra_jax.files import write_text

FORMAT_VERSION = 2
SPLITS = ("train", "held_out")
SHARD_TOKENS = 2**25

_PROGRESS = "progress.json"
_MAX_MESSAGES = 10  # about what is left out; after that, only the counts tell
_COUNTED_AT_ONCE = 2**24  # tokens


def unfinished(directory: Path) -> Path:
    """Where the store at `directory` is until it is complete."""
    return directory.with_name(f"{directory.name}.unfinished")


def write_store(
    directory: Path,
    groups: Iterable[Group],
    tokenizer: Tokenizer,
    held_out: float,
    *,
    origin: dict,
    on_error: str = "raise",
    log: Callable[[str], None] = print,
) -> None:
    """Tokenises what is read into a new store at `directory`, on all cores.

    Goes on where an earlier call with the same arguments was interrupted. Holds about one shard
    in memory. The result depends neither on interruptions nor on the number of cores.

    Args:
      directory: where the store will be; must not exist.
      groups: what is read.
      tokenizer: makes the ids; saved with the store.
      held_out: the fraction of documents kept for evaluation.
      origin: what the manifest says about where the groups are from; has `sources`, the names of
        the entries.
      on_error: `raise`, or `skip` what cannot be used and count it.
      log: receives a line of progress every few seconds.

    Raises:
      UserError: something cannot be used, nothing is left of the documents, or a split is empty.
    """
    place = unfinished(directory)
    tokenizer.save(place / "tokenizer")
    head = {
        "format_version": FORMAT_VERSION,
        **origin,
        "held_out": held_out,
        "tokenizer": {
            "family": tokenizer.family,
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            **tokenizer.settings,
        },
    }
    head = json.loads(json.dumps(head))  # as it is when read again
    content = _write_splits(place, groups, tokenizer, held_out, head, on_error, log)
    _write_json(place / "manifest.json", {**head, **content})
    (place / _PROGRESS).unlink(missing_ok=True)
    place.rename(directory)


def _write_splits(
    place: Path,
    groups: Iterable[Group],
    tokenizer: Tokenizer,
    held_out: float,
    head: dict,
    on_error: str,
    log: Callable[[str], None],
) -> dict:
    """Writes the arrays of all splits. Returns the manifest's entries about them."""
    num_groups, content = _load_progress(place, head)
    if num_groups:
        log(f"going on after {content['read']['documents']:,} documents")
    writers = {split: _SplitWriter(place, split, tokenizer.vocab_size) for split in SPLITS}

    def write_shards() -> None:
        for split, writer in writers.items():
            shards = content["splits"][split]["shards"]
            if writer.num_tokens:
                shards.append(writer.write_shard(len(shards)))

    groups = iter(groups)
    first = list(islice(groups, 2))
    encode = functools.partial(
        _encode, place / "tokenizer", len(head["sources"]), held_out, on_error, len(first) == 1
    )
    groups = chain(first, groups)
    messages = 0
    for encoded in map_in_order(encode, logged(islice(groups, num_groups, None), "tokenised", log)):
        num_groups += 1
        _add(content, encoded.counts)
        for split, writer in writers.items():
            writer.add(encoded.arrays[split])
        for message in encoded.damage[: _MAX_MESSAGES - messages]:
            messages += 1
            log(f"left out: {message}")
        if writers["train"].num_tokens >= SHARD_TOKENS:
            write_shards()
            _write_json(place / _PROGRESS, {"head": head, "groups": num_groups, "content": content})
    write_shards()
    _check_splits(content, held_out)
    return content


def can_go_on(place: Path, origin: dict) -> bool:
    """Whether `place` holds the tokenizer and some shards of a store with this origin."""
    path = place / _PROGRESS
    return path.exists() and origin.items() <= json.loads(path.read_text())["head"].items()


def _load_progress(place: Path, head: dict) -> tuple[int, dict]:
    """How many groups are in the shards that are there, and the manifest's entries about them."""
    if can_go_on(place, head):
        progress = json.loads((place / _PROGRESS).read_text())
        return progress["groups"], progress["content"]
    content = _no_counts(len(head["sources"]))
    for split in SPLITS:
        content["splits"][split]["shards"] = []
    return 0, content


def _no_counts(num_sources: int) -> dict:
    counts = ("documents", "lines", "characters", "tokens", "words", "unknown")
    return {
        "read": {"documents": 0, "characters": 0, "divided": 0},
        "dropped": {},
        "splits": {
            split: {**dict.fromkeys(counts, 0), "documents_by_source": [0] * num_sources}
            for split in SPLITS
        },
    }


@dataclass(frozen=True)
class _Encoded:
    """What becomes of a group.

    Attributes:
      arrays: of each split: token ids, sizes of documents and sizes of lines in tokens.
      counts: of the group, as in the manifest.
      damage: messages about what was left out.
    """

    arrays: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    counts: dict
    damage: list[str]


def _encode(
    tokenizer_directory: Path,
    num_sources: int,
    held_out: float,
    on_error: str,
    is_all: bool,
    group: Group,
) -> _Encoded:
    """Tokenises the documents of a group, which may be all there is. Runs in a worker process."""
    tokenizer = _load_tokenizer(tokenizer_directory)
    content = take_apart(group, on_error)
    documents = content.documents
    if is_all and len(documents) == 1 and sum(map(len, documents[0][1])) > 1:
        [(source, document)] = documents
        documents = [(source, part) for part in _parted(document, held_out)]
        splits = SPLITS
    else:
        splits = [
            "held_out" if _is_held_out(lines, held_out) else "train" for _, lines in documents
        ]
    counts = _no_counts(num_sources)
    counts["read"]["divided"] = content.divided
    counts["dropped"] = dropped = content.dropped
    ids = {split: [] for split in SPLITS}  # of the lines that have any
    sizes = {split: [] for split in SPLITS}  # of the documents
    encoded = iter(tokenizer.encode_batch([line for _, lines in documents for line in lines]))
    for (source, document), split in zip(documents, splits, strict=True):
        lines = [ids for ids in islice(encoded, len(document)) if ids]
        characters = sum(map(len, document))
        counts["read"]["documents"] += 1
        counts["read"]["characters"] += characters
        if not lines:
            dropped["documents without tokens"] += 1
            continue
        ids[split] += lines
        sizes[split].append(sum(map(len, lines)))
        counts["splits"][split]["characters"] += characters
        counts["splits"][split]["documents_by_source"][source] += 1

    arrays = {}
    for split in SPLITS:
        tokens = np.fromiter(chain.from_iterable(ids[split]), _dtype(tokenizer.vocab_size))
        arrays[split] = tokens, np.array(sizes[split], int), np.array([*map(len, ids[split])], int)
        counts["splits"][split] |= {
            "documents": len(sizes[split]),
            "lines": len(ids[split]),
            "tokens": tokens.size,
            "words": int(np.count_nonzero(tokenizer.starts_word[tokens])),
            "unknown": int(np.count_nonzero(tokens == tokenizer.unk_id)),
        }
    return _Encoded(arrays, counts, content.damage)


_load_tokenizer = functools.cache(tokenizers.load)


def _is_held_out(document: Document, held_out: float) -> bool:
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < held_out * 2**32


def _parted(document: Document, held_out: float) -> tuple[Document, Document]:
    """All but the end of a document, and its end: some lines, or a part of the only one."""
    if len(document) > 1:
        end = max(1, round(len(document) * held_out))
        return document[:-end], document[-end:]
    [line] = document
    cut = len(line) - max(1, round(len(line) * held_out))
    cut = line.rfind(" ", 0, cut) + 1 or cut  # between words, where there are some
    return [line[:cut]], [line[cut:]]


def _dtype(vocab_size: int) -> type:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def _add(total: dict, counts: dict) -> None:
    """Adds counts to those of the same name, to any depth."""
    for name, count in counts.items():
        if isinstance(count, dict):
            _add(total[name], count)
        elif isinstance(count, list):
            total[name] = [a + b for a, b in zip(total[name], count, strict=True)]
        else:
            total[name] = total.get(name, 0) + count


def _check_splits(content: dict, held_out: float) -> None:
    read = content["read"]["documents"]
    if all(content["splits"][split]["documents"] == 0 for split in SPLITS):
        raise UserError(f"data.source: none of the {read} documents found holds any text")
    for split in SPLITS:
        if content["splits"][split]["documents"] == 0:
            raise UserError(
                f"data.held_out: {held_out} puts none of the {read} documents into the {split} "
                "split; allowed are fractions between 0 and 1 that leave documents for both splits"
            )


class _SplitWriter:
    """Collects the arrays of a split and writes them as a shard."""

    def __init__(self, directory: Path, split: str, vocab_size: int):
        self._directory = directory
        self._split = split
        self._dtype = _dtype(vocab_size)
        self._clear()

    def add(self, arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        """Appends token ids, sizes of documents and sizes of lines."""
        self.num_tokens += arrays[0].size
        for collected, array in zip(self._collected, arrays, strict=True):
            collected.append(array)

    def write_shard(self, number: int) -> dict:
        """Writes what has come since the last shard. Returns the manifest's entry."""
        tokens, documents, lines = (np.concatenate(arrays) for arrays in self._collected)
        arrays = {"tokens": tokens, "documents": _offsets(documents), "lines": _offsets(lines)}
        files = []
        for name, array in arrays.items():
            path = self._directory / f"{self._split}-{number:05d}.{name}.npy"
            np.save(path, array, allow_pickle=False)
            files.append({"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)})
        self._clear()
        return {"files": files}

    def _clear(self) -> None:
        self.num_tokens = 0
        self._collected = [[np.zeros(0, dtype)] for dtype in (self._dtype, np.int64, np.int64)]


def _offsets(sizes: np.ndarray | list[int]) -> np.ndarray:
    return np.append(0, np.cumsum(sizes, dtype=np.int64))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: dict) -> None:
    """Writes a file that is never seen in part."""
    write_text(path, json.dumps(content, indent=2) + "\n")


class Tokens:
    """The token arrays of a split's shards, as if they were one array.

    Args:
      shards: arrays, or the paths of arrays on disk. Those are mapped, not read; pickled, they
        are paths again, so that other processes map the same memory.
    """

    def __init__(self, shards: Sequence[np.ndarray | Path]):
        self._given = shards
        self._shards = [_mapped(shard) if isinstance(shard, Path) else shard for shard in shards]
        self._starts = np.cumsum([0] + [shard.size for shard in self._shards])

    def __reduce__(self) -> tuple:
        return Tokens, (self._given,)

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
        return Tokens(self._paths(split, "tokens"))

    def token_counts(self, split: str) -> np.ndarray:
        """int64 [vocab_size]: how often each token is in a split. Reads all of it."""
        counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        for path in self._paths(split, "tokens"):
            tokens = _mapped(path)
            for first in range(0, len(tokens), _COUNTED_AT_ONCE):
                part = tokens[first : first + _COUNTED_AT_ONCE]
                counts += np.bincount(part, minlength=len(counts))
        return counts

    def documents(self, split: str) -> np.ndarray:
        """int64 [documents + 1]: where in `tokens(split)` each document starts; the end."""
        return self._read_offsets(split, "documents")

    def lines(self, split: str) -> np.ndarray:
        """int64 [lines + 1]: where in `tokens(split)` each line starts; the end."""
        return self._read_offsets(split, "lines")

    def sources(self, split: str) -> np.ndarray:
        """int64 [entries + 1]: the document at which those of each entry start; the end."""
        return _offsets(self.manifest["splits"][split]["documents_by_source"])

    def _paths(self, split: str, name: str) -> list[Path]:
        shards = range(len(self.manifest["splits"][split]["shards"]))
        return [self.directory / f"{split}-{shard:05d}.{name}.npy" for shard in shards]

    def _read_offsets(self, split: str, name: str) -> np.ndarray:
        offsets = [np.zeros(1, np.int64)]
        for path in self._paths(split, name):
            offsets.append(_mapped(path)[1:] + offsets[-1][-1])
        return np.concatenate(offsets)


def _mapped(path: Path) -> np.ndarray:
    # A plain array on top of the map: slicing a `np.memmap` is ten times slower.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


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
    for entry in _files(manifest):
        _check_size(directory / entry["file"], entry["bytes"])
    tokenizer = tokenizers.load(directory / "tokenizer")
    if tokenizer.hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'}: not the tokenizer that made this store")
    return TokenStore(directory, manifest, hashlib.sha256(content).hexdigest(), tokenizer)


def verify(store: TokenStore) -> int:
    """Compares every file with the hash in the manifest. Returns the number of files.

    Raises:
      UserError: names the files that have changed since they were written.
    """
    files = list(_files(store.manifest))
    paths = [store.directory / entry["file"] for entry in files]
    changed = [
        str(path)
        for path, entry in zip(paths, files, strict=True)
        if _sha256(path) != entry["sha256"]
    ]
    if changed:
        raise UserError(
            f"{', '.join(changed)}: not what was written; delete {store.directory} to have the "
            "store made again"
        )
    return len(files)


def _files(manifest: dict) -> Iterator[dict]:
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            yield from shard["files"]


def _check_size(path: Path, size: int) -> None:
    found = f"{path.stat().st_size} bytes" if path.exists() else "no such file"
    if found != f"{size} bytes":
        raise UserError(
            f"{path}: found {found}, expected {size} bytes; delete the directory to have the store "
            "made again"
        )
