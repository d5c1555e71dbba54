"""Texts as rows of token ids in memory: `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]` (spec 6.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from electra_jax.data.tokenizers.base import Tokenizer

Arrays = dict[str, np.ndarray]
Ids = Sequence[int]


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Arrays whose first axis is the row, as rows for `loader`. `input_ids` is one of them."""

    arrays: Arrays

    def __len__(self) -> int:
        return len(self.arrays["input_ids"])

    @property
    def groups(self) -> np.ndarray:
        """All rows are one group."""
        return np.array([0, len(self)])

    def batch(self, indices: np.ndarray) -> Arrays:
        """The rows at `indices`; -1 stands for a row of padding, whose labels count nowhere."""
        is_row = indices >= 0
        batch = {}
        for name, x in self.arrays.items():
            batch[name] = x[np.where(is_row, indices, 0)]
            batch[name][~is_row] = -1 if name == "label" and x.ndim == 2 else 0
        return batch


def pack(tokenizer: Tokenizer, segments: Sequence[tuple[Ids, ...]], max_length: int) -> Arrays:
    """A row for each tuple of one or two segments, which must fit.

    Returns:
      int32 `input_ids`, `segment_ids` (1, and 0 for padding), `position_ids` and `token_type_ids`
      (1 in the second text, its [SEP] included), all [N, max_length].
    """
    shape = len(segments), max_length
    input_ids = np.full(shape, tokenizer.pad_id, np.int32)
    lengths = np.zeros((len(segments), 2), np.int32)  # of the row; of its first segment
    for row, parts in enumerate(segments):
        ids = [tokenizer.cls_id]
        for part in parts:
            ids += [*part, tokenizer.sep_id]
        input_ids[row, : len(ids)] = ids
        lengths[row] = len(ids), len(parts[0]) + 2
    position_ids = np.broadcast_to(np.arange(max_length, dtype=np.int32), shape)
    real = position_ids < lengths[:, :1]
    return {
        "input_ids": input_ids,
        "segment_ids": real.astype(np.int32),
        "position_ids": position_ids,  # a view of one row; nobody writes to it
        "token_type_ids": (real & (position_ids >= lengths[:, 1:])).astype(np.int32),
    }


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two segments fits into `room` tokens.

    As if one token after the other were taken from the end of the longer segment, from the second
    where they are equally long, until both fit.
    """
    second = min(second, max(room // 2, room - first))
    return min(first, room - second), second


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, str | None]], max_length: int
) -> Arrays:
    """Texts, or pairs of texts, as rows; what does not fit is cut off. Returns as `pack`."""
    first = tokenizer.encode_batch([a for a, _ in texts])
    second = iter(tokenizer.encode_batch([b for _, b in texts if b is not None]))
    segments = []
    for a, (_, text) in zip(first, texts, strict=True):
        if text is None:
            segments.append((a[: max_length - 2],))
        else:
            b = next(second)
            size_a, size_b = pair_lengths(len(a), len(b), max_length - 3)
            segments.append((a[:size_a], b[:size_b]))
    return pack(tokenizer, segments, max_length)


def windows(length: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """Windows of at most `room` tokens that overlap and together hold all; at least one."""
    begin = 0
    while begin + room < length:
        yield begin, begin + room
        begin += min(room, stride)
    yield begin, length


def owners(length: int, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """For each token the window that shows most around it: BERT's rule, the first if equal."""
    place = np.arange(length)
    begin, end = np.array(spans).T[:, :, None]
    around = np.minimum(place - begin, end - 1 - place)
    return np.argmax(np.where(around < 0, -np.inf, around + 0.01 * (end - begin)), axis=0)
