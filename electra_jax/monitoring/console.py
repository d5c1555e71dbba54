"""What a run says on standard output: lines, and on a terminal a status that stays below them."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

import jax

CLEAR = "\x1b[J"  # from the cursor to the end of the screen


class Console:
    """Lines in a log file or a pipe, without control characters; on a terminal, a status, too.

    Leaving the `with` block leaves the last status where it is, and the cursor below it.

    Args:
      stream: default: standard output. Of several processes, the first one alone prints.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stdout
        self.is_silent = jax.process_index() != 0
        self.is_live = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.shown: Sequence[str] = ()

    def log(self, line: str) -> None:
        """Print it, at once, so that a log file is never behind."""
        if not self.is_silent:
            self._replace(f"{line}\n", self.shown)

    def status(self, lines: Sequence[str]) -> None:
        """Show these in place of the status there was; nothing where there is no terminal."""
        if self.is_live and not self.is_silent:
            width = shutil.get_terminal_size().columns - 1  # a full line would begin the next one
            self._replace("", [line[:width] for line in lines])

    def _replace(self, text: str, status: Sequence[str]) -> None:
        back = f"\x1b[{len(self.shown)}A\r{CLEAR}" if self.shown else ""
        self.stream.write(back + text + "".join(f"{line}\n" for line in status))
        self.stream.flush()
        self.shown = status

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *exception) -> None:
        self.shown = ()
