"""Metrics on their way from the device to a person: windows of steps, rates, console lines.

The loop never waits for the device. Each step's sums stay there until the step after the window's
last one has been dispatched; then the whole window is fetched at once.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from electra_jax import metrics
from electra_jax.objectives.mlm import Sums
from electra_jax.writer import MetricWriter

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
SHOWN = {  # metric to its name on the console
    "loss": "loss",
    "mlm_loss": "mlm",
    "mlm_accuracy": "mlm acc",
    "rtd_loss": "rtd",
    "rtd_auc": "auc",
    "rtd_recall": "recall",
    "replaced_fraction": "replaced",
}


class Progress:
    """Collects the sums of each step; writes and prints a window of them at a time.

    Args:
      num_steps: of the whole run.
      loss_terms: weights that make up the total loss.
      peak: tokens per second at an MFU of 1, or None where that is not known.
      compilations: seconds of each compilation so far; grows, see `compilations`.
      writer: receives every window and evaluation.
      log: prints a line.
    """

    def __init__(
        self,
        num_steps: int,
        loss_terms: dict[str, float],
        peak: float | None,
        compilations: list[float],
        writer: MetricWriter,
        log: Callable[[str], None],
    ):
        self.num_steps = num_steps
        self.loss_terms = loss_terms
        self.peak = peak
        self.compilations = compilations
        self.writer = writer
        self.log = log
        self.window: list[tuple[int, Sums]] = []
        self.due: list[tuple[int, Sums]] = []
        self.first_step: int | None = None  # of this process: it compiles, and counts for no rate
        self.clock = 0.0  # when the steps now collected began to run

    def add(self, step: int, sums: Sums) -> None:
        """Collect the sums of a step just dispatched; report the window before it, if complete."""
        if self.first_step is None:
            self.log(f"compiled in {sum(self.compilations):.1f} s")
            self.compilations.clear()
            self.first_step = step
            jax.block_until_ready(sums)
            self.clock = time.monotonic()
        self.report()
        self.window.append((step, sums))

    def close_window(self) -> None:
        """Steps from here on belong to the next window."""
        self.due, self.window = self.window, []

    def report(self) -> None:
        """Fetch, check, write and print the complete window, if there is one.

        Raises:
          FloatingPointError: a loss or gradient in it is not finite; names the first such step.
        """
        if not self.due:
            return
        due, self.due = jax.device_get(self.due), []
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        for step, sums in due:
            require_finite(step, sums)

        step = due[-1][0]
        values = metrics.summarize(add_up(sums for _, sums in due), self.loss_terms)
        del values["tokens"]
        own = {name: values.pop(name) for name in ("learning_rate", "grad_norm")}
        values = {f"train/{name}": value for name, value in values.items()} | own
        tokens = [sums["tokens"][0] for step, sums in due if step != self.first_step]
        if tokens:
            values["tokens_per_second"] = float(sum(tokens)) / seconds
            if self.peak:
                values["mfu"] = values["tokens_per_second"] / self.peak
        self.writer.write(step, values)
        self.print_line(step, values, seconds / len(tokens) if tokens else None)
        if self.compilations:
            self.log(f"warning: {len(self.compilations)} compilations since the first step")
            self.compilations.clear()

    def print_line(
        self, step: int, values: dict[str, float], seconds_per_step: float | None
    ) -> None:
        """One line: where the run is, how it does, how fast it goes, how long it takes."""
        parts = [f"step {step:,}/{self.num_steps:,} ({step / self.num_steps:.0%})"]
        parts += shown(values, "train/")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in values:
            parts.append(f"mfu {values['mfu']:.1%}")
        if seconds_per_step is not None:
            parts.append(f"{duration((self.num_steps - step) * seconds_per_step)} left")
        self.log("  ".join(parts))

    def write_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Write and print held-out metrics; `results` carry their `eval/` prefix.

        Raises:
          FloatingPointError: one of them is not finite.
        """
        require_finite(step, results)
        self.writer.write(step, results)
        self.log("  ".join([f"held out at step {step:,}:", *shown(results, "eval/")]))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside, and what is compiled there, count for no rate."""
        started = time.monotonic()
        yield
        self.clock += time.monotonic() - started
        self.compilations.clear()


def require_finite(step: int, values: dict[str, np.ndarray | float]) -> None:
    """Raise FloatingPointError, naming the step and what is NaN or infinite, if anything is."""
    bad = [name for name, value in values.items() if not np.isfinite(value).all()]
    if bad:
        raise FloatingPointError(
            f"step {step}: {', '.join(bad)} not finite; all checkpoints are from before this step"
        )


def add_up(sums: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Totals by name, in float64."""
    totals: dict[str, np.ndarray] = {}
    for one in sums:
        for name, value in one.items():
            totals[name] = totals.get(name, 0) + np.asarray(value, np.float64)
    return totals


def shown(values: dict[str, float], prefix: str) -> list[str]:
    """The metrics worth a place on the console."""
    return [
        f"{label} {values[prefix + name]:.4g}"
        for name, label in SHOWN.items()
        if prefix + name in values
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
