"""From inputs to documents: streams cut into parts, parts decoded and taken apart.

Reading has two halves. The first runs in one process: it opens inputs, decompresses, and cuts what
comes into parts of about a MiB, without looking at it more closely than needed to cut between two
documents. The second runs in many (electra_jax.data.workers): it decodes parts, finds their
documents and lines, and whatever follows. So one large file keeps as many cores busy as many
small ones, memory does not grow with the corpus, and nothing depends on the number of processes.

A document of more than 4 MiB is divided between two lines, or between two words where a line is
that long. Nothing is left out: each share goes on as a document.
"""

import bz2
import gzip
import json
import lzma
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from electra_jax.data.docstrings import docstrings
from electra_jax.data.sources import Input, Source, Stream, data_set, inputs, open_file
from electra_jax.errors import UserError

PART_BYTES = 2**20
DOCUMENT_BYTES = 2**22
RECORD_BYTES = 2**28  # A longer line is hardly a record of JSON lines.

_LINE_END = rb"(?:\r\n|\r(?!\n)|\n)"
_BLANK_LINE = re.compile(_LINE_END + rb"[ \t\f\v]*" + _LINE_END)
_BYTE_LINES = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 2**16
_RECORDS = 256  # in a part
_LOG_SECONDS = 5

Document = list[str]  # its lines, stripped, none of them empty


@dataclass(frozen=True)
class Part:
    """Some whole documents of an input, not taken apart yet.

    Attributes:
      input: what they are from.
      content: encoded text (formats `text` and `jsonl`), or a list of the texts of records.
      first: the number of the first line or record, counted from 1.
      divided: whether the last document goes on in the next part.
    """

    input: Input
    content: bytes | list[Any]
    first: int
    divided: bool = False


@dataclass(frozen=True)
class Damage:
    """Something that cannot be used: why, and the message that names its place."""

    reason: str
    message: str


@dataclass
class Group:
    """What a worker is given at once.

    Attributes:
      parts: in order.
      done: share of all inputs that has been read.
    """

    parts: list[Part | Damage] = field(default_factory=list)
    done: float = 0.0


@dataclass
class Documents:
    """What a group holds.

    Attributes:
      found: the documents in order, each with the number of the entry it is from.
      dropped: what was left out, counted by reason.
      divided: how many documents were divided.
      damage: messages about what was left out because it cannot be used.
    """

    found: list[tuple[int, Document]] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    divided: int = 0
    damage: list[str] = field(default_factory=list)


def documents(sources: list[Source], on_error: str = "raise") -> Iterator[Document]:
    """All documents of a corpus, in order, read in this process.

    Raises:
      UserError: see `take_apart`.
    """
    for group in groups(sources):
        yield from (document for _, document in take_apart(group, on_error).found)


# The first half: from inputs to parts


def groups(sources: list[Source]) -> Iterator[Group]:
    """Reads all inputs, in order, in groups of about `PART_BYTES`. Their order is always the same.

    Raises:
      UserError: an entry names nothing that exists, or its options do not suit.
    """
    found = inputs(sources)
    sizes = [max(1, input.size) for input in found]
    before = 0
    group, bytes_in_group = Group(), 0
    for input, size in zip(found, sizes, strict=True):
        for part, done in _parts(input):
            group.parts.append(part)
            group.done = (before + size * done) / sum(sizes)
            bytes_in_group += _size(part)
            if bytes_in_group >= PART_BYTES // 2:
                yield group
                group, bytes_in_group = Group(), 0
        before += size
    if group.parts:
        yield group


def logged(groups: Iterable[Group], what: str, log: Callable[[str], None]) -> Iterator[Group]:
    """Passes groups on; every few seconds logs how far reading is, its rate and the time left."""
    started = logged_at = time.monotonic()
    before, size = None, 0
    for group in groups:
        yield group
        before = group.done if before is None else before
        size += sum(map(_size, group.parts))
        now = time.monotonic()
        if now - logged_at > _LOG_SECONDS:
            logged_at = now
            share = (group.done - before) / max(1e-9, 1 - before)
            left = (now - started) * (1 - share) / max(1e-9, share)
            rate = size / 1e6 / (now - started)
            log(f"{what} {group.done:.0%}, {rate:.1f} MB/s, {left:.0f} s left")


def _size(part: Part | Damage) -> int:
    if isinstance(part, Damage):
        return 0
    if isinstance(part.content, bytes):
        return len(part.content)
    return sum(len(text) for text in part.content if isinstance(text, bytes | str))


