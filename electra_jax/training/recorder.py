"""What becomes known of a run while it trains: the loop tells one recorder what happened."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from electra_jax.modeling.params import Params
from electra_jax.monitoring.display import Display, duration, shown
from electra_jax.monitoring.health import Health
from electra_jax.monitoring.histograms import Histogram, histograms
from electra_jax.monitoring.profiling import profiled
from electra_jax.monitoring.rates import HostBatch, Rates, compilations
from electra_jax.monitoring.tracking import tracked
from electra_jax.monitoring.window import Window, refuse_not_finite
from electra_jax.monitoring.writer import MetricWriter
from electra_jax.objectives.base import Sums
from electra_jax.reporting.gallery import Token, as_markdown
from electra_jax.reporting.page import write_report
from electra_jax.reporting.run import write_samples
from electra_jax.run.workdir import write_run_files
from electra_jax.training.checkpoint import Restored
from electra_jax.training.job import Facts, Job

REDRAWN = 1.0  # second after which the status on a terminal is drawn anew
BAR = 30  # characters


class RunFiles(MetricWriter):
    """Writes what a run leaves behind beside its checkpoints."""

    def begin(self, config: ConfigDict, job: Job, facts: Facts) -> None:
        """Write what the run is."""
        write_run_files(config, self.workdir, job.data.tokenizer, facts)

    def evaluated(
        self, step: int, job: Job, texts: list[list[Token]], spread: dict[str, Histogram]
    ) -> None:
        """Write what an evaluation has shown beside its metrics, and report the run so far."""
        if texts:
            write_samples(self.workdir, step, texts)
            self.write_text(step, "held-out texts", as_markdown(texts))
        self.write_histograms(step, spread)
        write_report(self.workdir, lambda config: job.evaluator.metrics)


class Silence:
    """Stands for `RunFiles` in all processes but the first, and does nothing."""

    def __getattr__(self, name: str):
        return lambda *arguments: None


class Recorder:
    """Collects what happens in a run, and tells it to people and files.

    All processes have one, and must tell it the same. Files are open inside the `with` block.
    Telling may raise FloatingPointError, which names the step: an evaluation is not finite, or the
    loss or gradient of more steps in a row than may be skipped.
    """

    def __init__(
        self, config: ConfigDict, workdir: Path, job: Job, display: Display, start: Restored
    ):
        self.config, self.workdir, self.job, self.start = config, workdir, job, start.step
        self.display, self.log = display, display.log
        skipped, saved = config.max_skipped_updates, start.progress.get("progress")
        self.window = Window(job.objective.loss_terms, skipped, self.log, saved)
        self.rates = Rates(job.peak_tokens_per_second)
        self.health = Health(job.objective, job.learned_from)
        self.close_window, self.paused = self.window.close, self.rates.paused
        self.status = {"window": "", "evaluation": ""}  # the newest of each, on a terminal
        self.drawn = -math.inf
        self.files: RunFiles | Silence = Silence()
        self.open = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        if jax.process_index() == 0:
            track = self.open.enter_context(tracked(self.config, self.workdir))
            self.files = self.open.enter_context(RunFiles(self.workdir, self.start, track))
        self.rates.compilations = self.open.enter_context(compilations())
        return self

    def __exit__(self, *exception) -> None:
        self.open.__exit__(*exception)

    def begin(self, facts: Facts, changed: list[str]) -> None:
        """The run begins, or goes on with fields of its configuration that have changed."""
        self.files.begin(self.config, self.job, facts)
        for section, values in facts.items():
            self.log(f"{section}: " + ", ".join(f"{name} {x}" for name, x in values.items()))
        begins = "resuming" if self.start else "starting"
        self.log(f"{self.workdir}: {begins} at step {self.start:,}")
        if changed:
            self.log(
                f"going on with another configuration: {', '.join(changed)}; the order of the data "
                f"is that of the new one, from its step {self.start:,} on"
            )

    def watched(self, batches: Iterator[HostBatch]) -> Iterator[HostBatch]:
        """`batches`; the waiting for them is measured, and some of their steps are profiled."""
        timed, steps = self.rates.timed(batches), self.config.profile_steps
        directory = self.workdir / "tensorboard"
        return profiled(timed, self.start, steps, directory, lambda: self.rates.newest)

    def add(self, step: int, sums: Sums, shape: tuple[int, ...]) -> None:
        """A step has been dispatched, for a batch of this shape. Reports the window before it."""
        is_new = shape not in self.rates.shapes
        if is_new and (line := self.rates.leave_out(sums, shape)):
            self.log(line)
        self.report()
        self.window.add(step, sums)
        self.rates.newest = sums
        self.rates.num_steps += not is_new
        if self.display.is_live and time.monotonic() - self.drawn > REDRAWN:
            self.draw(step)

    def report(self) -> None:
        """Fetch, check, write and print the window that is complete, if there is one."""
        if not (taken := self.window.take()):
            return
        (step, values), is_first = taken, self.rates.seconds_per_step is None
        values |= self.rates.of_window(values.pop("tokens", 0.0))
        if is_first and (seconds := self.rates.seconds_per_step) is not None:
            total = self.job.num_steps
            whole = duration(total * seconds)
            self.log(f"all {total:,} steps take {whole} at the rate of the first ones")
        self.rates.restart()
        self.files.write(step, values)
        self.print_line(step, values)
        self.warn(step, self.health.warnings(step, values))
        self.warn(step, self.rates.problems(values))

    def catch_up(self) -> None:
        """Report, and fetch and check the steps of the window that is open, too."""
        self.report()
        self.window.catch_up()

    def evaluated(self, step: int, results: dict[str, float], params: Params) -> None:
        """The networks have been evaluated."""
        refuse_not_finite(step, results)
        self.files.write(step, results)
        values = shown(self.job.evaluator.metrics, results, "eval/")
        self.status["evaluation"] = "  ".join([f"held out at step {step:,}:", *values])
        self.log(self.status["evaluation"])
        self.warn(step, self.health.warnings(step, results))
        spread = histograms(params) if self.config.histograms else {}
        self.files.evaluated(step, self.job, self.job.evaluator.show(params), spread)

    def warn(self, step: int, sentences: Iterable[str]) -> None:
        """Say what looks wrong."""
        for sentence in sentences:
            self.log(f"warning: step {step:,}: {sentence}")

    def print_line(self, step: int, values: dict[str, float]) -> None:
        """Where the run is, how it does, how fast it goes, how long it takes."""
        parts = shown(self.job.evaluator.metrics, values, "train/")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in values:
            parts.append(f"mfu {values['mfu']:.1%}")
        if self.display.is_live:
            self.status["window"] = "  ".join([f"to step {step:,}:", *parts])
            self.draw(step)
        else:
            place, *ahead = self.course(step)
            self.log("  ".join([place, *parts, *ahead]))

    def draw(self, step: int) -> None:
        """The status on a terminal."""
        done = BAR * step // self.job.num_steps
        bar = f"[{'#' * done}{'.' * (BAR - done)}]"
        first = "  ".join([bar, *self.course(step)])
        self.display.status([first, *filter(None, self.status.values())])
        self.drawn = time.monotonic()

    def course(self, step: int) -> Iterator[str]:
        """Where the run is, the time that is left where that is known, and the next checkpoint."""
        total, every = self.job.num_steps, self.config.checkpoint.every_steps
        yield f"step {step:,}/{total:,} ({step / total:.0%})"
        if (seconds := self.rates.seconds_per_step) is not None:
            yield f"{duration((total - step) * seconds)} left"
        if step < total:
            yield f"next checkpoint at {min((step // every + 1) * every, total):,}"
