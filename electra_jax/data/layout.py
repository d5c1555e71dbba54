"""Examples as an index over the token store.

Rows of `length` tokens are made of documents in one of three layouts:

* `document`: a document is cut into pieces of at most `length - 2` tokens; nothing is dropped. A
  piece becomes `[CLS] token token ... [SEP]`, one in a row, padded.
* `packed`: as many of these pieces per row as fit. Attention and positions stay within the piece
  (`segment_ids`, `position_ids`), so the model computes the same as with a piece per row.
* `electra`: the examples of the original program, for replication (spec 5.2): lines of a document
  in one piece of two segments, `[CLS] A A A [SEP] B B [SEP]`. What is too long is cut off and lost.

Packing is best-fit decreasing: from the longest piece to the shortest, each goes to the row with
the least free space that suffices. Pieces of equal length are interchangeable, and so are rows of
equal free space: it is enough to loop over the lengths, and for each over the amounts of free
space, and to move whole slices of rows. The cost of the loops depends on `length` only; the rest
is sorting.
"""

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from electra_jax.data.store import Tokens, TokenStore, offsets
from electra_jax.errors import UserError

LAYOUTS = ("packed", "document", "electra")

# What a range of tokens means in its row; these are added up.
BEGINS_PIECE = 1  # [CLS] comes before it
ENDS_SEGMENT = 2  # [SEP] comes after it
SECOND_SEGMENT = 4  # its token type is 1

SINGLE_SEGMENT = 0.1  # chance of a row with one segment, see spec 5.2; and
SHORT_TARGET = 0.05  # of one that aims at fewer tokens
UNLIMITED = 100_000  # tokens in the one segment, before they are cut