def _parts(input: Input) -> Iterator[tuple[Part | Damage, float]]:
    """The parts of an input, each with the share of the input read so far."""
    if input.format == "docstrings":
        return _record_parts(input, [text for _, text in docstrings()])
    if input.format == "tfds":
        return _record_parts(input, data_set(input.name, input.split, input.field))
    if input.format == "parquet":
        return _parquet_parts(input)
    return _stream_parts(input)


def _stream_parts(input: Input) -> Iterator[tuple[Part | Damage, float]]:
    rest, first = b"", 1
    damage = None
    try:
        with opened(input.name) as (stream, file):
            for block in _blocks(stream):
                rest += block
                if input.format == "jsonl" and len(rest) > RECORD_BYTES:
                    raise OSError(f"more than {RECORD_BYTES:,} bytes without the end of a line")
                cut, divided = _cut(rest, input)
                if cut:
                    done = min(1.0, file.tell() / max(1, input.size))
                    yield Part(input, rest[:cut], first, divided), done
                    first += _count_line_ends(rest[:cut])
                    rest = rest[cut:]
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        damage = _unreadable(input, first - 1 + _count_line_ends(rest), "line", error)
        rest = rest[: _cut(rest, input)[0]]  # the documents that did come
    if rest:
        yield Part(input, rest, first), 1.0
    if damage:
        yield damage, 1.0


def _blocks(stream: Stream) -> Iterator[bytes]:
    """Content in blocks of `PART_BYTES`; before an error comes whatever could be read."""
    read = getattr(stream, "read1", stream.read)  # `read` loses what came before damage.
    block = bytearray()
    try:
        while content := read(_READ_BYTES):
            block += content
            if len(block) >= PART_BYTES:
                yield bytes(block)
                block.clear()
    except Exception:
        yield bytes(block)
        raise
    yield bytes(block)


@contextmanager
def opened(name: str) -> Iterator[tuple[Stream, Stream]]:
    """What a file holds, decompressed, and the file itself."""
    decompressed = _DECOMPRESSED.get(PurePosixPath(name.lower()).suffix, nullcontext)
    with open_file(name) as file, decompressed(file) as stream:
        yield stream, file


def _zstd(file: Stream) -> Stream:
    import pyarrow  # slow to import, and seldom needed

    return pyarrow.CompressedInputStream(file, "zstd")


_DECOMPRESSED = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _zstd}


def _cut(content: bytes, input: Input) -> tuple[int, bool]:
    """Where a part can end, 0 if nowhere yet; and whether that divides a document."""
    if input.format == "jsonl":
        return content.rfind(b"\n") + 1, False
    # A carriage return at the end may be half of a line end.
    end = len(content) - content.endswith(b"\r")
    match input.documents:
        case "line":
            cut = max(content.rfind(b"\n", 0, end), content.rfind(b"\r", 0, end)) + 1
        case "blank_line":
            cut = _last_blank_line(content, end)
        case _:
            cut = 0
    if cut or len(content) <= DOCUMENT_BYTES:
        return cut, False
    return _division(content[:end]), True


def _last_blank_line(content: bytes, end: int) -> int:
    """Where the last blank line before `end` ends, or 0."""
    for begin in (max(0, end - 2**14), 0):  # Mostly, the first look finds one.
        ends = [match.end() for match in _BLANK_LINE.finditer(content, begin, end)]
        if ends:
            return ends[-1]
    return 0


