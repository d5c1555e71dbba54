"""Files to read: text and JSON, compressed or not, and TensorFlow data sets."""

import json
import lzma
import zlib
from pathlib import Path
from typing import Any

from electra_jax.data import sources
from electra_jax.data.reader import opened
from electra_jax.errors import UserError

_BOM = b"\xef\xbb\xbf"


def read_bytes(path: str | Path) -> bytes:
    """The content of a file or address, decompressed (.gz, .xz, .bz2, .zst).

    Raises:
      UserError: it cannot be read.
    """
    try:
        with opened(str(path)) as (stream, _):
            return stream.read()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {reason}") from error


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte order mark. Line ends are as in the file.

    Raises:
      UserError: it cannot be read, or is not UTF-8; names the line.
    """
    content = read_bytes(path).removeprefix(_BOM)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8: {error.reason}") from error


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, without their ends. Only newlines end a line.

    Raises:
      UserError: as `read_text`.
    """
    text = read_text(path).removesuffix("\n")
    return [line.removesuffix("\r") for line in text.split("\n")] if text else []


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
      UserError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error


def read_data_set(name: str, split: str, *fields: str) -> list[dict[str, Any]]:
    """Some fields of all records of a TensorFlow data set, read without TensorFlow.

    Raises:
      UserError: there is no such data set, split or field, or it cannot be read.
    """
    try:
        found = sources.data_set(name, split, *fields)
    except UserError as error:
        raise UserError(str(error).removeprefix("data.source: ")) from error
    records = found.__getitems__(range(len(found)))
    return [{field: _text(record[field]) for field in fields} for record in records]


def _text(value: Any) -> Any:
    return value.decode("utf-8") if isinstance(value, bytes) else value
