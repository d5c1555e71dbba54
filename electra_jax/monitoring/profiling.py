"""Some steps under JAX's profiler, for xprof: `tensorboard --logdir=RUN/tensorboard`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax

from electra_jax.monitoring.rates import HostBatch


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
    with contextlib.ExitStack() as profiler:
        for step, batch in enumerate(batches, start + 1):
            if step == first:
                jax.profiler.start_trace(directory)
                profiler.callback(jax.profiler.stop_trace)
            yield batch
            if step == last and first > start:
                jax.block_until_ready(newest())
                profiler.close()
