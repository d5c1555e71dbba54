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

from electra_jax.data.formats.base import (
    Damage,
    Document,
    Format,
    Input,
    Limits,
    Part,
    Parts,
    record_parts,
    take_records_apart,
)
from electra_jax.data.workers import map_in_order

_FILES_AT_ONCE = 64


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """(top-level package, docstring) over the standard library and installed packages.

    Files are parsed, never imported. Kept are docstrings that are mostly prose, each text once.
    All fit in memory, and finding them takes longer than what follows: so they are kept.
    """
    files = [(root, file) for root in _roots() for file in _python_files(root)]
    paths = [root / file for root, file in files]
    tasks = (paths[i : i + _FILES_AT_ONCE] for i in range(0, len(paths), _FILES_AT_ONCE))
    found = chain.from_iterable(map_in_order(_files_docstrings, tasks))
    packages: dict[str, str] = {}  # An ordered set of texts, each with the package it was in first.
    for (_, file), texts in zip(files, found, strict=True):
        for text in texts:
            packages.setdefault(text, Path(file.parts[0]).stem)
    return [(package, text) for text, package in packages.items()]


@dataclass(frozen=True)
class Docstrings(Format):
    """Each docstring is a document."""

    def parts(self, input: Input, limits: Limits) -> Parts:
        """See `Format.parts`."""
        texts = [text for _, text in docstrings()]
        return record_parts(input, len(texts), lambda numbers: texts[numbers.start : numbers.stop])

    def take_apart(self, part: Part, limits: Limits) -> Iterator[Document | Damage]:
        """See `Format.take_apart`."""
        return take_records_apart(part, limits)

    def fingerprint(self, name: str, size: int) -> dict:
        """The versions of Python and of the installed packages.

        That of this package is left out, so that working on it changes nothing.
        """
        packages = {
            f"{distribution.name}=={distribution.version}"
            for distribution in importlib.metadata.distributions()
            if distribution.name.replace("-", "_") != _own_package().name
        }
        return {"name": name, "python": platform.python_version(), "packages": sorted(packages)}


def _own_package() -> Path:
    return Path(__file__).parents[2]


def _roots() -> list[Path]:
    names = ("stdlib", "purelib", "platlib")
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in names))


def _python_files(root: Path) -> list[Path]:
    """The Python files below `root`, relative to it and sorted."""
    found = []
    for directory, children, names in os.walk(root):
        # Installed packages lie inside the standard library and are a root of their own.
        excluded = ("site-packages", "dist-packages", "__pycache__")
        children[:] = [
            name
            for name in children
            if name not in excluded and Path(directory, name) != _own_package()
        ]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(file.relative_to(root) for file in found)


def _files_docstrings(paths: list[Path]) -> list[list[str]]:
    return [_file_docstrings(path) for path in paths]


def _file_docstrings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # Templates, Python 2, or files made to break parsers.
    return [text for text in _docstrings_below(tree) if _is_prose(text)]


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    # Definitions are statements, so walking statements finds them all, much faster than
    # `ast.walk`, which would also visit every expression.
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
