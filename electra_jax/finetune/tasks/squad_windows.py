"""Windows over long contexts, and which characters of the context each of their tokens shows."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from electra_jax.data.features import Arrays, owners
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.finetune.tasks.squad_files import Example

# Invisible characters that belong to the one before: joiners, and the tags of emoji.
_JOINED = {"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}


@dataclass(frozen=True)
class Context:
    """The tokens of a context, and the range of characters of each."""

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray

    @cached_property
    def whole_ends(self) -> np.ndarray:
        """The ends, moved behind the marks that belong to the last characters of tokens.

        Tokenizers drop accents, vowel signs and joiners, which would be cut off the end of an
        answer.
        """
        ends = self.ends.copy()
        if not self.text.isascii():
            for token, limit in enumerate([*self.starts, len(self.text)][1:]):
                while ends[token] < limit and _continues(self.text[ends[token]]):
                    ends[token] += 1
        return ends


@dataclass(frozen=True)
class Window:
    """The tokens of a context from `begin` to `end`, and those of the answer in the context."""

    example: int
    question: list[int]
    context: Context
    begin: int
    end: int
    target: tuple[int, int] | None

    @property
    def offset(self) -> int:
        """The place of a token in the row, less its place in the context."""
        return len(self.question) + 2 - self.begin

    @property
    def span(self) -> tuple[int, int]:
        """First and last token of the answer in the row; (0, 0) if not all of it is there."""
        if self.target is None or self.target[0] < self.begin or self.target[1] >= self.end:
            return 0, 0
        return self.target[0] + self.offset, self.target[1] + self.offset


def encode_context(tokenizer: Tokenizer, text: str) -> Context:
    """The tokens of a text."""
    ids, _, offsets = tokenizer.encode_with_offsets(text)
    spans = np.array(offsets, np.int32).reshape(-1, 2)
    return Context(text, ids, spans[:, 0], spans[:, 1])


def find_target(example: Example, context: Context) -> tuple[int, int] | None:
    """First and last token of the first answer that is in the context.

    An answer starts at the character that it says, or else at the nearest other place.
    """
    for answer in example.answers or ():
        text, start = answer.text, max(0, answer.start)
        found = context.text.rfind(text, 0, start + len(text)), context.text.find(text, start)
        places = [place for place in found if text and place >= 0]
        if places:
            begin = min(places, key=lambda place: abs(place - start))
            first = int(np.searchsorted(context.ends, begin, "right"))
            last = int(np.searchsorted(context.starts, begin + len(text), "left")) - 1
            if first <= last:
                return first, last
    return None


def characters(windows: Sequence[Window], max_length: int) -> Arrays:
    """The arrays `char_start`, `char_end` and `max_context` of `SquadTask.features`."""
    shape = len(windows), max_length
    starts, ends = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    shows_most = np.zeros(shape, np.int32)
    for _, group in groupby(enumerate(windows), key=lambda row: row[1].example):
        of_example = list(group)
        context = of_example[0][1].context
        spans = [(window.begin, window.end) for _, window in of_example]
        owner = owners(len(context.ids), spans)
        for number, (row, window) in enumerate(of_example):
            tokens = slice(window.begin, window.end)
            place = row, slice(window.begin + window.offset, window.end + window.offset)
            starts[place] = context.starts[tokens]
            ends[place] = context.whole_ends[tokens]
            shows_most[place] = owner[tokens] == number
    return {"char_start": starts, "char_end": ends, "max_context": shows_most}


def _continues(character: str) -> bool:
    return unicodedata.category(character).startswith("M") or character in _JOINED
