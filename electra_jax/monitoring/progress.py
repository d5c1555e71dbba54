"""Metrics on their way from the device to a person: windows of steps, rates, what is shown of them.

The loop never waits for the device. Each step's sums stay there until the step after the window's
last one has been dispatched; then the whole window is fetched at once.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np

from electra_jax.monitoring.console import Console
from electra_jax.objectives import metrics
from electra_jax.objectives.base import Sums
from electra_jax.objectives.metrics import Metric

HostBatch = dict[str, np.ndarray]
Watch = Callable[[int, dict[str, float]], Iterable[str]]

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
SLOW_INPUT = 0.2  # share of a window's time from which on a person is told
REDRAWN = 0.2  # seconds after which the status on a terminal is drawn anew
BAR = 30  # characters


class Progress:
    """Collects the sums of each step; writes and prints a window of them at a time.

    Args:
      num_steps: of the whole run.
      loss_terms: weights that make up the total loss.
      peak: tokens per second at an MFU of 1, or None where that is not known.
      compilations: seconds of each compilation so far; grows, see `compilations`.
      write: receives step and metrics of every window and evaluation.
      console: where to.
      checkpoint_every: steps.
      shown: the metrics that may have a place on the console, by name.
      watch: (step, metrics) to sentences about what looks wrong, see `health`.
      max_skipped: updates in a row that may be skipped because they are not finite.
      saved: what `to_save` has returned before the run was interrupted.
    """

    def __init__(
        self,
        num_steps: int,
        loss_terms: dict[str, float],
        peak: float | None,
        compilations: list[float],
        write: Callable[[int, dict[str, float]], None],
        console: Console,
        checkpoint_every: int,
        shown: Mapping[str, Metric],
        watch: Watch = lambda step, values: (),
        max_skipped: int = 0,
        saved: dict | None = None,
    ):
        self.num_steps = num_steps
        self.loss_terms = loss_terms
        self.peak = peak
        self.compilations = compilations
        self.write = write
        self.console = console
        self.log = console.log
        self.checkpoint_every = checkpoint_every
        self.shown = shown
        self.watch = watch
        self.max_skipped = max_skipped
        self.window: list[tuple[int, Sums]] = []
        self.due: list[tuple[int, Sums]] = []
        saved = saved or {"totals": {}, "skipped_in_a_row": 0}
        self.totals = {name: np.asarray(total) for name, total in saved["totals"].items()}
        self.skipped_in_a_row: int = saved["skipped_in_a_row"]
        self.newest: Sums | None = None  # of the step dispatched last
        self.shapes: set[tuple[int, ...]] = set()  # of batches that steps are compiled for
        self.compiled: set[int] = set()  # the first steps of each shape, which count for no rate
        self.seconds_per_step: float | None = None  # in the newest window that has a rate
        self.status = {"window": "", "evaluation": ""}  # the newest of each, on a terminal
        self.drawn = -math.inf
        self.start_clock()

    def start_clock(self) -> None:
        """Rates are measured from here on."""
        self.clock = time.monotonic()
        self.handed_over = self.clock  # when the loop got its newest batch
        self.waited = 0.0  # seconds for batches, with nothing to do
        self.tokens: list[float] = []  # of each step since then

    def timed(self, batches: Iterable[HostBatch]) -> Iterator[HostBatch]:
        """`batches`; the time that the devices may have been idle for want of them is counted.

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

    def add(self, step: int, sums: Sums, shape: tuple[int, ...]) -> None:
        """Collect the sums of a step just dispatched; report the window before it, if complete.

        Args:
          shape: of its batch.
        """
        if shape not in self.shapes:
            jax.block_until_ready(sums)
            self.leave_out(step, shape)
        self.report()
        self.window.append((step, sums))
        self.newest = sums
        if self.console.is_live and time.monotonic() - self.drawn > REDRAWN:
            self.draw(step)

    def leave_out(self, step: int, shape: tuple[int, ...]) -> None:
        """`step`, the first of its shape, is done; it was compiled and counts for no rate."""
        if self.compilations:  # or else an earlier trial has done it
            size = " x ".join(map(str, shape))
            self.log(f"compiled in {sum(self.compilations):.1f} s for batches of {size} tokens")
            self.compilations.clear()
        self.compiled.add(step)
        if self.shapes:
            self.clock += time.monotonic() - self.handed_over
        else:
            self.start_clock()
        self.shapes.add(shape)

    def close_window(self) -> None:
        """Steps from here on belong to the next window."""
        self.due, self.window = self.window, []

    def catch_up(self) -> None:
        """Report, and fetch and check the steps of the window that is open, too.

        Raises:
          FloatingPointError: as `report`.
        """
        self.report()
        steps, self.window = self.window, []
        self.fetch(steps)

    def to_save(self) -> dict:
        """What a resumed run needs in order to go on with the open window, after `catch_up`."""
        totals = {name: total.tolist() for name, total in self.totals.items()}
        return {"totals": totals, "skipped_in_a_row": self.skipped_in_a_row}

    def report(self) -> None:
        """Fetch, check, write and print the complete window, if there is one.

        Raises:
          FloatingPointError: more steps in a row than may be skipped have a loss or gradient that
            is not finite; names the step.
        """
        if not self.due:
            return
        step, (due, self.due) = self.due[-1][0], (self.due, [])
        self.fetch(due)
        skipped = self.totals.pop("skipped_updates")[0]
        values, self.totals = metrics.summarize(self.totals, self.loss_terms), {}
        if not values.keys() & self.loss_terms.keys():  # all were skipped
            del values["loss"]
        own = {name: values.pop(name) for name in ("learning_rate", "grad_norm") if name in values}
        values = {f"train/{name}": value for name, value in values.items()} | own
        if self.max_skipped:
            values["skipped_updates"] = float(skipped)
        seconds, num_steps = time.monotonic() - self.clock, len(self.tokens)
        if num_steps:
            values["tokens_per_second"] = float(sum(self.tokens)) / seconds
            values["input_wait"] = self.waited / seconds
            if self.peak:
                values["mfu"] = values["tokens_per_second"] / self.peak
            if self.seconds_per_step is None:
                whole = duration(self.num_steps * seconds / num_steps)
                self.log(f"all {self.num_steps:,} steps take {whole} at the rate of the first ones")
            self.seconds_per_step = seconds / num_steps
        self.start_clock()
        self.write(step, values)
        self.print_line(step, values)
        self.warn(step, values)
        if values.get("input_wait", 0) > SLOW_INPUT:
            self.log(
                f"warning: {values['input_wait']:.0%} of the time went into waiting for batches; "
                "more of config.data.num_threads may help"
            )
        if self.compilations:
            self.log(f"warning: {len(self.compilations)} compilations since the first steps")
            self.compilations.clear()

    def fetch(self, steps: list[tuple[int, Sums]]) -> None:
        """Wait for `steps`, check their sums, and add them to those of their window."""
        for step, sums in jax.device_get(steps):
            tokens = sums.pop("tokens")[0]
            if step not in self.compiled:
                self.tokens.append(tokens)
            self.totals = add_up([self.totals, self.counted(step, sums)])

    def counted(self, step: int, sums: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`sums` and whether the update was skipped; then they hold little else.

        Raises:
          FloatingPointError: too many in a row were.
        """
        bad = not_finite(sums)
        if not bad:
            self.skipped_in_a_row = 0
            return sums | {"skipped_updates": np.array([0, 1])}
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.max_skipped:
            after = f" after {self.max_skipped} skipped updates" if self.max_skipped else ""
            raise FloatingPointError(
                f"step {step}: {', '.join(bad)} not finite{after}; all checkpoints are from before "
                "this step"
            )
        self.log(f"warning: step {step}: {', '.join(bad)} not finite; update skipped")
        return {"learning_rate": sums["learning_rate"], "skipped_updates": np.array([1, 1])}

    def print_line(self, step: int, values: dict[str, float]) -> None:
        """Where the run is, how it does, how fast it goes, how long it takes."""
        speed = []
        if "tokens_per_second" in values:
            speed.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in values:
            speed.append(f"mfu {values['mfu']:.1%}")
        metrics = [*shown(self.shown, values, "train/"), *speed]
        if self.console.is_live:
            self.status["window"] = "  ".join([f"to step {step:,}:", *metrics])
            self.draw(step)
        else:
            self.log("  ".join([self.place(step), *metrics, *self.ahead(step)]))

    def draw(self, step: int) -> None:
        """The status on a terminal."""
        done = BAR * step // self.num_steps
        bar = f"[{'#' * done}{'.' * (BAR - done)}]"
        first = "  ".join([bar, self.place(step), *self.ahead(step)])
        self.console.status([first, *filter(None, self.status.values())])
        self.drawn = time.monotonic()

    def place(self, step: int) -> str:
        """How many steps of how many."""
        return f"step {step:,}/{self.num_steps:,} ({step / self.num_steps:.0%})"

    def ahead(self, step: int) -> Iterator[str]:
        """The time that is left, where that is known, and the next checkpoint."""
        if self.seconds_per_step is not None:
            yield f"{duration((self.num_steps - step) * self.seconds_per_step)} left"
        if step < self.num_steps:
            following = (step // self.checkpoint_every + 1) * self.checkpoint_every
            yield f"next checkpoint at {min(following, self.num_steps):,}"

    def warn(self, step: int, values: dict[str, float]) -> None:
        """Say so where something looks wrong."""
        for sentence in self.watch(step, values):
            self.log(f"warning: step {step:,}: {sentence}")

    def write_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Write and print held-out metrics; `results` carry their `eval/` prefix.

        Raises:
          FloatingPointError: one of them is not finite.
        """
        if bad := not_finite(results):
            raise FloatingPointError(
                f"step {step}: {', '.join(bad)} not finite; all checkpoints are from before this "
                "step"
            )
        self.write(step, results)
        line = "  ".join([f"held out at step {step:,}:", *shown(self.shown, results, "eval/")])
        self.status["evaluation"] = line
        self.log(line)
        self.warn(step, results)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside, and what is compiled there, count for no rate."""
        started = time.monotonic()
        yield
        self.clock += time.monotonic() - started
        self.compilations.clear()


def not_finite(values: dict[str, np.ndarray | float]) -> list[str]:
    """The names of those that are NaN or infinite."""
    return [name for name, value in values.items() if not np.isfinite(value).all()]


def add_up(sums: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Totals by name, in float64."""
    totals: dict[str, np.ndarray] = {}
    for one in sums:
        for name, value in one.items():
            totals[name] = totals.get(name, 0) + np.asarray(value, np.float64)
    return totals


def shown(metrics: Mapping[str, Metric], values: dict[str, float], prefix: str) -> list[str]:
    """The values of the metrics worth a place on the console."""
    return [
        f"{metric.console} {values[prefix + name]:.4g}"
        for name, metric in metrics.items()
        if metric.console and prefix + name in values
    ]


def duration(seconds: float) -> str:
    """`3 h 05 m`, `4 m 10 s` or `9 s`."""
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} m"
    return f"{minutes} m {seconds:02} s" if minutes else f"{seconds} s"


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
