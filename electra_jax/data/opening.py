"""Files and addresses, compressed or not, opened and read.

Addresses (`gs://`, `s3://`, ...) go through fsspec. Local files do not: fsspec makes their paths
absolute, but a store records the names that the user gave. Nor does decompression: fsspec's reader
of zstandard ends in silence where an archive is cut off.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

from electra_jax.errors import UserError
from electra_jax.files import parse_json

BOM = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what reading a file may raise

Stream = Any  # something to read bytes from; not every library derives its own from `io`


def file_system(address: str) -> tuple[Any, str]:
    """The fsspec file system that serves an address, and the path there.

    Raises:
      UserError: a package is missing, or there is no such protocol.
    """
    import fsspec  # seldom needed

    try:
        return fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(f"{address}: cannot be opened: {error}") from error


def open_file(name: str) -> Stream:
    """Opens a file or an address for reading its bytes as they are stored."""
    if "://" in name:
        system, path = file_system(name)
        return system.open(path, "rb")
    return open(name, "rb")


def _open_zstd(file: Stream) -> Stream:
    import pyarrow  # slow to import, and seldom needed

    return pyarrow.CompressedInputStream(file, "zstd")


COMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zstd}


@contextmanager
def opened(name: str) -> Iterator[tuple[Stream, Stream]]:
    """Yields the decompressed content of a file or address, and the file itself."""
    decompressed = COMPRESSED.get(PurePosixPath(name.lower()).suffix, nullcontext)
    with open_file(name) as file, decompressed(file) as stream:
        yield stream, file


def suffix_of(name: str) -> str:
    """The suffix of a name in lower case, such as `.txt`, without that of a compression."""
    path = PurePosixPath(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def reason(error: Exception) -> str:
    """Why a file cannot be read."""
    return getattr(error, "strerror", None) or str(error)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file or address, decompressed, without a byte order mark.

    Raises:
      UserError: it cannot be read, or is not UTF-8; names the line.
    """
    try:
        with opened(str(path)) as (stream, _):
            content = stream.read().removeprefix(BOM)
        return content.decode("utf-8")
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error
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
    """The value in a JSON file, which may be compressed.

    Raises:
      UserError: it cannot be read, or is not JSON.
    """
    return parse_json(read_text(path), str(path))
