"""Where text comes from: files, or the docstrings of the installed Python packages.

A source is a string, `config.data.source`:

* `"docstrings"`: the docstrings of the standard library and of every installed package. Real
  English prose that is on every machine, so a first run needs no corpus and no network.
* anything else: paths or globs of UTF-8 text files separated by commas, plain or compressed
  (`.gz`, `.xz`). A blank line ends a document; so does the end of a file.
"""

import ast
import glob
import gzip
import hashlib
import importlib.metadata
import inspect
import lzma
import multiprocessing
import os
import platform
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from electra_jax.errors import UserError

DOCSTRINGS = "docstrings"

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_FINGERPRINT_BYTES = 2**20
_MAX_PROCESSES = 16  # Each has to start up; more would not pay.


def documents(source: str) -> Iterator[list[str]]:
    """Yields the documents of a source, each as its stripped, non-empty lines of text.

    The order depends on the source only. Documents without text are left out.

    Raises:
      UserError: a file is missing, unreadable, damaged or not UTF-8.
    """
    if source == DOCSTRINGS:
        for _, text in docstrings():
            yield [line.strip() for line in text.split("\n") if line.strip()]
    else:
        for path in text_files(source):
            yield from _file_documents(path)


def fingerprint(source: str) -> dict:
    """Identifies the input behind a source, as JSON, without reading all of it.

    A text file is known by its size and the hash of its first and last MiB: unlike a modification
    time, these survive copying to another machine. Docstrings are known by the versions of
    Python and of the installed packages (save this one, so that working on it changes nothing).
    """
    if source == DOCSTRINGS:
        packages = {
            f"{distribution.name}=={distribution.version}"
            for distribution in importlib.metadata.distributions()
            if distribution.name.replace("-", "_") != _own_package().name
        }
        return {"python": platform.python_version(), "packages": sorted(packages)}
    return {"files": [_file_fingerprint(path) for path in text_files(source)]}


def changed_file(source: str, recorded: dict) -> str | None:
    """The first file of a text source that differs from, or is new to, a recorded fingerprint.

    Files that are gone do not count: a corpus may be deleted once it has been tokenised.
    """
    known = {entry["file"]: entry for entry in recorded["files"]}
    for pattern in _patterns(source):
        for path in sorted(glob.glob(pattern, recursive=True)):
            if _file_fingerprint(path) != known.get(path):
                return path
    return None


# Text files


def text_files(source: str) -> list[str]:
    """The files of a text source: patterns in the order given, the matches of each one sorted.

    Raises:
      UserError: a pattern matches nothing, or a directory.
    """
    paths: dict[str, None] = {}  # An ordered set: patterns may overlap.
    for pattern in _patterns(source):
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(
                f"data.source: no file matches {pattern!r}; allowed are {DOCSTRINGS!r}, or paths "
                "and globs of text files separated by commas"
            )
        paths.update(dict.fromkeys(matches))
    for path in paths:
        if os.path.isdir(path):
            raise UserError(
                f"data.source: {path} is a directory; name its files, such as "
                f"{os.path.join(path, '*.txt')}"
            )
    return list(paths)


def _patterns(source: str) -> list[str]:
    patterns = (pattern.strip() for pattern in source.split(","))
    return [os.path.expanduser(pattern) for pattern in patterns if pattern] or [""]


def _file_documents(path: str) -> Iterator[list[str]]:
    document = []
    for line in _file_lines(path):
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    if document:
        yield document


def _file_lines(path: str) -> Iterator[str]:
    opener = _OPENERS.get(Path(path).suffix, open)
    number = 0
    try:
        # Lines are decoded one by one, so that an error can be located.
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number} is not UTF-8: {error.reason} at byte {error.start} of the line"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read beyond line {number}: {error}") from error


def _file_fingerprint(path: str) -> dict:
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            ends = hashlib.sha256(file.read(_FINGERPRINT_BYTES))
            file.seek(max(_FINGERPRINT_BYTES, size - _FINGERPRINT_BYTES))
            ends.update(file.read())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return {"file": path, "bytes": size, "sha256_of_ends": ends.hexdigest()}


# Docstrings


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields (top-level package, docstring) over the standard library and installed packages.

    Files are parsed, never imported. Kept are docstrings that are mostly prose, each text once.
    """
    files = [(root, file) for root in _roots() for file in _python_files(root)]
    seen = set()
    # Spawned, because forking a process that holds JAX's threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, _MAX_PROCESSES), context) as pool:
        found = pool.map(_file_docstrings, (root / file for root, file in files), chunksize=64)
        for (_, file), texts in zip(files, found, strict=True):
            for text in texts:
                if text not in seen:
                    seen.add(text)
                    yield Path(file.parts[0]).stem, text


def _own_package() -> Path:
    return Path(__file__).parent.parent


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