def _division(content: bytes) -> int:
    """Where a text that is too long is divided: the last line, word or character begins there."""
    for ends in (b"\n", b"\r", b" ", b"\t"):
        if cut := content.rfind(ends) + 1:
            return cut
    cut = len(content) - 1
    while cut > len(content) - 4 and content[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut -= 1
    return cut


def _count_line_ends(content: bytes) -> int:
    return content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n")


def _record_parts(input: Input, records: Sequence) -> Iterator[tuple[Part | Damage, float]]:
    for begin in range(0, len(records), _RECORDS):
        end = min(begin + _RECORDS, len(records))
        try:
            if input.format == "tfds":
                content = [
                    record[input.field] for record in records.__getitems__(range(begin, end))
                ]
            else:
                content = records[begin:end]
        except Exception as error:  # of whatever reads the data set
            yield _unreadable(input, begin, "record", error), 1.0
            return
        yield Part(input, content, begin + 1), end / len(records)


def _parquet_parts(input: Input) -> Iterator[tuple[Part | Damage, float]]:
    import pyarrow  # slow to import, and seldom needed
    import pyarrow.parquet

    row = 0
    try:
        with open_file(input.name) as file, pyarrow.parquet.ParquetFile(file) as table:
            if input.field not in table.schema_arrow.names:
                raise UserError(
                    f"{input.name}: there is no column {input.field!r}; allowed as #field=: "
                    + ", ".join(table.schema_arrow.names)
                )
            for batch in table.iter_batches(_RECORDS, columns=[input.field]):
                yield Part(input, batch[0].to_pylist(), row + 1), row / table.metadata.num_rows
                row += len(batch)
    except (OSError, pyarrow.ArrowException) as error:
        yield _unreadable(input, row, "row", error), 1.0


def _unreadable(input: Input, read: int, unit: str, error: Exception) -> Damage:
    if isinstance(error, IsADirectoryError):
        message = f"{input.name} is a directory; name its files, such as {input.name}/*.txt"
    else:
        place = f"beyond {unit} {read}" if read else "at all"
        reason = getattr(error, "strerror", None) or error
        message = f"{input.name}: cannot be read {place}: {reason}"
    return Damage("inputs that cannot be read to their end", message)


# The second half: from parts to documents


def take_apart(group: Group, on_error: str) -> Documents:
    """The documents of a group.

    Raises:
      UserError: `on_error` is `raise` and something cannot be used. Names the place.
    """
    result = Documents()
    for part in group.parts:
        if isinstance(part, Part):
            result.divided += part.divided
            items = _PARSERS.get(part.input.format, _records)(part)
        else:
            items = [part]
        for item in items:
            if isinstance(item, Damage):
                if on_error == "raise":
                    raise UserError(item.message)
                result.dropped[item.reason] += 1
                result.damage.append(item.message)
            elif item:
                result.found.append((part.input.source, item))
            else:
                result.dropped["documents without text"] += 1
    return result


def _text_documents(part: Part) -> Iterator[Document | Damage]:
    document: Document = []
    alone = part.input.documents == "line"
    blank_ends = part.input.documents == "blank_line"
    for line in _text_lines(part):
        if isinstance(line, Damage):
            yield line
        elif line and alone:
            yield [line]
        elif line:
            document.append(line)
        elif document and blank_ends:
            yield document
            document = []
    if document:
        yield document


def _text_lines(part: Part) -> Iterator[str | Damage]:
    content = part.content.removeprefix(_BOM) if part.first == 1 else part.content
    try:
        lines = _line_list(content)
    except UnicodeDecodeError:
        lines = _BYTE_LINES.split(content)  # one by one, to find the place
    for number, line in enumerate(lines, part.first):
        try:
            yield (line if isinstance(line, str) else line.decode()).strip()
        except UnicodeDecodeError as error:
            yield Damage(
                "lines that are not UTF-8",
                f"{part.input.name}: line {number} is not UTF-8: {error.reason} at byte "
                f"{error.start} of the line",
            )


def _json_documents(part: Part) -> Iterator[Document | Damage]:
    content = part.content.removeprefix(_BOM) if part.first == 1 else part.content
    for number, line in enumerate(content.split(b"\n"), part.first):
        if not line.strip():
            continue
        place, name = f"{part.input.name}: line {number}", part.input.field
        try:
            record = json.loads(line)
        except ValueError as error:  # not UTF-8 is one, too
            yield Damage("records that are not JSON", f"{place} is not JSON: {error}")
            continue
        if not isinstance(record, dict) or name not in record:
            found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record)
            yield Damage(
                "records without the field",
                f"{place} has no field {name!r}; found {found}; #field= names another",
            )
            continue
        yield from _record_documents(record[name], place)


def _records(part: Part) -> Iterator[Document | Damage]:
    for number, text in enumerate(part.content, part.first):
        yield from _record_documents(text, f"{part.input.name}: record {number}")


def _record_documents(text: Any, place: str) -> Iterator[Document | Damage]:
    """The text of a record as a document, or as several if it is too long."""
    if text is None:
        text = ""  # A record may have none.
    if not isinstance(text, str | bytes):
        yield Damage("records that hold no text", f"{place} holds no text but {type(text)}")
        return
    try:
        content = text.encode() if isinstance(text, str) else text
        content.decode()
    except UnicodeError as error:  # not UTF-8, or half of a surrogate pair
        yield Damage("records that are not UTF-8", f"{place} is not UTF-8: {error}")
        return
    while len(content) > DOCUMENT_BYTES:
        cut = _division(content[:DOCUMENT_BYTES])
        yield _lines(content[:cut])
        content = content[cut:]
    yield _lines(content)


def _lines(content: bytes) -> Document:
    stripped = (line.strip() for line in _line_list(content))
    return [line for line in stripped if line]


def _line_list(content: bytes) -> list[str]:
    return content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")


_PARSERS: dict[str, Callable] = {"text": _text_documents, "jsonl": _json_documents}
