"""Small files: written as a whole or not at all, whatever happens; read with one clear error.

And files that are locks: whoever holds one keeps others out of what lies beside it.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from electra_jax.errors import UserError


def write_text(path: Path, text: str) -> Path:
    """Writes a UTF-8 file into a directory that is made if missing; returns `path`."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Writes a file into a directory that is made if missing; an OSError names `path`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        error.filename = str(path)
        raise
    return path


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file for people to read."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError where it is missing or holds something else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(content, str(path))


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object that a text holds; else UserError, which begins with `where`."""
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object but {type(value).__name__}")
    return value


def parse_json(text: str | bytes, where: str) -> Any:
    """The JSON value that a text holds; else UserError, which begins with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error


@contextlib.contextmanager
def locked(path: Path, when_busy: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`, whose directory is made. The end of the process ends its hold.

    The holder may remove the file when all is done; whoever waits for it makes it anew. Where it is
    taken, `when_busy` is told by whom, such as "process 7 on HOST", before the lock is waited for.
    """

    def sign(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, on_acquired=sign)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        with contextlib.suppress(FileNotFoundError):
            when_busy(path.read_text() or "another process")
        lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
        lock.release()
