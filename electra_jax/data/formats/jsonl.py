"""JSON lines: an object a line."""

from collections.abc import Iterator
from dataclasses import dataclass

from electra_jax.data.formats.base import Damage, Document, Limits, Part, Record, text_documents
from electra_jax.data.formats.text import Lines, without_bom
from electra_jax.data.opening import read_lines
from electra_jax.errors import UserError
from electra_jax.files import parse_json, parse_object
from electra_jax.settings import setting


@dataclass(frozen=True)
class JsonLines(Lines):
    """Documents are in a field of the objects. Blank lines hold none."""

    suffixes = (".jsonl", ".ndjson")
    field: str = setting("text", "of a record that holds its text")

    def cut(self, content: bytes, limits: Limits) -> tuple[int, bool]:
        """See `Lines.cut`."""
        return content.rfind(b"\n") + 1, False

    def take_apart(self, part: Part, limits: Limits) -> Iterator[Document | Damage]:
        """See `Format.take_apart`."""
        for number, line in enumerate(without_bom(part).split(b"\n"), part.first):
            if not line.strip():
                continue
            place = f"{part.input.name}: line {number}"
            try:
                record = parse_json(line, place)
            except UserError as error:
                yield Damage("records that are not JSON", str(error))
                continue
            if isinstance(record, dict) and self.field in record:
                yield from text_documents(record[self.field], place, limits)
            else:
                found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record)
                message = f"has no field {self.field!r}; found {found}; #field= names another"
                yield Damage("records without the field", f"{place} {message}")

    @staticmethod
    def records(name: str) -> Iterator[Record]:
        """See `Format.records`."""
        for number, line in enumerate(read_lines(name), 1):
            if line.strip():
                yield number, parse_object(line, f"{name}, line {number}")
