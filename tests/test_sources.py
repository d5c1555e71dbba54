import gzip
import lzma
import warnings
from pathlib import Path

import pytest

from electra_jax.data import sources
from electra_jax.errors import UserError

TEXT = "It rains.\nCome in.\n\n\n  Yes. \n"
DOCUMENTS = [["It rains.", "Come in."], ["Yes."]]


def read(path: Path) -> list[list[str]]:
    return list(sources.documents(str(path)))


@pytest.mark.parametrize(
    "content",
    [
        TEXT,
        TEXT.rstrip("\n"),
        TEXT.replace("\n", "\r\n"),
        "\ufeff" + TEXT,
        "\n\n" + TEXT + "\n \t\n",
        TEXT.replace("\n\n", "\n\u3000\n"),
    ],
    ids=["plain", "no last newline", "CRLF", "BOM", "blank at both ends", "wide blank line"],
)
def test_blank_lines_separate_documents(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content.encode())
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".txt", bytes), (".txt.gz", gzip.compress), (".xz", lzma.compress)]
)
def test_compression_follows_the_suffix(tmp_path, suffix, compress):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compress(TEXT.encode()))
    assert read(path) == DOCUMENTS


def test_only_newlines_end_a_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\x0btwo\x85three\u2028four\n", encoding="utf-8")
    assert read(path) == [["one\x0btwo\x85three\u2028four"]]


def test_end_of_file_ends_a_document_and_files_come_sorted_once(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "c.txt").write_text("c")
    source = f"{tmp_path}/c.txt, {tmp_path}/*.txt,"
    assert list(sources.documents(source)) == [["c"], ["a"], ["b"]]


@pytest.mark.parametrize("source", ["", "nowhere/*.txt", "pyproject.tom"])
def test_no_match_names_the_field(source):
    with pytest.raises(UserError, match=r"^data\.source: no file matches"):
        list(sources.documents(source))


def test_directory_is_refused_with_advice(tmp_path):
    with pytest.raises(UserError, match=rf"^data\.source: {tmp_path} is a directory.*\*\.txt"):
        list(sources.documents(str(tmp_path)))


def test_invalid_utf8_is_located(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"fine\n\nna\xefve\n")
    with pytest.raises(
        UserError, match=rf"^{path}: line 3 is not UTF-8: .* at byte 2 of the line$"
    ):
        read(path)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"text" + data])
def test_damaged_archive_is_named(tmp_path, suffix, compress, damage):
    path = tmp_path / f"text{suffix}"
    lines = "\n".join(str(number) for number in range(10_000))
    path.write_bytes(damage(compress(lines.encode())))
    with pytest.raises(UserError, match=rf"^{path}: cannot be read beyond line \d+: ."):
        read(path)


def test_fingerprint_of_files_sees_any_change_of_their_ends(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    source = str(tmp_path / "*.txt")
    before = sources.fingerprint(source)
    assert sources.changed_file(source, before) is None

    path.touch()
    assert sources.fingerprint(source) == before
    path.write_text(TEXT.replace("Yes", "Not"))  # the same size
    assert sources.changed_file(source, before) == str(path)
    path.unlink()
    assert sources.changed_file(source, before) is None
    new = tmp_path / "more.txt"
    new.write_text(TEXT)
    assert sources.changed_file(source, before) == str(new)


def test_fingerprint_of_docstrings_names_versions_of_others_only():
    fingerprint = sources.fingerprint(sources.DOCSTRINGS)
    assert any(package.startswith("numpy==") for package in fingerprint["packages"])
    assert not any(package.startswith("electra") for package in fingerprint["packages"])


MODULE = '''"""This module exists so that its docstrings can be read."""
raise SystemExit("never executed")

class Thing:
    """A thing with a docstring that is long enough to keep.

        Further text, indented.
    The end.
    """

    async def method(self):
        """Short."""
        if self:
            def inner():
                "An inner function may be documented at some length as well."
        x = """Not a docstring, although it is a string of some length in a body."""

    match x:
        case 1:
            def cased(): "Even this definition, inside a case block, carries a docstring."

def table():
    """1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 is a table"""

def again():
    """This module exists so that its docstrings can be read."""

def surrogate():
    "This docstring ends in half of a character that is no text: \\ud800"
'''


def test_docstrings_are_parsed_filtered_and_unique(tmp_path, monkeypatch):
    root = tmp_path / "site-packages"
    package = root / "package"
    package.mkdir(parents=True)
    (package / "b.py").write_text(MODULE)
    (package / "a.py").write_text('def bad syntax: """This is a template and not a module."""')
    (package / "nul.py").write_bytes(b'"""This file has a zero byte and cannot be parsed."""\0')
    (package / "escape.py").write_text(
        r'"""Invalid escapes such as \d draw a warning from Python."""'
    )
    (root / "single.py").write_text('"""A module that is not part of any package at all."""')
    # As installed packages lie below the standard library, which is walked, too.
    monkeypatch.setattr(sources, "_roots", lambda: [tmp_path, root])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(sources.docstrings())
    assert found == [
        ("package", "This module exists so that its docstrings can be read."),
        (
            "package",
            "A thing with a docstring that is long enough to keep.\n\n"
            "    Further text, indented.\nThe end.",
        ),
        ("package", "An inner function may be documented at some length as well."),
        ("package", "Even this definition, inside a case block, carries a docstring."),
        ("package", r"Invalid escapes such as \d draw a warning from Python."),
        ("single", "A module that is not part of any package at all."),
    ]
    assert list(sources.documents("docstrings"))[1] == [
        "A thing with a docstring that is long enough to keep.",
        "Further text, indented.",
        "The end.",
    ]


def test_docstrings_leave_out_this_project():
    assert sources._python_files(Path(sources.__file__).parents[2] / "electra_jax" / "data")
    below_repository = sources._python_files(Path(sources.__file__).parents[2])
    assert not any(path.parts[0] == "electra_jax" for path in below_repository)
