"""Rows of similar length together, so that little of a batch is padding."""

from dataclasses import dataclass

import numpy as np

from electra_jax.data.features import Arrays, FeatureRows

MULTIPLE = 8  # widths are multiples of it, as accelerators like them
NARROWEST = 32  # of widths to predict with
MIN_BATCHES = 8  # that rows of a width are enough for: else some would come too often


@dataclass(frozen=True, eq=False)
class Buckets:
    """Rows to train on, sorted by length, as rows for `loader`.

    A batch holds rows of one group, all cut to the group's width; what is cut off is padding.
    """

    rows: FeatureRows
    groups: np.ndarray  # row indices where a group begins, and the number of rows at the end
    widths: tuple[int, ...]  # of each group

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> list[float]:
        """Rows of each group."""
        return np.diff(self.groups).astype(float).tolist()

    @property
    def mean_width(self) -> float:
        """Tokens of a row, padding included, on average."""
        return float(np.average(self.widths, weights=self.weights))

    def batch(self, indices: np.ndarray) -> Arrays:
        """The rows at `indices`, which are of one group."""
        group = np.searchsorted(self.groups, indices[0], side="right") - 1
        batch = self.rows.batch(indices)
        return {name: cut(x, self.widths[group]) for name, x in batch.items()}


def make_buckets(arrays: Arrays, num_widths: int, batch_size: int) -> Buckets:
    """The rows of features by length, in at most `num_widths` groups, if there are rows enough."""
    lengths = arrays["segment_ids"].sum(axis=1)
    order = np.argsort(lengths, kind="stable")
    widths = choose_widths(lengths, num_widths, MIN_BATCHES * batch_size)
    ends = np.searchsorted(lengths[order], widths, side="right")
    return Buckets(
        FeatureRows({name: x[order] for name, x in arrays.items()}),
        np.array([0, *ends]),
        tuple(min(width, arrays["input_ids"].shape[1]) for width in widths),
    )


def choose_widths(lengths: np.ndarray, num_widths: int, min_rows: int) -> tuple[int, ...]:
    """Widths, ascending, that leave the least padding when each row gets the smallest that fits.

    Args:
      num_widths: at most so many.
      min_rows: each is for at least so many rows; a single one is for all, however few.
    """
    candidates = np.unique(-(lengths // -MULTIPLE) * MULTIPLE).tolist()
    rows = [0, *np.searchsorted(np.sort(lengths), candidates, side="right").tolist()]
    last = len(candidates)
    best = {0: (0, ())}  # number of candidates dealt with: tokens, widths
    complete = [(rows[last] * candidates[-1], (candidates[-1],))]
    for _ in range(num_widths):
        options = [
            (end, (tokens + (rows[end] - rows[begin]) * candidates[end - 1], chosen))
            for begin, (tokens, widths) in best.items()
            for end in range(begin + 1, last + 1)
            if rows[end] - rows[begin] >= min_rows
            for chosen in [(*widths, candidates[end - 1])]
        ]
        best = {}
        for end, option in options:
            best[end] = min(option, best.get(end, option))
        complete += [best[last]] if last in best else []
    return min(complete)[1]


def trimmed(arrays: Arrays) -> Arrays:
    """Features to predict, without most of the columns that hold nothing but padding.

    Widths are powers of two, so that there are few to compile for.
    """
    longest = int(arrays["segment_ids"].sum(axis=1).max(initial=1))
    width = max(NARROWEST, 1 << (longest - 1).bit_length())
    return {name: cut(x, width) for name, x in arrays.items()}


def cut(x: np.ndarray, width: int) -> np.ndarray:
    """The first tokens of each row, if `x` has rows and tokens: two axes, of whole numbers."""
    return x[:, :width] if x.ndim == 2 and np.issubdtype(x.dtype, np.integer) else x
