"""Work spread over processes, its results in order."""

import collections
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MAX_PROCESSES = 32  # One process reads for all of them; more could not be fed.
_FEW = 4  # items that are done sooner than processes start


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map(function, items)` in several processes, one for each core.

    Items are taken as they are needed, a few ahead of the results. What `function` raises is
    raised here, at its place in the order. A handful of items is worked on in this process.
    """
    items = iter(items)
    first = list(islice(items, _FEW + 1))
    if len(first) <= _FEW:
        yield from map(function, first)
        return
    processes = min(num_cores(), _MAX_PROCESSES)
    # Spawned, because forking a process that holds the threads of JAX can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start) as pool:
        running = collections.deque()
        try:
            for item in chain(first, items):
                running.append(pool.submit(function, item))
                if len(running) > 2 * processes:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start() -> None:
    """Called first in a worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # The processes are parallel already.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent says what there is to say.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker would outlive a parent that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
