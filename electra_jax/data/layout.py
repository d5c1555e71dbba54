"""Examples as an index over the token store.

Documents are cut into pieces of at most `length - 2` tokens; nothing is dropped. A piece becomes

    [CLS] token token ... [SEP]

and rows of `length` are made of pieces in one of two layouts:

* `document`: a piece per row, padded.
* `packed`: as many pieces per row as fit. Attention and positions are restricted to the piece
  (`piece_ids`, `position_ids`), so the model computes the same as with a piece per row, without
  spending time on padding.

Packing is best-fit decreasing: from the longest piece to the shortest, each goes to the row with
the least free space that suffices. Done piece by piece this would be slow. But pieces of equal
length are interchangeable, and so are rows of equal free space: it is enough to loop over the
lengths, and for each over the amounts of free space, and to move whole slices of rows. The cost
of the loops depends on `length` only; the rest is sorting.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from electra_jax.data.store import Tokens, TokenStore
from electra_jax.errors import UserError

LAYOUTS = ("packed", "document")


@dataclass(frozen=True, eq=False)
class Rows:
    """Examples of equal length, each a list of pieces. Made by `rows`.

    Attributes:
      length: tokens per row.
      tokens: what the pieces are ranges of.
      starts: int64 [pieces], ordered by row: where in `tokens` each piece starts.
      sizes: int32 [pieces]: how many tokens it has, without [CLS] and [SEP].
      first: int64 [rows + 1]: the first piece of each row; the end.
      pad_id, cls_id, sep_id: the ids around the pieces.
    """

    length: int
    tokens: Tokens
    starts: np.ndarray
    sizes: np.ndarray
    first: np.ndarray
    pad_id: int
    cls_id: int
    sep_id: int

    def __len__(self) -> int:
        return self.first.size - 1

    @property
    def real_tokens(self) -> int:
        """The tokens of all rows that are not padding, with [CLS] and [SEP]."""
        return int(self.sizes.sum()) + 2 * self.sizes.size

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows at `indices`, an integer array [b]; -1 stands for a row of padding.

        Returns:
          int32 arrays [b, length]:
            input_ids: `pad_id` where there is no piece.
            piece_ids: 1, 2, ... for the pieces of a row, 0 for padding. A token may attend to
              those with its own piece id.
            position_ids: 0, 1, ... in each piece, 0 for padding.
            token_type_ids: 0.
        """
        indices = np.asarray(indices)
        is_row = indices >= 0
        first = np.where(is_row, self.first[indices], 0)
        counts = np.where(is_row, self.first[indices + 1], 0) - first

        # Per piece: its row in the batch, its number in the row, where in the batch it begins.
        row = np.repeat(np.arange(indices.size), counts)
        number = _arange_each(counts)
        piece = np.repeat(first, counts) + number
        sizes = self.sizes[piece]
        widths = sizes + 2
        before = np.cumsum(widths) - widths
        row_widths = np.bincount(row, widths, minlength=indices.size).astype(np.int64)
        begins = row * self.length + before - (np.cumsum(row_widths) - row_widths)[row]

        # Per token of a piece, special tokens included: its position and where in the batch it is.
        position = _arange_each(widths)
        place = np.repeat(begins, widths) + position

        shape = (indices.size, self.length)
        input_ids = np.full(shape, self.pad_id, np.int32)
        body = np.repeat(begins + 1, sizes) + _arange_each(sizes)
        input_ids.flat[begins] = self.cls_id
        input_ids.flat[body] = self.tokens.ranges(self.starts[piece], sizes)
        input_ids.flat[begins + sizes + 1] = self.sep_id
        piece_ids = np.zeros(shape, np.int32)
        piece_ids.flat[place] = np.repeat(number + 1, widths)
        position_ids = np.zeros(shape, np.int32)
        position_ids.flat[place] = position
        return {
            "input_ids": input_ids,
            "piece_ids": piece_ids,
            "position_ids": position_ids,
            "token_type_ids": np.zeros(shape, np.int32),
        }


def rows(store: TokenStore, split: str, length: int, layout: str) -> Rows:
    """Arranges a split of a store in rows of `length` tokens; see the top of this module.

    The result depends on the arguments only. It takes seconds for tens of millions of pieces, so
    it is not kept on disk.

    Raises:
      UserError: `layout` is not one of `LAYOUTS`, or `length` has no room for a token.
    """
    if layout not in LAYOUTS:
        raise UserError(f"data.layout: found {layout!r}; allowed are {', '.join(LAYOUTS)}")
    if length < 3:
        raise UserError(
            f"length of rows: found {length}; allowed are 3 and more, for [CLS], a token, [SEP]"
        )
    starts, sizes = _cut(store.documents(split), length - 2)
    if layout == "packed":
        row = _pack(sizes + 2, length)
        order = np.argsort(row, kind="stable")
        starts, sizes = starts[order], sizes[order]
        first = np.append(0, np.cumsum(np.bincount(row)))
    else:
        first = np.arange(sizes.size + 1)
    tokenizer = store.tokenizer
    return Rows(
        length=length,
        tokens=store.tokens(split),
        starts=starts,
        sizes=sizes,
        first=first,
        pad_id=tokenizer.pad_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
    )


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
