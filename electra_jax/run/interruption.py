"""SIGTERM and SIGINT: a run that is told to stop saves, exits, and goes on later.

Python runs the handler of a signal in the main thread, between two instructions of its own. At the
start of a run that thread sits in the compiler for minutes. So the handlers here do nothing; but
the interpreter also writes the number of each signal to a pipe, at once, and a thread reads it.
"""

import os
import signal
import sys
import threading
import time

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 42
SAME_SIGNAL_SECONDS = 1.0  # launchers pass on what the terminal has sent to all its processes


class Stopped(Exception):
    """A run was told to stop; it goes on when it is started again."""


def exit_now(reason: str) -> None:
    """Ends the process without further ado, as SIGKILL would, but with a word and `EXIT_CODE`."""
    line = f"stopped by {reason}; run the same command again to go on"
    print(line, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class Interruption:
    """Whether this run has been told to stop. Signals are caught inside the `with` block.

    As long as no step is done there is nothing to save, and a signal ends the process at once. So
    does a second one, at least a second after the first. The exit code is 42 in both cases.

    Where several processes train together, all must stop after the same step. JAX has them agree:
    from `jax.distributed.initialize` on it catches SIGTERM in each process and tells the others.
    SIGINT is handed to it as a SIGTERM. Before the first step nothing happens then, so that a
    compilation is either finished or, when the time of grace is over, killed.

    Attributes:
      requested: set once the run is to stop; where several processes train, only by `reached`.
    """

    def __init__(self):
        self.requested = threading.Event()
        self._is_shared = jax.process_count() > 1
        self._caught = (signal.SIGINT,) if self._is_shared else (signal.SIGINT, signal.SIGTERM)
        self._lock = threading.Lock()
        self._has_stepped = False
        self._name = signal.SIGTERM.name
        self._first_time: float | None = None

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`. Must be asked after every step; never waits."""
        if self._is_shared and multihost_utils.reached_preemption_sync_point(step):
            self.requested.set()
        with self._lock:
            self._has_stepped = True
        return self.requested.is_set()

    def stopped(self, step: int) -> Stopped:
        """What to raise once `step` is saved."""
        return Stopped(
            f"stopped by {self._name} at step {step:,}, saved; run the same command again to go on"
        )

    def _receive(self, name: str) -> None:
        now = time.monotonic()
        with self._lock:
            if self._first_time is None and (self._has_stepped or self._is_shared):
                self._name, self._first_time = name, now
                if self._is_shared:
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    self.requested.set()
                return
            if self._first_time is None:
                when = f"{name} before the first step"
            elif now - self._first_time >= SAME_SIGNAL_SECONDS:
                when = f"a second signal, {name}"
            else:
                return
        exit_now(when)

    def _watch(self) -> None:
        while numbers := os.read(self._reader, 64):  # nothing: the pipe has been closed
            for number in numbers:
                if number in self._caught:
                    self._receive(signal.Signals(number).name)

    def __enter__(self) -> "Interruption":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, lambda number, frame: None) for number in self._caught
        }
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not ours
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
