"""Reads TensorFlow checkpoints ("tensor bundles") without TensorFlow.

A checkpoint `NAME` is an index, `NAME.index`, and files of plain bytes, `NAME.data-00000-of-00001`.
The index is a sorted string table as of LevelDB: blocks of keys with shared prefixes, a block that
lists the blocks, and a footer of 48 bytes that says where that one is. Its values are protocol
buffers, `BundleHeaderProto` under the empty key and `BundleEntryProto` under the name of each
tensor; few of their fields matter here, so they are read by number.

Nothing in the files is trusted: sizes and places are checked before they are used. The checksum of
every block of the index is, too; those of the tensors are not.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tensorboardX.crc32c import crc32c

from electra_jax.errors import UserError

FOOTER_BYTES = 48
MAGIC = 0xDB4775248B80FB57
TRAILER_BYTES = 5  # behind every block: how it is compressed, and a checksum
DTYPES = {  # numbers of TensorFlow's `DataType`
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    9: np.dtype(np.int64),
    10: np.dtype(np.bool_),
    14: np.dtype(jnp.bfloat16),
    19: np.dtype(np.float16),
}


class Damaged(Exception):
    """The file is not what it should be."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor is: `file`, from byte `offset` on."""

    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    def read(self) -> np.ndarray:
        """The tensor."""
        count = math.prod(self.shape)
        flat = np.fromfile(self.file, self.dtype, count, offset=self.offset)
        return flat.reshape(self.shape)


def read_index(prefix: Path) -> dict[str, Entry]:
    """The tensors of the checkpoint whose files start with `prefix`, by name.

    Raises:
      UserError: a file is missing, cut off, damaged, or of a kind that is not read here.
    """
    path = Path(f"{prefix}.index")
    try:
        return _entries(prefix, dict(_table(path.read_bytes())))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (Damaged, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as a TensorFlow checkpoint: {error}") from error


def _entries(prefix: Path, table: dict[bytes, bytes]) -> dict[str, Entry]:
    header = dict(_fields(table.pop(b"", b"")))
    num_shards = header.get(1, 1)
    if not isinstance(num_shards, int) or not 1 <= num_shards < 100_000:
        raise Damaged(f"it has {num_shards} files of data")
    if header.get(2, 0) != 0:
        raise Damaged("its numbers are big-endian; allowed: little-endian")
    sizes: dict[Path, int] = {}
    entries = {}
    for key, value in table.items():
        name = key.decode()
        number, shape, shard, offset, size = _entry(name, value)
        if number not in DTYPES:
            raise Damaged(f"{name} has the data type {number}; allowed: {[*DTYPES]}")
        if shard >= num_shards:
            raise Damaged(f"{name} is in file {shard} of {num_shards}")
        file = Path(f"{prefix}.data-{shard:05d}-of-{num_shards:05d}")
        entry = Entry(DTYPES[number], shape, file, offset)
        if math.prod(shape) * entry.dtype.itemsize != size:
            raise Damaged(f"{name} has {size} bytes, which its shape {shape} does not")
        if file not in sizes:
            sizes[file] = file.stat().st_size if file.is_file() else -1
        if sizes[file] < 0:
            raise UserError(f"{file}: there is no such file, but {prefix}.index names it")
        if offset + size > sizes[file]:
            raise UserError(
                f"{file}: has {sizes[file]:,} bytes, but {name} ends at {offset + size:,}; the "
                "file is cut off"
            )
        entries[name] = entry
    return entries


def _entry(name: str, value: bytes) -> tuple[int, tuple[int, ...], int, int, int]:
    """Data type, shape, shard, offset and size, of a `BundleEntryProto`."""
    found, shape = {1: 0, 3: 0, 4: 0, 5: 0}, []
    for number, content in _fields(value):
        if number == 2:  # TensorShapeProto
            for field, dimension in _fields(_message(content)):
                if field == 2:
                    shape.append(dict(_fields(_message(dimension))).get(1, 0))
        elif number == 7:
            raise Damaged(f"{name} is partitioned, which is not read here")
        elif number in found:
            found[number] = content
    numbers = (*found.values(), *shape)
    if not all(isinstance(x, int) and 0 <= x < 2**62 for x in numbers) or len(shape) > 32:
        raise Damaged(f"{name} has an impossible shape or place")
    dtype, shard, offset, size = found.values()
    return dtype, tuple(shape), shard, offset, size


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a sorted string table."""
    footer = data[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != MAGIC:
        raise Damaged("it does not end as one")
    _, end = _handle(footer, 0)
    index, _ = _handle(footer, end)
    for _, handle in _block(data, *index):
        yield from _block(data, *_handle(handle, 0)[0])


def _handle(data: bytes, start: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the byte behind them."""
    offset, start = _varint(data, start)
    size, start = _varint(data, start)
    return (offset, size), start


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    end = offset + size
    if end + TRAILER_BYTES > len(data) or size < 4:
        raise Damaged("a block lies outside of it")
    compression, checksum = struct.unpack("<BI", data[end : end + TRAILER_BYTES])
    if compression:
        raise Damaged("it is compressed, which is not read here")
    rotated = (checksum - 0xA282EAD8) % 2**32
    if crc32c(data[offset : end + 1]) != (rotated >> 17 | rotated << 15) % 2**32:
        raise Damaged("a checksum is wrong")
    block = data[offset:end]
    (num_restarts,) = struct.unpack("<I", block[-4:])
    last, place, key = len(block) - 4 * (num_restarts + 1), 0, b""
    if last < 0:
        raise Damaged("a block is too short")
    while place < last:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        length, place = _varint(block, place)
        if shared > len(key) or place + own + length > last:
            raise Damaged("a key or value lies outside of its block")
        key = key[:shared] + block[place : place + own]
        place += own + length
        yield key, block[place - length : place]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a protocol buffer."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == 2:
            length, place = _varint(message, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise Damaged(f"a field has the wire type {kind}")
        if place + length > len(message):
            raise Damaged("a field lies outside of its message")
        yield number, message[place : place + length]
        place += length


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise Damaged("there is a number in the place of a message")
    return value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and the byte behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise Damaged("a number is cut off")
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value, place
    raise Damaged("a number has more than 10 bytes")
