"""Some steps under JAX's profiler, for xprof: `tensorboard --logdir=RUN/tensorboard`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

HostBatch = dict[str, np.ndarray]


def profiled(
    batches: Iterable[HostBatch],
    start: int,
    steps: Sequence[int],
    directory: Path,
    newest: Callable[[], object],
) -> Iterator[HostBatch]:
    """`batches` of the steps after `start`; the profiler is on during some of them.

    Args:
      steps: the first and the last of these, or none at all.
      directory: gets `plugins/profile/`.
      newest: arrays that the step dispatched last computes, which is waited for.
    """
    first, last = steps or (0, 0)
    is_on = False
    try:
        for step, batch in enumerate(batches, start + 1):
            if step == first:
                jax.profiler.start_trace(directory)
                is_on = True
            yield batch
            if step == last and is_on:
                jax.block_until_ready(newest())
                jax.profiler.stop_trace()
                is_on = False
    finally:
        if is_on:
            jax.profiler.stop_trace()
