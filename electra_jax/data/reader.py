"""From inputs to documents: one process reads groups of parts, many take them apart.

Nothing depends on the number of processes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from electra_jax.data.formats.base import LIMITS, Damage, Document, Limits, Part
from electra_jax.data.sources import Source, inputs
from electra_jax.errors import UserError


@dataclass
class Group:
    """Parts in order, as many as a worker is given at once."""

    parts: list[Part | Damage] = field(default_factory=list)
    done: float = 0.0  # share of all inputs that has been read
    size: int = 0  # in bytes, or characters where that is what parts have


@dataclass
class Documents:
    """The content of a group."""

    documents: list[tuple[int, Document]] = field(default_factory=list)  # with numbers of entries
    dropped: Counter = field(default_factory=Counter)  # what was left out, by reason
    divided: int = 0  # documents that were divided
    damage: list[str] = field(default_factory=list)  # messages about what cannot be used


def groups(sources: list[Source], limits: Limits = LIMITS) -> Iterator[Group]:
    """Reads all inputs, in order, in groups of about a part. Their order is always the same.

    Raises:
      UserError: an entry names nothing that exists, or its options do not suit.
    """
    all_inputs = inputs(sources)
    sizes = [max(1, input.size) for input in all_inputs]
    before, total = 0, sum(sizes)
    group = Group()
    for input, size in zip(all_inputs, sizes, strict=True):
        for part, done in input.format.parts(input, limits):
            group.parts.append(part)
            group.size += _size(part)
            group.done = (before + size * done) / total
            if group.size >= limits.part // 2:
                yield group
                group = Group()
        before += size
    if group.parts:
        yield group


def logged(
    groups: Iterable[Group], what: str, log: Callable[[str], None], seconds: float = 5.0
) -> Iterator[Group]:
    """Passes groups on; every few seconds logs how far reading is, its rate and the time left."""
    started = logged_at = time.monotonic()
    before, size = None, 0
    for group in groups:
        yield group
        before = group.done if before is None else before
        size += group.size
        now = time.monotonic()
        if now - logged_at > seconds and group.done > before:
            logged_at = now
            left = (now - started) * (1 - group.done) / (group.done - before)
            rate = size / 1e6 / (now - started)
            log(f"{what} {group.done:.0%}, {rate:.1f} MB/s, {left:.0f} s left")


def _size(part: Part | Damage) -> int:
    texts = [] if isinstance(part, Damage) else part.content
    texts = [texts] if isinstance(texts, bytes) else texts
    return sum(len(text) for text in texts if isinstance(text, bytes | str))


def take_apart(group: Group, on_error: str, limits: Limits = LIMITS) -> Documents:
    """The documents of a group.

    Raises:
      UserError: `on_error` is `raise` and something cannot be used. Names the place.
    """
    result = Documents()
    for part in group.parts:
        if isinstance(part, Part):
            result.divided += part.divided
            items = part.input.format.take_apart(part, limits)
        else:
            items = [part]
        for item in items:
            if isinstance(item, Damage):
                if on_error == "raise":
                    raise UserError(item.message)
                result.dropped[item.reason] += 1
                result.damage.append(item.message)
            elif item:
                result.documents.append((part.input.source, item))
            else:
                result.dropped["documents without text"] += 1
    return result
