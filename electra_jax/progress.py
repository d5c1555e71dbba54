"""Metrics on their way from the device to a person: windows of steps, rates, console lines.

The loop never waits for the device. Each step's sums stay there until the step after the window's
last one has been dispatched; then the whole window is fetched at once.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

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
      flops_per_token, peak: operations for one token and FLOP/s of all devices together; MFU is
        left out where the peak is not known.
      log: prints a line.
    """

    def __init__(
        self,
        num_steps: int,
        loss_terms: dict[str, float],
        flops_per_token: float,
        peak: float | None,
        writer: MetricWriter,
        log: Callable[[str], None],
    ):
        self.num_steps = num_steps
        self.loss_terms = loss_terms
        self.flops_per_token = flops_per_token
        self.peak = peak
        self.writer = writer
        self.log = log
        self.window: list[tuple[int, Sums]] = []
        self.due: list[tuple[int, Sums]] = []
        self.clock: float | None = None  # when the steps now collected began to run
        self.compilations = compilation_counter()

    def add(self, step: int, sums: Sums) -> None:
        """Collect the sums of a step just dispatched; report the window before it, if complete."""
        if self.clock is None:  # the first step compiles: it stays out of all rates
            started = time.monotonic()
            jax.block_until_ready(sums)
            self.log(f"first step took {time.monotonic() - started:.1f} s after compilation")
            self.clock = time.monotonic()
            self.untimed = step
            self.compilations.clear()
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
        steps, fetched = zip(*jax.device_get(self.due), strict=True)
        self.due = []
        for step, sums in zip(steps, fetched, strict=True):
            bad = [name for name, value in sums.items() if not np.isfinite(value).all()]
            if bad:
                raise FloatingPointError(f"step {step}: {', '.join(bad)} not finite")
        timed = [sums["tokens"][0] for step, sums in zip(steps, fetched, strict=True)
                 if step != self.untimed]
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        values = metrics.summarize(add_up(fetched), self.loss_terms)
        del values["tokens"]
        rate, norm = values.pop("learning_rate"), values.pop("grad_norm")
        values = {f"train/{name}": value for name, value in values.items()}
        values |= {"learning_rate": rate, "grad_norm": norm}
        if timed:
            values["tokens_per_second"] = float(sum(timed)) / seconds
            if self.peak:
                values["mfu"] = self.flops_per_token * values["tokens_per_second"] / self.peak
        self.writer.write(steps[-1], values)
        self.print_line(steps[-1], values, seconds / max(1, len(timed)))
        if self.compilations:
            self.log(f"warning: {len(self.compilations)} compilations since the first step")
            self.compilations.clear()

    def print_line(self, step: int, values: dict[str, float], seconds_per_step: float) -> None:
        """One line: where the run is, how it does, how fast it goes, how long it takes."""
        parts = [f"step {step:,}/{self.num_steps:,} ({step / self.num_steps:.0%})"]
        parts += shown(values, "train/")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in values:
            parts.append(f"mfu {values['mfu']:.1%}")
        parts.append(f"{duration((self.num_steps - step) * seconds_per_step)} left")
        self.log("  ".join(parts))

    def write_evaluation(self, step: int, results: dict[str, float]) -> None:
        """Write and print held-out metrics; `results` carry their `eval/` prefix."""
        self.writer.write(step, results)
        self.log("  ".join([f"held out at step {step:,}:", *shown(results, "eval/")]))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside, and what is compiled there, count for no rate."""
        started = time.monotonic()
        yield
        self.clock += time.monotonic() - started
        self.compilations.clear()


def add_up(sums: list[Sums] | tuple[Sums, ...]) -> dict[str, np.ndarray]:
    """Totals in float64."""
    return {name: sum(np.asarray(one[name], np.float64) for one in sums) for name in sums[0]}


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


def compilation_counter() -> list[float]:
    """A list that grows by the seconds of every compilation from now on."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == COMPILE_EVENT:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
