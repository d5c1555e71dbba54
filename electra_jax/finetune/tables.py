"""The user's own tables: a text or a pair of texts and a label a row.

    .csv           commas; fields may be quoted, and then hold commas, quotes ("") and newlines
    .tsv           tabs; a quotation mark is a character like any other
    .jsonl         an object a line
    .parquet       a row a row

Text files are UTF-8, with or without a byte order mark, and may be compressed (.gz, .xz, .bz2,
.zst). The first row of CSV and TSV names the columns.

The labels are those of the training file. Every row of every file is used: a row that cannot be is
an error that names its line. Blank lines are not rows, but in TSV of a single column.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from electra_jax.data.opening import COMPRESSED, open_file
from electra_jax.data.text import read_lines, read_text
from electra_jax.errors import UserError
from electra_jax.finetune.sentences import Example, Label, SentenceTask, text, value
from electra_jax.finetune.task import TRAIN, Head

METRICS = {
    "classification": ("accuracy", "macro_f1", "matthews"),
    "multilabel": ("micro_f1", "macro_f1", "accuracy"),
    "regression": ("spearman", "pearson", "mse"),
}

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

Row = tuple[int, dict[str, Any]]  # the number of its line, or of the row; values by column


class TableTask(SentenceTask):
    """Classification, multi-label classification or regression on tables.

    A split without the label column is predicted, never scored; if any row has it, all must.

    Args:
      files: the path of the table of each split. `train` is needed unless `labels` are given.
      kind: `classification`, `multilabel` or `regression`.
      text: the column of the text, or the two columns of a pair.
      label: the column of the label. Several labels are a list, or text with `separator` between
        names; none of them is a label, too, the empty one.
      separator: see `label`.
      labels: their names in the order of their ids. By default those of the training table, sorted.
      value_range: of a regression: which labels the network sees as 0 and 1. By default the
        smallest and the largest of the training table.

    Raises:
      UserError: an argument does not suit, or a table cannot be read.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        kind: str,
        text: Sequence[str],
        label: str,
        *,
        separator: str = ",",
        labels: Sequence[str] | None = None,
        value_range: tuple[float, float] | None = None,
        name: str = "table",
    ):
        if kind not in METRICS:
            raise UserError(f"kind is {kind!r}; allowed: {', '.join(METRICS)}")
        if len(text) not in (1, 2):
            raise UserError(f"text is {tuple(text)!r}; allowed: one column, or two for pairs")
        self.name = name
        self.metrics = METRICS[kind]
        self._files = dict(files)
        self.text_columns, self._label, self._separator = tuple(text), label, separator
        self._tables: dict[str, list[Row]] = {}
        others = [split for split in files if split != TRAIN]
        labelled = {split: self._is_labelled(split) for split in others}
        self.eval_splits = tuple(split for split in others if labelled[split])
        self.test_splits = tuple(split for split in others if not labelled[split])
        self.head = Head(kind)
        if kind == "regression":
            self.value_range = value_range or self._range_of_training()
        else:
            self.head = Head(kind, tuple(labels or self._labels_of_training()))

    def read(self, split: str) -> list[Example]:
        """See `Task.read`. Ids count the rows from 0."""
        if split not in self._files:
            raise UserError(
                f"{self.name} has no split {split!r}; allowed: {', '.join(self._files)}"
            )
        path = self._files[split]
        rows = self._rows(split)
        labelled = split == TRAIN or split in self.eval_splits
        examples = []
        for number, (line, values) in enumerate(rows):
            where = f"{path}, line {line}"
            text_a, text_b = (*(text(values, name, where) for name in self.text_columns), None)[:2]
            label = self._checked(values, where) if labelled else None
            examples.append(Example(str(number), text_a, text_b, label))
        return examples

    def _rows(self, split: str) -> list[Row]:
        if split not in self._files:
            raise UserError(f"{self.name}: there is no {split} table, and labels are not given")
        if split not in self._tables:
            self._tables[split] = list(read_table(self._files[split]))
        return self._tables[split]

    def _is_labelled(self, split: str) -> bool:
        return any(self._label in values for _, values in self._rows(split))

    def _checked(self, values: dict[str, Any], where: str) -> Label:
        label = self._parsed(values, where)
        names = {"classification": (label,), "multilabel": label}.get(self.head.kind, ())
        for name in names:
            if name not in self.head.labels:
                raise UserError(
                    f"{where}: label {name!r} is not one of the training table: "
                    f"{', '.join(self.head.labels)}"
                )
        return label

    def _parsed(self, values: dict[str, Any], where: str) -> Label:
        found = value(values, self._label, where)
        if self.head.kind == "regression":
            return _number(found, self._label, where)
        if self.head.kind == "multilabel":
            if isinstance(found, str):
                found = [name.strip() for name in found.split(self._separator) if name.strip()]
            if not isinstance(found, list):
                raise UserError(f"{where}: {self._label} is {found!r}; allowed: a list, or text")
            return tuple(dict.fromkeys(_name(name, self._label, where) for name in found))
        return _name(found, self._label, where)

    def _training_labels(self) -> Iterator[Label]:
        path = self._files.get(TRAIN)
        for line, values in self._rows(TRAIN):
            yield self._parsed(values, f"{path}, line {line}")

    def _labels_of_training(self) -> list[str]:
        found: set[str] = set()
        for label in self._training_labels():
            found.update((label,) if isinstance(label, str) else label)
        if len(found) < (2 if self.head.kind == "classification" else 1):
            raise UserError(
                f"{self._files[TRAIN]}: the labels in {self._label} are {sorted(found)}; at least "
                "two are needed to learn anything"
            )
        return sorted(found)

    def _range_of_training(self) -> tuple[float, float]:
        found = list(self._training_labels())
        if not found:
            raise UserError(f"{self._files[TRAIN]}: there are no rows")
        return min(found), max(found)


