"""What a run says on standard output: lines, and on a terminal a status that stays below them."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, TextIO

import jax
from rich.console import Console
from rich.live import Live
from rich.text import Text

from electra_jax.objectives.metrics import Metric


class PipeConsole(Console):
    """Leaves it to `cli.run` what becomes of a pipe that nobody reads any more."""

    def on_broken_pipe(self) -> NoReturn:
        """Raises the BrokenPipeError that is being handled."""
        raise


class Display:
    """Lines in a log file or a pipe, without control characters; on a terminal, a status, too.

    Of several processes, the first one alone prints. Leaving the `with` block leaves the last
    status where it is, and the cursor below it.
    """

    def __init__(self, stream: TextIO | None = None):
        stream = stream or sys.stdout
        is_silent = jax.process_index() != 0
        is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self.is_live = is_terminal and not is_silent
        self._console = PipeConsole(
            file=stream, quiet=is_silent, force_terminal=is_terminal, force_interactive=is_terminal
        )
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def log(self, line: str) -> None:
        """Print it, at once, so that a log file is never behind."""
        self._console.print(Text(line), soft_wrap=True)

    def status(self, lines: Sequence[str]) -> None:
        """Show these in place of the status there was; nothing where there is no terminal."""
        if self.is_live:
            if not self._live.is_started:
                self._live.start()
                self._console.show_cursor()  # a process that is killed could not do so
            text = Text("\n".join(lines), no_wrap=True, overflow="crop")
            self._live.update(text, refresh=True)

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *exception) -> None:
        self._live.stop()


def log_line(line: str) -> None:
    """Print it; of several processes, the first one alone does."""
    Display().log(line)


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
