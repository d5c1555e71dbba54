"""Writes a corpus into a token store, on all cores.

A store grows as `NAME.unfinished` and gets its own name when it is complete. With every shard,
`progress.json` says there how far reading has come; whoever finds it goes on from there.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from electra_jax.data import tokenizers
from electra_jax.data.formats.base import Document
from electra_jax.data.reader import Group, logged, take_apart
from electra_jax.data.store import FORMAT_VERSION, MANIFEST, SPLITS, offsets
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.data.workers import map_in_order
from electra_jax.errors import UserError
from electra_jax.files import sha256, write_text

_PROGRESS = "progress.json"
_MAX_MESSAGES = 10  # about what is left out; after that, only the counts tell


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
    shard_tokens: int = 2**25,
) -> None:
    """Tokenizes a corpus into a new store at `directory`, on all cores.

    Goes on where an earlier call with the same arguments was interrupted. Holds about one shard
    in memory. The result depends neither on interruptions nor on the number of cores.

    Args:
      directory: must not exist.
      held_out: the fraction of documents kept for evaluation.
      origin: what the manifest says about where the groups are from; has `sources`, the names of
        the entries.
      on_error: `raise`, or `skip` what cannot be used and count it.
      shard_tokens: a shard is written when the train split has so many.

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
    num_groups, content = 0, _no_counts(len(head["sources"]))
    if progress := read_progress(place, head):
        num_groups, content = progress["groups"], progress["content"]
        log(f"going on after {content['read']['documents']:,} documents")
    collected: dict[str, list[_Arrays]] = {split: [] for split in SPLITS}

    def write_shards() -> None:
        for split, arrays in collected.items():
            shards = content["splits"][split].setdefault("shards", [])
            if num_tokens(split):
                shards.append(_write_shard(place, f"{split}-{len(shards):05d}", arrays))
            arrays.clear()

    def num_tokens(split: str) -> int:
        return sum(arrays.tokens.size for arrays in collected[split])

    groups = iter(groups)
    first = list(islice(groups, 2))
    encode = functools.partial(
        _encode, place / "tokenizer", len(head["sources"]), held_out, on_error, len(first) == 1
    )
    rest = islice(chain(first, groups), num_groups, None)
    messages = 0
    for arrays, counts, damage in map_in_order(encode, logged(rest, "tokenized", log)):
        num_groups += 1
        _add(content, counts)
        for split in SPLITS:
            collected[split].append(arrays[split])
        for message in damage[: _MAX_MESSAGES - messages]:
            messages += 1
            log(f"left out: {message}")
        if num_tokens("train") >= shard_tokens:
            write_shards()
            _write_json(place / _PROGRESS, {"head": head, "groups": num_groups, "content": content})
    write_shards()
    _check_splits(content, held_out)
    _write_json(place / MANIFEST, {**head, **content})
    (place / _PROGRESS).unlink(missing_ok=True)
    place.rename(directory)


def read_progress(place: Path, head: dict) -> dict | None:
    """What `place` holds of a store whose manifest has all of `head`; None if nothing.

    Returns:
      `head`; `groups`, how many are in the shards; `content`, the manifest's entries about them.
    """
    path = place / _PROGRESS
    progress = json.loads(path.read_text()) if path.exists() else None
    return progress if progress and head.items() <= progress["head"].items() else None


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


def _add(total: dict, counts: dict) -> None:
    """Adds counts to those of the same name, to any depth."""
    for name, count in counts.items():
        if isinstance(count, dict):
            _add(total[name], count)
        elif isinstance(count, list):
            total[name] = [a + b for a, b in zip(total[name], count, strict=True)]
        else:
            total[name] = total.get(name, 0) + count


class _Arrays(NamedTuple):
    """Token ids; sizes of documents and of lines, in tokens."""

    tokens: np.ndarray
    documents: np.ndarray
    lines: np.ndarray


def _write_shard(directory: Path, name: str, collected: list[_Arrays]) -> dict:
    """Writes arrays, one after the other, as a shard. Returns the manifest's entry."""
    tokens, documents, lines = map(np.concatenate, zip(*collected, strict=True))
    arrays = {"tokens": tokens, "documents": offsets(documents), "lines": offsets(lines)}
    files = []
    for kind, array in arrays.items():
        path = directory / f"{name}.{kind}.npy"
        np.save(path, array, allow_pickle=False)
        files.append({"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)})
    return {"files": files}


def _encode(
    tokenizer_directory: Path,
    num_sources: int,
    held_out: float,
    on_error: str,
    is_all: bool,
    group: Group,
) -> tuple[dict[str, _Arrays], dict, list[str]]:
    """Tokenizes a group in a worker process: arrays of each split, counts, messages about damage.

    Args:
      is_all: whether there are no other groups.
    """
    tokenizer = _load_tokenizer(tokenizer_directory)
    content = take_apart(group, on_error)
    documents = {split: [] for split in SPLITS}
    if is_all and len(content.documents) == 1 and sum(map(len, content.documents[0][1])) > 1:
        [(source, document)] = content.documents
        for split, part in zip(SPLITS, _parted(document, held_out), strict=True):
            documents[split].append((source, part))
    else:
        for source, document in content.documents:
            documents[SPLITS[_is_held_out(document, held_out)]].append((source, document))
    counts = _no_counts(num_sources)
    counts["read"]["divided"] = content.divided
    counts["dropped"] = content.dropped
    arrays = {}
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    for split, of_split in counts["splits"].items():
        all_lines = [line for _, document in documents[split] for line in document]
        counts["read"]["documents"] += len(documents[split])
        counts["read"]["characters"] += sum(map(len, all_lines))
        encoded = iter(tokenizer.encode_batch(all_lines))
        ids, sizes = [], []  # of the lines that have any; of the documents
        for source, document in documents[split]:
            lines = [ids for ids in islice(encoded, len(document)) if ids]
            if not lines:
                content.dropped["documents without tokens"] += 1
                continue
            ids += lines
            sizes.append(sum(map(len, lines)))
            of_split["characters"] += sum(map(len, document))
            of_split["documents_by_source"][source] += 1
        tokens = np.fromiter(chain.from_iterable(ids), dtype)
        arrays[split] = _Arrays(tokens, np.array(sizes, int), np.array([*map(len, ids)], int))
        of_split |= {
            "documents": len(sizes),
            "lines": len(ids),
            "tokens": tokens.size,
            "words": int(np.count_nonzero(tokenizer.starts_word[tokens])),
            "unknown": int(np.count_nonzero(tokens == tokenizer.unk_id)),
        }
    return arrays, counts, content.damage


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


def _check_splits(content: dict, held_out: float) -> None:
    read = content["read"]["documents"]
    documents = {split: content["splits"][split]["documents"] for split in SPLITS}
    if not any(documents.values()):
        raise UserError(f"data.source: none of the {read} documents found holds any text")
    for split, count in documents.items():
        if not count:
            raise UserError(
                f"data.held_out: {held_out} puts none of the {read} documents into the {split} "
                "split; allowed are fractions between 0 and 1 that leave documents for both splits"
            )


def _write_json(path: Path, content: dict) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
