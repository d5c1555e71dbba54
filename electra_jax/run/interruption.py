"""SIGTERM and SIGINT: a run that is told to stop saves, exits, and goes on later.

Until a step is done there is nothing to save, and signals do what they do to any other program:
they end it at once, even while it compiles, which takes minutes that no handler of Python's could
interrupt. From the first step on they are requests.
"""

import os
import signal
import sys
import time

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 42
SAME_SIGNAL_SECONDS = 1.0  # launchers pass on what the terminal has sent to all its processes


class Stopped(Exception):
    """A run was told to stop; it goes on when it is started again."""


class Interruption:
    """Whether this run has been told to stop. Signals are caught inside the `with` block.

    A second signal, at least a second after the first, ends the process as SIGKILL would, but with
    a word and `EXIT_CODE`.

    Where several processes train together, all must stop after the same step. JAX has them agree:
    from `jax.distributed.initialize` on it catches SIGTERM in each process and tells the others.
    SIGINT is handed to it as a SIGTERM. Before the first step nothing happens then, so that a
    compilation is either finished or, when the time of grace is over, killed.

    Attributes:
      is_requested: whether the run is to stop; where several processes train, as `reached` says.
    """

    def __init__(self):
        self.is_requested = False
        self._is_shared = jax.process_count() > 1
        self._caught = (signal.SIGINT,) if self._is_shared else (signal.SIGINT, signal.SIGTERM)
        self._name = signal.SIGTERM.name
        self._first_time: float | None = None

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`. Must be asked after every step; never waits."""
        if self._is_shared:
            self.is_requested |= multihost_utils.reached_preemption_sync_point(step)
        elif signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._handle_by(self._receive)
        return self.is_requested

    def stopped(self, step: int) -> Stopped:
        """What to raise once `step` is saved."""
        return Stopped(
            f"stopped by {self._name} at step {step:,}, saved; run the same command again to go on"
        )

    def _receive(self, number: int, _) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._first_time is None:
            self._name, self._first_time = name, now
            if self._is_shared:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.is_requested = True
        elif now - self._first_time >= SAME_SIGNAL_SECONDS:
            line = f"stopped by a second signal, {name}; run the same command again to go on"
            print(line, file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)

    def _handle_by(self, handler) -> list:
        """Returns the handlers there were."""
        return [signal.signal(number, handler) for number in self._caught]

    def __enter__(self) -> "Interruption":
        self._previous = self._handle_by(self._receive if self._is_shared else signal.SIG_DFL)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in zip(self._caught, self._previous, strict=True):
            signal.signal(number, handler)