def read_table(path: str) -> Iterator[Row]:
    """The rows of a table, each with the number of the line that it begins in, from 1.

    Rows of Parquet files are counted from 1.

    Raises:
      UserError: the table cannot be read, or a row is malformed; names the line.
    """
    suffix = _suffix(path)
    if not is_table(path):
        raise UserError(f"{path}: not known as a table; allowed: {', '.join(_SUFFIXES)}")
    if suffix == ".parquet":
        return _parquet(path)
    if suffix in (".jsonl", ".ndjson"):
        return _json_lines(path)
    records = _csv_records(path) if suffix == ".csv" else _tsv_records(path)
    return _named(path, records)


def is_table(path: str) -> bool:
    """Whether `read_table` knows a file, by its name."""
    return _suffix(path) in _SUFFIXES


def is_json_lines(path: str) -> bool:
    """Whether a file has a JSON object a line, by its name."""
    return _suffix(path) in (".jsonl", ".ndjson")


def _suffix(path: str) -> str:
    name = PurePosixPath(path.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSED else name).suffix


def _csv_records(path: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(sys.maxsize)  # by default, longer texts are an error
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    line = 1
    try:
        for record in reader:
            if record:
                yield line, record
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: not CSV: {error}") from error


def _tsv_records(path: str) -> Iterator[tuple[int, list[str]]]:
    has_one_column = False  # in which an empty line is an empty text
    for number, line in enumerate(read_lines(path), 1):
        if line or has_one_column:
            yield number, line.split("\t")
            has_one_column |= "\t" not in line


def _named(path: str, records: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    _, columns = next(records, (1, []))
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None or not columns:
        found = f"the column {twice!r} twice" if columns else "nothing"
        raise UserError(f"{path}, line 1: found {found}; columns have names, each its own")
    for line, fields in records:
        if len(fields) != len(columns):
            raise UserError(
                f"{path}, line {line}: {len(fields)} fields; the file has {len(columns)} columns: "
                f"{', '.join(columns)}"
            )
        yield line, dict(zip(columns, fields, strict=True))


def _json_lines(path: str) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}, line {number}: not a JSON object but {type(values).__name__}")
        yield number, values


def _parquet(path: str) -> Iterator[Row]:
    import pyarrow  # slow to import, and seldom needed
    import pyarrow.parquet

    try:
        with open_file(path) as file:
            rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return enumerate(rows, 1)


def _name(value: Any, column: str, where: str) -> str:
    """A label: text, or a number or truth value by its name in JSON."""
    if isinstance(value, bool | int):
        value = json.dumps(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}: {column} is {value!r}; allowed: the name of a label")
    return value


def _number(value: Any, column: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: {column} is {value!r}; allowed: a number")
    return number
