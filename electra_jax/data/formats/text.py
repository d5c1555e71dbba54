"""Text files: a blank line, a line or the file ends a document."""

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from electra_jax.data.formats import base
from electra_jax.data.formats.base import Damage, Document, Format, Input, Limits, Part
from electra_jax.data.opening import BOM, UNREADABLE, Stream, opened
from electra_jax.settings import one_of, setting

_LINE_END = rb"(?:\r\n|\r(?!\n)|\n)"
_BLANK_LINE = re.compile(_LINE_END + rb"[ \t\f\v]*" + _LINE_END)
_BYTE_LINES = re.compile(rb"\r\n|\r|\n")


class Lines(Format):
    """A format whose files are lines of text; its parts are whole lines, encoded."""

    @abstractmethod
    def cut(self, content: bytes, limits: Limits) -> tuple[int, bool]:
        """Where a part can end, 0 if nowhere yet; and whether that divides a document."""

    def parts(self, input: Input, limits: Limits) -> Iterator[tuple[Part | Damage, float]]:
        """See `Format.parts`."""
        rest, first, damage = b"", 1, None
        try:
            with opened(input.name) as (stream, file):
                for block in _blocks(stream, limits):
                    rest += block
                    cut, divided = self.cut(rest, limits)
                    if cut:
                        done = min(1.0, file.tell() / max(1, input.size))
                        yield Part(input, rest[:cut], first, divided), done
                        first += _count_line_ends(rest[:cut])
                        rest = rest[cut:]
                    elif len(rest) > limits.record:
                        raise OSError(f"more than {limits.record:,} bytes and no end of a line")
        except UNREADABLE as error:
            damage = base.unreadable(input, first - 1 + _count_line_ends(rest), "line", error)
            rest = rest[: self.cut(rest, limits)[0]]  # the documents that did come
        if rest:
            yield Part(input, rest, first), 1.0
        if damage:
            yield damage, 1.0


def _blocks(stream: Stream, limits: Limits) -> Iterator[bytes]:
    """Content in blocks of `limits.part`; before an error comes whatever could be read."""
    read = getattr(stream, "read1", stream.read)  # `read` loses what came before damage.
    block = bytearray()
    try:
        while content := read(limits.read):
            block += content
            if len(block) >= limits.part:
                yield bytes(block)
                block.clear()
    except Exception:
        yield bytes(block)
        raise
    yield bytes(block)


def _count_line_ends(content: bytes) -> int:
    return content.count(b"\n") + content.count(b"\r") - content.count(b"\r\n")


def without_bom(part: Part) -> bytes:
    """The content of a part without the byte order mark that may begin a file."""
    return part.content.removeprefix(BOM) if part.first == 1 else part.content


@dataclass(frozen=True)
class Text(Lines):
    """UTF-8 text. Files that no other format knows by their names are read as text, too."""

    suffixes = (".txt",)
    documents: str = setting(
        "blank_line", "what ends a document", one_of("blank_line", "line", "file")
    )

    def cut(self, content: bytes, limits: Limits) -> tuple[int, bool]:
        """See `Lines.cut`."""
        # A carriage return at the end may be half of a line end.
        end = len(content) - content.endswith(b"\r")
        cut = 0
        if self.documents == "line":
            cut = max(content.rfind(b"\n", 0, end), content.rfind(b"\r", 0, end)) + 1
        elif self.documents == "blank_line":
            cut = _last_blank_line(content, end)
        if cut or len(content) <= limits.document:
            return cut, False
        return base.division(content[:end]), True

    def take_apart(self, part: Part, limits: Limits) -> Iterator[Document | Damage]:
        """See `Format.take_apart`."""
        document: Document = []
        for line in _lines(part):
            if isinstance(line, Damage):
                yield line
            elif line and self.documents == "line":
                yield [line]
            elif line:
                document.append(line)
            elif document and self.documents == "blank_line":
                yield document
                document = []
        if document:
            yield document


def _last_blank_line(content: bytes, end: int) -> int:
    """Where the last blank line before `end` ends, or 0."""
    for begin in (max(0, end - 2**14), 0):  # Mostly, the first look finds one.
        ends = [match.end() for match in _BLANK_LINE.finditer(content, begin, end)]
        if ends:
            return ends[-1]
    return 0


def _lines(part: Part) -> Iterator[str | Damage]:
    content = without_bom(part)
    try:
        yield from map(str.strip, base.lines_of(content))
        return
    except UnicodeDecodeError:
        lines = _BYTE_LINES.split(content)  # one by one, to find the place
    for number, line in enumerate(lines, part.first):
        try:
            yield line.decode().strip()
        except UnicodeDecodeError as error:
            place = f"{part.input.name}: line {number}"
            message = f"{place} is not UTF-8: {error.reason} at byte {error.start} of the line"
            yield Damage("lines that are not UTF-8", message)
