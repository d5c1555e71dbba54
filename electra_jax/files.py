"""Small files: written as a whole or not at all, whatever happens; read with one clear error."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from electra_jax.errors import UserError


def write_text(path: Path, text: str) -> Path:
    """Writes a UTF-8 file into a directory that is made if missing; returns `path`."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Writes a file into a directory that is made if missing; returns `path`.

    Raises:
      OSError: it cannot be written; names it.
    """
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      UserError: the file is missing or holds something else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(content, str(path))


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object that a text holds.

    Raises:
      UserError: it holds something else; begins with `where`.
    """
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object but {type(value).__name__}")
    return value


def parse_json(text: str | bytes, where: str) -> Any:
    """The JSON value that a text holds.

    Raises:
      UserError: it is not JSON; begins with `where`.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
