import io

from electra_jax.monitoring.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """The lines of a terminal after that: it knows cursor up, return, and clearing below."""
    lines, row = [""], 0
    while written:
        if written.startswith("\x1b["):
            end = next(i for i, x in enumerate(written) if x.isalpha())
            if written[end] == "A":
                row -= int(written[2:end])
            else:
                assert written[end] == "J"
                lines[row:] = [""]
            written = written[end + 1 :]
            continue
        character, written = written[0], written[1:]
        if character == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif character != "\r":
            lines[row] += character
    return lines


def test_pipe_has_lines_alone():
    pipe = io.StringIO()
    with Console(pipe) as console:
        assert not console.is_live
        console.log("one")
        console.status(["bar"])
        console.log("two")
    assert pipe.getvalue() == "one\ntwo\n"


def test_status_stays_below_the_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "10")
    terminal = Terminal()
    with Console(terminal) as console:
        console.log("one")
        console.status(["bar 1", "longer than the screen"])
        assert screen(terminal.getvalue()) == ["one", "bar 1", "longer th", ""]
        console.log("two")
        assert screen(terminal.getvalue()) == ["one", "two", "bar 1", "longer th", ""]
        console.status(["bar 2"])
        assert screen(terminal.getvalue()) == ["one", "two", "bar 2", ""]
    with Console(terminal) as console:  # what comes after does not touch it
        console.log("three")
    assert screen(terminal.getvalue()) == ["one", "two", "bar 2", "three", ""]


def test_dumb_terminals_are_no_terminals(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not Console(Terminal()).is_live
