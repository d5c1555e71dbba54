"""How fast a run goes: tokens per second, waiting for batches, compilations."""

import contextlib
import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from electra_jax.objectives.base import Sums
from electra_jax.objectives.metrics import Metric

HostBatch = dict[str, np.ndarray]

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
SLOW_INPUT = 0.2  # share of a window's time from which on a person is told

METRICS = {  # of every run, whatever it trains
    "learning_rate": Metric("learning rate"),
    "grad_norm": Metric("gradient norm"),
    "tokens_per_second": Metric("tokens per second", tile="{:,.0f}"),
    "mfu": Metric("model FLOPs utilization"),
    "input_wait": Metric("waiting for batches", figure=None),
    "skipped_updates": Metric("skipped updates", figure=None),
}


class Rates:
    """Measures the time of a window, without that of compilations, evaluations and saves."""

    def __init__(self, peak: float | None):
        self.peak = peak  # tokens per second at an MFU of 1, or None where that is not known
        self.compilations: list[float] = []  # seconds of each so far, see `compilations`
        self.newest: Sums | None = None  # of the step dispatched last
        self.shapes: set[tuple[int, ...]] = set()  # of batches that steps are compiled for
        self.seconds_per_step: float | None = None  # in the newest window that has a rate
        self.restart()

    def restart(self) -> None:
        """Rates are measured from here on."""
        self.clock = time.monotonic()
        self.handed_over = self.clock  # when the loop got its newest batch
        self.waited = 0.0  # seconds for batches, with nothing to do
        self.num_steps = 0  # since then, without those that were compiled

    def timed(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """Yields `batches` and measures how long the devices waited for input.

        That is every wait at whose end they have done all they were given: too much by what they
        still did meanwhile, at most a step. As long as batches come in time, it is nothing.
        """
        started = time.monotonic()
        for batch in batches:
            if self.newest and all(x.is_ready() for x in self.newest.values()):
                self.waited += time.monotonic() - started
            self.handed_over = time.monotonic()
            yield batch
            started = time.monotonic()

    def leave_out(self, sums: Sums, shape: tuple[int, ...]) -> str:
        """Waits for the first step of a shape, which is compiled and counts for no rate.

        Returns a line about that, or "" where it was compiled before, as by an earlier trial.
        """
        jax.block_until_ready(sums)
        seconds = sum(self.compilations)
        self.compilations.clear()
        if self.shapes:
            self.clock += time.monotonic() - self.handed_over
        else:
            self.restart()
        self.shapes.add(shape)
        size = " x ".join(map(str, shape))
        return f"compiled in {seconds:.1f} s for batches of {size} tokens" if seconds else ""

    def of_window(self, tokens: float) -> dict[str, float]:
        """Metrics of the time since `restart`, if a step of this many tokens counts there."""
        if not self.num_steps:
            return {}
        seconds = time.monotonic() - self.clock
        self.seconds_per_step = seconds / self.num_steps
        speed = tokens * self.num_steps / seconds
        values = {"tokens_per_second": speed, "input_wait": self.waited / seconds}
        return values | ({"mfu": speed / self.peak} if self.peak else {})

    def problems(self, values: dict[str, float]) -> Iterator[str]:
        """Sentences about a window with these metrics that took longer than it might."""
        if values.get("input_wait", 0) > SLOW_INPUT:
            yield (
                f"{values['input_wait']:.0%} of the time went into waiting for batches; more of "
                "config.data.num_threads may help"
            )
        if self.compilations:
            yield f"{len(self.compilations)} compilations since the first steps"
            self.compilations.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside, and what is compiled there, count for no rate."""
        started = time.monotonic()
        yield
        self.clock += time.monotonic() - started
        self.compilations.clear()


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """A list that grows by the seconds of every compilation inside the `with` block."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == COMPILE_EVENT:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
