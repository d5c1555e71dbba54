"""The docstrings of the standard library and of every installed package.

Real English prose that is on every machine, so a first run needs no corpus and no network.
"""

import ast
import functools
import importlib.metadata
import inspect
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from electra_jax.data.formats.base import BATCH, Records
from electra_jax.data.workers import map_in_order

_FILES_AT_ONCE = 64
_OWN_PACKAGE = Path(__file__).parents[2]


@functools.cache
def docstrings() -> list[str]:
    """The docstrings of the standard library and of installed packages that are mostly prose.

    Files are parsed, never imported, and each text comes once. All fit in memory, and finding them
    takes longer than what follows: so they are kept.
    """
    roots = dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    files = [file for root in roots for file in _python_files(Path(root))]
    tasks = (files[i : i + _FILES_AT_ONCE] for i in range(0, len(files), _FILES_AT_ONCE))
    return [*dict.fromkeys(chain.from_iterable(map_in_order(_prose_of_files, tasks)))]


@dataclass(frozen=True)
class Docstrings(Records):
    """Each docstring is a document."""

    def batches(self, name: str) -> Iterator[tuple[list[str], float]]:
        """See `Records.batches`."""
        texts = docstrings()
        for begin in range(0, len(texts), BATCH):
            batch = texts[begin : begin + BATCH]
            yield batch, (begin + len(batch)) / len(texts)

    def fingerprint(self, name: str, size: int) -> dict:
        """The versions of Python and of all packages but this one, whose changes do not count."""
        packages = {
            f"{distribution.name}=={distribution.version}"
            for distribution in importlib.metadata.distributions()
            if distribution.name.replace("-", "_") != _OWN_PACKAGE.name
        }
        return {"name": name, "python": platform.python_version(), "packages": sorted(packages)}


def _python_files(root: Path) -> list[Path]:
    """The Python files below `root`, sorted."""
    # Installed packages lie inside the standard library and are a root of their own. What is left
    # out is not walked through either, which would take four times as long.
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    files = []
    for directory, children, names in os.walk(root):
        kept = (name for name in children if name not in excluded)
        children[:] = [name for name in kept if Path(directory, name) != _OWN_PACKAGE]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _prose_of_files(paths: list[Path]) -> list[str]:
    return [text for path in paths for text in _docstrings_of_file(path) if _is_prose(text)]


def _docstrings_of_file(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            return [*_docstrings_below(ast.parse(path.read_bytes()))]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # Templates, Python 2, or files made to break parsers.


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    # `ast.walk` would also visit every expression, which takes much longer.
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield inspect.cleandoc(text)
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from _docstrings_below(child)


def _is_prose(text: str) -> bool:
    words = text.split()
    characters = "".join(words)
    letters = sum(map(str.isalpha, characters))
    # Escapes can hold lone surrogates and control characters, which are no text at all.
    return len(words) >= 8 and letters >= 0.75 * len(characters) and characters.isprintable()
