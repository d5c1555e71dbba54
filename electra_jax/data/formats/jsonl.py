"""JSON lines: an object a line."""

from collections.abc import Iterator
from dataclasses import dataclass

from electra_jax.data.formats.base import (
    Damage,
    Document,
    Input,
    Limits,
    Part,
    Parts,
    Record,
    Records,
    text_documents,
)
from electra_jax.data.formats.text import stream_parts, without_bom
from electra_jax.data.opening import read_lines
from electra_jax.errors import UserError
from electra_jax.files import parse_json, parse_object


def records(name: str) -> Iterator[Record]:
    """The objects of a file, each with the number of its line. Blank lines hold none."""
    for number, line in enumerate(read_lines(name), 1):
        if line.strip():
            yield number, parse_object(line, f"{name}, line {number}")


@dataclass(frozen=True)
class JsonLines(Records):
    """Documents are in a field of the objects."""

    suffixes = (".jsonl", ".ndjson")
    records = staticmethod(records)

    def parts(self, input: Input, limits: Limits) -> Parts:
        """See `Format.parts`."""
        return stream_parts(input, lambda content: (content.rfind(b"\n") + 1, False), limits)

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
            if not isinstance(record, dict) or self.field not in record:
                found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record)
                yield Damage(
                    "records without the field",
                    f"{place} has no field {self.field!r}; found {found}; #field= names another",
                )
                continue
            yield from text_documents(record[self.field], place, limits)