@dataclass(frozen=True, eq=False)
class Rows:
    """Examples of equal length, each made of ranges of tokens."""

    length: int  # tokens per row
    tokens: Tokens  # what the ranges are of
    starts: np.ndarray  # int64 [ranges], ordered by row: where in `tokens` each range starts
    sizes: np.ndarray  # int32 [ranges]: its tokens, without [CLS] and [SEP]
    marks: np.ndarray  # uint8 [ranges]: the sum of its marks, such as `BEGINS_PIECE`
    first: np.ndarray  # int64 [rows + 1]: the first range of each row; the end
    groups: np.ndarray  # int64 [groups + 1]: the first row of each group; the end
    dropped_tokens: int  # tokens of the split that are in no row
    pad_id: int
    cls_id: int
    sep_id: int

    def __len__(self) -> int:
        return self.first.size - 1

    @property
    def real_tokens(self) -> int:
        """The tokens of all rows that are not padding, with [CLS] and [SEP]."""
        special = sum(np.count_nonzero(self.marks & mark) for mark in (BEGINS_PIECE, ENDS_SEGMENT))
        return int(self.sizes.sum() + special)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices`, an integer array [b]; -1 stands for a row of padding.

        Returns:
          int32 arrays [b, length]:
            input_ids: `pad_id` where there is no piece.
            segment_ids: 1, 2, ... for the pieces of a row, 0 for padding.
            position_ids: 0, 1, ... in each piece, 0 for padding.
            token_type_ids: 1 in second segments, else 0.
        """
        is_row = indices >= 0
        first = np.where(is_row, self.first[indices], 0)
        counts = np.where(is_row, self.first[indices + 1], 0) - first

        # Of each range: its row in the batch, where it begins and ends among the real tokens of the
        # batch, special tokens included, and the number of its piece in the batch.
        chosen = np.repeat(first, counts) + _arange_each(counts)
        row = np.repeat(np.arange(indices.size), counts)
        sizes, marks = self.sizes[chosen], self.marks[chosen]
        begins_piece, ends_segment = marks & BEGINS_PIECE > 0, marks & ENDS_SEGMENT > 0
        widths = sizes + begins_piece + ends_segment
        ends = np.cumsum(widths)
        begins = ends - widths
        piece = np.cumsum(begins_piece) - 1

        ids = np.empty(widths.sum(), np.int32)
        is_token = np.ones(ids.size, bool)
        cls, sep = begins[begins_piece], ends[ends_segment] - 1
        for special, places in ((self.cls_id, cls), (self.sep_id, sep)):
            ids[places] = special
            is_token[places] = False
        ids[is_token] = self.tokens.ranges(self.starts[chosen], sizes)
        position = np.arange(ids.size) - np.repeat(cls[piece], widths)
        number = 1 + piece - piece[(np.cumsum(counts) - counts)[row]]

        row_widths = np.bincount(row, widths, minlength=indices.size)
        is_real = np.arange(self.length) < row_widths[:, None]

        def padded(values: np.ndarray, padding: int = 0) -> np.ndarray:
            field = np.full(is_real.shape, padding, np.int32)
            field[is_real] = values
            return field

        return {
            "input_ids": padded(ids, self.pad_id),
            "segment_ids": padded(np.repeat(number, widths)),
            "position_ids": padded(position),
            "token_type_ids": padded(np.repeat(marks & SECOND_SEGMENT > 0, widths)),
        }


def rows(
    store: TokenStore,
    split: str,
    length: int,
    layout: str,
    *,
    seed: int = 0,
    by_source: bool = False,
) -> Rows:
    """Arranges a split of a store in rows of `length` tokens, in one of `LAYOUTS`.

    The result depends on the arguments only. It takes seconds for tens of millions of pieces, or
    about a second for a million lines in layout `electra`, so it is not kept on disk.

    Args:
      length: at least 5, for a token in each segment.
      seed: of the random choices in layout `electra`; the others make none.
      by_source: make a group of rows of each source, in place of one of all.

    Raises:
      UserError: a group has no rows.
    """
    documents = store.documents(split)
    sources = store.sources(split) if by_source else np.array([0, documents.size - 1])
    if layout == "electra":
        generator = np.random.default_rng(seed)
        arrange = partial(_segments, store.lines(split), length=length, generator=generator)
    else:
        arrange = partial(_pieces, length=length, packed=layout == "packed")
    groups = [arrange(documents[begin : end + 1]) for begin, end in pairwise(sources)]
    for number, group in enumerate(groups, 1):
        if not group.counts.size:
            raise UserError(
                f"data.source: entry {number} of {len(groups)} has no tokens in the {split} split"
            )
    starts, sizes, marks, counts = map(np.concatenate, zip(*groups, strict=True))
    tokenizer = store.tokenizer
    return Rows(
        length=length,
        tokens=store.tokens(split),
        starts=starts,
        sizes=sizes,
        marks=marks,
        first=offsets(counts),
        groups=offsets([group.counts.size for group in groups]),
        dropped_tokens=int(documents[-1] - sizes.sum()),
        pad_id=tokenizer.pad_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
    )


class _Ranges(NamedTuple):
    """Some rows: `starts`, `sizes` and `marks` as in `Rows`, and how many ranges each row has."""

    starts: np.ndarray
    sizes: np.ndarray
    marks: np.ndarray
    counts: np.ndarray


def _pieces(documents: np.ndarray, length: int, packed: bool) -> _Ranges:
    """Layouts `document` and `packed` of documents, given by their start offsets and the end."""
    starts, sizes = _cut(documents, length - 2)
    counts = np.ones(sizes.size, np.int64)
    if packed:
        row = _pack(sizes + 2, length)
        order = np.argsort(row, kind="stable")
        starts, sizes = starts[order], sizes[order]
        counts = np.bincount(row)
    return _Ranges(
        starts, sizes, np.full(sizes.size, BEGINS_PIECE | ENDS_SEGMENT, np.uint8), counts
    )


def _segments(
    lines: np.ndarray, documents: np.ndarray, length: int, generator: np.random.Generator
) -> _Ranges:
    """Layout `electra` of documents, given like `lines` by their start offsets and the end.

    Lines of a document are collected until they have the number of tokens aimed at, or the document
    ends, and become a row. What a segment has beyond its room is cut off.
    """
    starts, sizes, marks, counts = array("q"), array("i"), array("B"), array("i")
    line_starts = memoryview(lines)  # gives Python integers, without a list of them all
    target = length
    for line, document_end in pairwise(memoryview(np.searchsorted(lines, documents))):
        while line < document_end:
            end = bisect_left(line_starts, line_starts[line] + target, line, document_end)
            is_single = generator.random() < SINGLE_SEGMENT
            half = UNLIMITED if is_single else (target - 3) // 2
            first, second = _deal(line_starts[line : end + 1], half, generator)
            first = _trim(first, length - 2)
            second = _trim(second, length - 3 - sum(size for _, size in first))
            for segment, mark in ((first, 0), (second, SECOND_SEGMENT)):
                for start, size in segment:
                    starts.append(start)
                    sizes.append(size)
                    marks.append(mark)
                if segment:
                    marks[-1] += ENDS_SEGMENT
            marks[-len(first) - len(second)] += BEGINS_PIECE
            counts.append(len(first) + len(second))
            is_short = generator.random() < SHORT_TARGET
            target = int(generator.integers(5, length + 1)) if is_short else length
            line = end
    return _Ranges(*map(np.array, (starts, sizes, marks, counts)))


def _deal(
    borders: Sequence[int], half: int, generator: np.random.Generator
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Deals the lines between `borders` to two segments, as lists of ranges (start, end).

    Once the second segment has begun, the first still gets lines that are short enough.
    """
    segments, sizes = ([], []), [0, 0]
    for begin, end in pairwise(borders):
        in_second = (
            sizes[0] > 0
            and sizes[0] + end - begin >= half
            and (sizes[1] > 0 or sizes[0] >= half or generator.random() >= 0.5)
        )
        ranges = segments[in_second]
        sizes[in_second] += end - begin
        if ranges and ranges[-1][1] == begin:
            begin, _ = ranges.pop()
        ranges.append((begin, end))
    return segments


def _trim(ranges: list[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """The first `room` tokens of ranges (start, end), as ranges (start, size)."""
    trimmed = []
    for start, end in ranges:
        if room > 0:
            trimmed.append((start, min(end - start, room)))
            room -= end - start
    return trimmed


def _cut(documents: np.ndarray, max_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents, given by their start offsets and the end, into pieces: starts, sizes."""
    counts = -(np.diff(documents) // -max_size)
    starts = np.repeat(documents[:-1], counts) + _arange_each(counts) * max_size
    ends = np.minimum(starts + max_size, np.repeat(documents[1:], counts))
    return starts, (ends - starts).astype(np.int32)


def _pack(widths: np.ndarray, length: int) -> np.ndarray:
    """Packs pieces into rows. Returns the row of each piece, int64; rows are numbered from 0."""
    # Longest first. The smallest integer type lets NumPy sort in linear time.
    missing = (length - widths).astype(np.min_scalar_type(length))
    by_width = np.argsort(missing, kind="stable")
    counts = np.bincount(widths, minlength=length + 1)
    row = np.empty(widths.size, np.int64)
    num_rows = 0
    free: dict[int, list[np.ndarray]] = defaultdict(list)  # free space -> rows that have it
    for width in range(length, 0, -1):
        pieces, by_width = np.split(by_width, [counts[width]])
        for space in range(width, length + 1):
            per_row = space // width
            if space == length:  # No started row has room any more: start new ones.
                num_new = -(pieces.size // -per_row)
                free[space].append(np.arange(num_rows, num_rows + num_new))
                num_rows += num_new
            while pieces.size and free[space]:
                candidates = free[space].pop()
                target = np.repeat(candidates, per_row)[: pieces.size]
                row[pieces[: target.size]] = target
                pieces = pieces[target.size :]
                num_full, rest = divmod(target.size, per_row)
                free[space - per_row * width].append(candidates[:num_full])
                if rest:
                    free[space - rest * width].append(candidates[num_full : num_full + 1])
                if num_full + (rest > 0) < candidates.size:
                    free[space].append(candidates[num_full + (rest > 0) :])
    return row


def _arange_each(counts: np.ndarray) -> np.ndarray:
    """Concatenates `np.arange(count)` for each count."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)
