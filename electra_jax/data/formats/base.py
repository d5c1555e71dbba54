"""What a format is, and what formats share.

Reading has two halves. The first runs in one process: it cuts an input between documents into parts
of about a MiB. The second runs in many (electra_jax.data.workers): it decodes parts and finds their
documents and lines. So one large file keeps as many cores busy as many small ones, and memory does
not grow with the corpus.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from electra_jax.data.opening import open_file, reason
from electra_jax.errors import UserError

Document = list[str]  # its lines, stripped, none of them empty
Record = tuple[int, dict[str, Any]]  # the number of its line or row, from 1; values by name

BATCH = 256  # records in a part
_END_BYTES = 2**20  # of a file, that go into its fingerprint


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes that bound the memory of reading.

    A longer document is divided between two lines, or between two words where a line is that long:
    nothing is left out.
    """

    read: int = 2**16  # taken from a stream at once
    part: int = 2**20  # about
    document: int = 2**22
    record: int = 2**28  # a longer line is hardly a record of JSON lines


LIMITS = Limits()


class Format(ABC):
    """How inputs of one kind are read. Formats are dataclasses; their fields are their options.

    Attributes:
      suffixes: of its files; empty if it has none and is named by its key in `FORMATS`.
      records: in formats of tables, gives the records in a file of this name. Raises UserError
        where the file cannot be read or a record is malformed.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    records: ClassVar[Callable[[str], Iterator[Record]] | None] = None

    @abstractmethod
    def parts(self, input: "Input", limits: Limits) -> "Iterator[tuple[Part | Damage, float]]":
        """The parts of an input in order, each with the share of the input read so far.

        The last one is `Damage` where the input cannot be read to its end.
        """

    @abstractmethod
    def take_apart(self, part: "Part", limits: Limits) -> "Iterator[Document | Damage]":
        """The documents of a part, with `Damage` in place of what cannot be used."""

    def fingerprint(self, name: str, size: int) -> dict:
        """Identifies an input, as JSON, without reading all of it.

        Unlike a modification time, the ends of a file survive copying to another machine.
        """
        try:
            with open_file(name) as file:
                ends = hashlib.sha256(file.read(_END_BYTES))
                file.seek(max(_END_BYTES, size - _END_BYTES))
                ends.update(file.read())
        except OSError as error:  # Reading it will say so, or count it.
            return {"name": name, "error": type(error).__name__}
        return {"name": name, "bytes": size, "sha256_of_ends": ends.hexdigest()}


@dataclass(frozen=True)
class Input:
    """Something to be read in one go."""

    source: int  # number of the entry that named it
    name: str  # path or address of a file, name of a data set, or `docstrings`
    format: Format  # with the options of the entry
    size: int  # in bytes, as far as known; for progress


@dataclass(frozen=True)
class Part:
    """Some whole documents of an input."""

    input: Input
    content: bytes | list[Any]  # encoded text, or a list of the texts of records
    first: int  # the number of the first line or record, counted from 1
    divided: bool = False  # whether the last document goes on in the next part


@dataclass(frozen=True)
class Damage:
    """Something that cannot be used: why, and the message that names its place."""

    reason: str
    message: str


def unreadable(input: Input, read: int, unit: str, error: Exception) -> Damage:
    """The damage of an input of which only the first `read` units could be read."""
    if isinstance(error, IsADirectoryError):
        message = f"{input.name} is a directory; name its files, such as {input.name}/*.txt"
    else:
        place = f"beyond {unit} {read}" if read else "at all"
        message = f"{input.name}: cannot be read {place}: {reason(error)}"
    return Damage("inputs that cannot be read to their end", message)


class Records(Format):
    """A format whose parts are lists of texts."""

    @abstractmethod
    def batches(self, name: str) -> Iterator[tuple[list[Any], float]]:
        """The texts of all records, up to `BATCH` at once, each with the share read so far."""

    def parts(self, input: Input, limits: Limits) -> Iterator[tuple[Part | Damage, float]]:
        """See `Format.parts`."""
        read = 0
        try:
            for texts, done in self.batches(input.name):
                yield Part(input, texts, read + 1), done
                read += len(texts)
        except UserError:
            raise
        except Exception as error:  # of whatever reads them
            yield unreadable(input, read, "record", error), 1.0

    def take_apart(self, part: Part, limits: Limits) -> Iterator[Document | Damage]:
        """See `Format.take_apart`."""
        for number, text in enumerate(part.content, part.first):
            yield from text_documents(text, f"{part.input.name}: record {number}", limits)


def text_documents(text: Any, place: str, limits: Limits) -> Iterator[Document | Damage]:
    """The text of a record as a document, or as several if it is too long. None is no text."""
    if not isinstance(text, str | bytes | None):
        yield Damage("records that hold no text", f"{place} holds no text but {type(text)}")
        return
    try:
        content = text.encode() if isinstance(text, str) else text or b""
        content.decode()
    except UnicodeError as error:  # not UTF-8, or half of a surrogate pair
        yield Damage("records that are not UTF-8", f"{place} is not UTF-8: {error}")
        return
    while len(content) > limits.document:
        cut = division(content[: limits.document])
        yield _document(content[:cut])
        content = content[cut:]
    yield _document(content)


def _document(content: bytes) -> Document:
    return [line for line in map(str.strip, lines_of(content)) if line]


def lines_of(content: bytes) -> list[str]:
    """The lines of UTF-8 text, whose ends may be those of Unix, Windows or old Macs."""
    return content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")


def division(content: bytes) -> int:
    """Where a text that is too long is divided: its last line, word or character begins there."""
    for ends in (b"\n", b"\r", b" ", b"\t"):
        if cut := content.rfind(ends) + 1:
            return cut
    cut = len(content) - 1
    while cut > len(content) - 4 and content[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut -= 1
    return cut
