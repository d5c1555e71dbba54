"""Batches of rows, in an order that depends on the seed only.

Training batch `step` is a pure function of (seed, step): resuming takes no time, and each host
makes just its share. The order is Grain's global shuffle, an invertible function of the index
rather than a table, applied anew in every epoch; a batch may hold the end of one epoch and the
beginning of the next.

    order    row 7, row 2, row 9, ...   epoch 0, then epoch 1 in another order, ...
    batch    step * batch_size ... (step + 1) * batch_size of the order
    host     an equal, contiguous part of the batch

Groups of rows, such as those of each source, may be mixed by weights. Each has an order of its own
with its own epochs, and takes its turns in the proportion of its weight:

    weights  (2, 1)
    order    row 7 of group 0, row 3 of group 1, row 2 of group 0, row 9 of group 0, ...

Or whole batches take turns, each with rows of one group.

Every batch has a field `row`: the number of each row in the global batch (in evaluation: in the
whole pass). Random masks are derived from it, so they do not depend on the number of hosts.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import inf, lcm
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from electra_jax.errors import UserError


@runtime_checkable
class Rows(Protocol):
    """Examples by number: `layout.Rows`, or features of a task."""

    groups: np.ndarray  # row indices where a group begins; the number of rows

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Fields of some rows; those of index -1 are padding."""
        ...


def train_batch(
    rows: Rows,
    step: int,
    *,
    batch_size: int,
    seed: int,
    weights: Sequence[float] = (1.0,),
    one_group: bool = False,
    process_index: int = 0,
    process_count: int = 1,
) -> dict[str, np.ndarray]:
    """This host's part of the global training batch number `step`.

    Args:
      step: 0, 1, ...; any number takes equally long.
      batch_size: rows in the global batch.
      seed: determines the order.
      weights: of the groups of `rows`, in any scale. Of any first n rows of the order, each group
        has its share to within 1 row; with more than 4 groups, 1.5 rows; more than 8, 2 rows; ...
      one_group: batches, not rows, take turns: all rows of a batch are of one group.

    Returns:
      The fields of `rows.batch`, [batch_size / process_count, ...], and `row`, int32
      [batch_size / process_count]: the number of each row in the global batch.

    Raises:
      UserError: the hosts do not divide the batch, or there is not one weight for each group.
    """
    share = _share(batch_size, process_index, process_count)
    turns, groups = _turns(rows, weights), _shuffled(rows, seed)
    if one_group:
        group, turn = _turn(step, turns)
        places = [(group, turn * batch_size + row) for row in share.tolist()]
    else:
        places = [_turn(step * batch_size + row, turns) for row in share.tolist()]
    indices = np.array([groups[group][turn] for group, turn in places])
    return {**rows.batch(indices), "row": share}


def train_batches(
    rows: Rows,
    start_step: int,
    num_steps: int,
    *,
    num_threads: int = 4,
    prefetch: int = 8,
    **options: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """The batches of `train_batch` for `num_steps` steps from `start_step`, made ahead of use.

    Args:
      num_threads: threads that make batches.
      prefetch: batches that may wait for use.
      options: the keyword arguments of `train_batch`.
    """
    steps = grain.MapDataset.source(range(start_step, start_step + num_steps))
    batches = steps.map(partial(train_batch, rows, **options))
    ahead = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)
    return iter(batches.to_iter_dataset(ahead))


def eval_batches(
    rows: Rows, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[dict[str, np.ndarray]]:
    """This host's part of the batches of one pass over all rows, in order, each row once.

    The last batch is filled up with rows of padding, whose `segment_ids` are all 0, so that all
    hosts have the same number of batches. `row` counts through the whole pass.
    """
    share = _share(batch_size, process_index, process_count)
    for first in range(0, len(rows), batch_size):
        row = first + share
        yield {**rows.batch(np.where(row < len(rows), row, -1)), "row": row.astype(np.int32)}


def _share(batch_size: int, process_index: int, process_count: int) -> np.ndarray:
    """The numbers of the rows in the global batch that this host holds."""
    if batch_size % process_count:
        raise UserError(
            f"batch_size: found {batch_size}; allowed are multiples of the {process_count} hosts"
        )
    size = batch_size // process_count
    return np.arange(process_index * size, (process_index + 1) * size, dtype=np.int32)


def _turns(rows: Rows, weights: Sequence[float]) -> list[int]:
    """The weights of the groups as whole numbers."""
    num_groups = rows.groups.size - 1
    if len(weights) != num_groups or not all(0 < weight < inf for weight in weights):
        raise UserError(
            f"weights: found {tuple(weights)}; allowed is a number above 0 for each of the "
            f"{num_groups} groups of rows"
        )
    shares = [Fraction(weight) for weight in weights]
    scale = lcm(*(share.denominator for share in shares))
    return [int(share * scale) for share in shares]


def _shuffled(rows: Rows, seed: int) -> list[grain.MapDataset]:
    """An endless dataset of row indices for each group, reshuffled every epoch."""
    # Grain shuffles epoch e with seed + e. Hashing the seed first keeps the epochs of a run from
    # being those of the run with the next seed.
    seeds = np.random.SeedSequence(seed).generate_state(rows.groups.size - 1).tolist()
    return [
        grain.MapDataset.range(begin, end).shuffle(seed)
        for (begin, end), seed in zip(pairwise(rows.groups.tolist()), seeds, strict=True)
    ]


def _turn(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """The group that has turn number `index`, and how many turns it has had before.

    Of n turns, the first half of the groups has its share, rounded; the second half has the others.
    Within each half it goes on like this, down to one group. Each rounding adds at most half a turn
    to what a group is off its share, and none of it depends on what came before.
    """
    if len(weights) == 1:
        return 0, index
    half = len(weights) // 2
    first, total = sum(weights[:half]), sum(weights)
    before, after = ((2 * n * first + total) // (2 * total) for n in (index, index + 1))
    if before < after:
        return _turn(before, weights[:half])
    group, turn = _turn(index - before, weights[half:])
    return half + group, turn
