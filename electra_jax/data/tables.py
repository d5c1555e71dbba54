"""Tables: rows of named cells, from files that spreadsheets and data frames write.

    .csv           commas; fields may be quoted, and then hold commas, quotes ("") and newlines
    .tsv           tabs; a quotation mark is a character like any other
    .jsonl, .parquet and other formats of records in `data.formats`

Text files are UTF-8, with or without a byte order mark, and may be compressed (.gz, .xz, .bz2,
.zst). The first row of CSV and TSV names the columns. Blank lines are not rows, but in TSV of a
single column.
"""

import csv
import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from electra_jax.data.formats import FORMATS, format_of_file
from electra_jax.data.formats.base import Record
from electra_jax.data.formats.jsonl import JsonLines
from electra_jax.data.opening import read_lines, read_text, suffix_of
from electra_jax.errors import UserError

Fields = Iterator[tuple[int, list[str]]]  # with the number of the line that they begin in


def read_table(path: str) -> Iterator[Record]:
    """The rows of a table, each with the number, from 1, of its first line or Parquet row.

    Raises:
      UserError: the table cannot be read, or a row is malformed; names the line.
    """
    if fields := _FIELDS.get(suffix_of(path)):
        return _named(path, fields(path))
    if not is_table(path):
        suffixes = [x for form in FORMATS.values() if form.records for x in form.suffixes]
        allowed = ", ".join((*_FIELDS, *suffixes))
        raise UserError(f"{path}: not known as a table; allowed: {allowed}")
    return FORMATS[format_of_file(path)].records(path)


def is_table(path: str) -> bool:
    """Whether `read_table` knows a file, by its name."""
    return suffix_of(path) in _FIELDS or bool(FORMATS[format_of_file(path)].records)


def is_json_lines(path: str) -> bool:
    """Whether a file has a JSON object a line, by its name."""
    return suffix_of(path) in JsonLines.suffixes


def cell(values: Mapping[str, Any], column: str, where: str) -> Any:
    """What a row has in a column; UserError, which begins with `where`, if there is none."""
    if column not in values:
        found = ", ".join(map(str, values))
        raise UserError(f"{where}: there is no column {column!r}; found {found}")
    return values[column]


def text_cell(values: Mapping[str, Any], column: str, where: str) -> str:
    """As `cell`; it must be text."""
    value = cell(values, column, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: {column} is {value!r}; allowed: text")
    return value


def _csv_fields(path: str) -> Fields:
    csv.field_size_limit(sys.maxsize)  # by default, longer texts are an error
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: not CSV: {error}") from error


def _tsv_fields(path: str) -> Fields:
    has_one_column = False  # in which an empty line is an empty text
    for number, line in enumerate(read_lines(path), 1):
        if line or has_one_column:
            yield number, line.split("\t")
            has_one_column |= "\t" not in line


_FIELDS = {".csv": _csv_fields, ".tsv": _tsv_fields}


def _named(path: str, rows: Fields) -> Iterator[Record]:
    _, columns = next(rows, (1, []))
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None or not columns:
        found = f"the column {twice!r} twice" if columns else "nothing"
        raise UserError(f"{path}, line 1: found {found}; columns have names, each its own")
    for line, fields in rows:
        if len(fields) != len(columns):
            expected = f"the file has {len(columns)} columns: {', '.join(columns)}"
            raise UserError(f"{path}, line {line}: {len(fields)} fields; {expected}")
        yield line, dict(zip(columns, fields, strict=True))
