"""Lines in pipes and log files; on terminals, a status that stays below them."""

import io
import re

import jax
import pytest

from electra_jax.monitoring.display import Display, duration, shown
from electra_jax.objectives.electra import ReplacedTokenDetection


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """The lines of a terminal after that: it knows cursor up, return, and erasing a line."""
    lines, row = [""], 0
    for command, character in re.findall(r"\x1b\[([\d?]*[A-Za-z])|(.)", written, re.DOTALL):
        if command.endswith("A"):
            row -= int(command[:-1])
        elif command == "2K":
            lines[row] = ""
        elif character == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif character and character != "\r":
            lines[row] += character
        else:
            assert character == "\r" or command in ("?25l", "?25h"), command
    return lines


@pytest.fixture(autouse=True)
def terminal(monkeypatch) -> None:
    """An environment that knows terminals of ten columns, and asks for colors in vain."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(name, "1")


def test_pipe_has_lines_alone_as_they_are():
    pipe, line = io.StringIO(), "  [b]longer[/b] than ten columns :smile: https://a.b 12 'c' "
    with Display(pipe) as display:
        assert not display.is_live
        display.log(line)
        display.status(["bar"])
        display.log("two")
    assert pipe.getvalue() == f"{line}\ntwo\n"


def test_status_stays_below_the_lines():
    terminal = Terminal()
    with Display(terminal) as display:
        display.log("one")
        display.status(["bar 1", "longer than the screen"])
        assert screen(terminal.getvalue()) == ["one", "bar 1", "longer tha"]
        display.log("two")
        assert screen(terminal.getvalue()) == ["one", "two", "bar 1", "longer tha"]
        display.status(["bar 2"])
        assert screen(terminal.getvalue())[:3] == ["one", "two", "bar 2"]
        # Whoever is killed here leaves a terminal with a cursor.
        assert terminal.getvalue().rindex("?25h") > terminal.getvalue().rindex("?25l")
    with Display(terminal) as display:  # what comes after does not touch it
        display.log("three")
    assert [*filter(None, screen(terminal.getvalue()))] == ["one", "two", "bar 2", "three"]
    assert not re.search(r"\x1b\[[\d;]*m", terminal.getvalue())  # no colors


def test_wide_characters_take_two_columns():
    terminal = Terminal()
    with Display(terminal) as display:
        display.status(["\u65e5\u672c\u8a9e\u65e5\u672c\u8a9e"])
    assert screen(terminal.getvalue())[0].rstrip() == "\u65e5\u672c\u8a9e\u65e5\u672c"


@pytest.mark.parametrize("kind", ["dumb", "unknown", None])
def test_dumb_terminals_are_no_terminals(kind, monkeypatch):
    monkeypatch.setenv("TERM", kind) if kind else monkeypatch.delenv("TERM")
    terminal = Terminal()
    with Display(terminal) as display:
        display.log("one")
        display.status(["bar"])
    assert terminal.getvalue() == "one\n"


def test_one_of_several_processes_prints(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for stream in (io.StringIO(), Terminal()):
        with Display(stream) as display:
            display.log("one")
            display.status(["bar"])
        assert stream.getvalue() == ""


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_pipe_that_nobody_reads_is_left_to_the_command():
    with pytest.raises(BrokenPipeError), Display(Closed()) as display:
        display.log("one")


def test_metrics_with_a_name_for_the_console_are_shown_in_the_order_of_their_list():
    values = {"eval/rtd_auc": 0.91239, "eval/loss": 31.0, "eval/rtd_accuracy": 1.0, "train/loss": 2}
    found = shown(ReplacedTokenDetection.metrics, values, "eval/")
    assert found == ["loss 31", "auc 0.9124"]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0 s"),
        (0.2, "1 s"),
        (59.5, "1 m 00 s"),
        (250.0, "4 m 10 s"),
        (3 * 3600.0 + 5 * 60 + 59, "3 h 05 m"),
        (1234 * 3600.0, "1,234 h 00 m"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
