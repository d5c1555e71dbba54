import inspect
import warnings
from pathlib import Path

import pytest
import stdlib_text

from electra_jax.data.formats import docstrings as module
from electra_jax.data.formats.docstrings import Docstrings, docstrings
from electra_jax.data.reader import groups, take_apart
from electra_jax.data.sources import parse

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


@pytest.fixture
def uncached():
    docstrings.cache_clear()
    yield
    docstrings.cache_clear()


def test_docstrings_are_parsed_filtered_and_unique(tmp_path, monkeypatch, uncached):
    root = tmp_path / "site-packages"
    package = root / "package"
    package.mkdir(parents=True)
    (package / "b.py").write_text(MODULE)
    (package / "a.py").write_text('def bad syntax: """This is a template and not a module."""')
    (package / "nul.py").write_bytes(b'"""This file has a zero byte and cannot be parsed."""\0')
    escape = r'"""Invalid escapes such as \d draw a warning from Python."""'
    (package / "escape.py").write_text(escape)
    (root / "single.py").write_text('"""A module that is not part of any package at all."""')
    # As installed packages lie below the standard library, which is walked, too.
    paths = {"stdlib": tmp_path, "purelib": root, "platlib": root}
    monkeypatch.setattr(module.sysconfig, "get_path", paths.get)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = docstrings()
    assert found == [
        "This module exists so that its docstrings can be read.",
        "A thing with a docstring that is long enough to keep.\n\n"
        "    Further text, indented.\nThe end.",
        "An inner function may be documented at some length as well.",
        "Even this definition, inside a case block, carries a docstring.",
        r"Invalid escapes such as \d draw a warning from Python.",
        "A module that is not part of any package at all.",
    ]
    [group] = groups(parse("docstrings"))
    lines = ["A thing with a docstring that is long enough to keep.", "Further text, indented."]
    assert take_apart(group, "raise").documents[1] == (0, [*lines, "The end."])


def test_docstrings_leave_out_this_project(monkeypatch, uncached):
    repository = Path(module.__file__).parents[3]
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: repository)
    texts = docstrings()
    assert stdlib_text.__doc__ in texts  # of the tests
    assert inspect.cleandoc(module.__doc__) not in texts


def test_fingerprint_names_versions_of_others_only():
    packages = Docstrings().fingerprint("docstrings", 0)["packages"]
    assert any(package.startswith("numpy==") for package in packages)
    assert not any(package.startswith("electra") for package in packages)
