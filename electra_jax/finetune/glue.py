"""GLUE: nine tasks on sentences and pairs of sentences (Wang et al., ICLR 2019; spec 6.2).

Read from the official files, in the directories that the official archives make,

    glue/CoLA/train.tsv, dev.tsv, test.tsv, glue/SST-2/..., glue/MNLI/dev_matched.tsv, ...

or from TensorFlow's data sets (`tfds:glue`). The files are tab-separated without quoting: a
quotation mark is a character like any other.
"""

import io
import math
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_jax.data.text import read_data_set, read_lines
from electra_jax.errors import UserError
from electra_jax.files import write_bytes, write_text
from electra_jax.finetune.sentences import Example, Prediction, SentenceTask
from electra_jax.finetune.task import TRAIN, Head, Log

DIAGNOSTIC = "diagnostic"

_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_SCORES = (0.0, 5.0)  # of STS-B


@dataclass(frozen=True)
class _Layout:
    """Where a task's files lie and what is in them.

    Attributes:
      folder: the directory; also the name of the file to submit.
      text, label: names of columns, as in the first line of a file.
      labels: a label's place is its id; none for a regression.
      metrics: the main one first. Papers report that one, and for MRPC and QQP also F1.
      tfds, tfds_text: name and fields of TensorFlow's data set.
      unordered: whether swapping the texts of a pair leaves its label as it is, and the original
        doubles the training data so.
    """

    folder: str
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    tfds: str
    tfds_text: tuple[str, ...] = ("sentence1", "sentence2")
    unordered: bool = False


_PAIR = ("sentence1", "sentence2")
_LAYOUTS = {
    "cola": _Layout(
        "CoLA", ("sentence",), "label", _BINARY, ("matthews", "accuracy"), "cola", ("sentence",)
    ),
    "sst2": _Layout("SST-2", ("sentence",), "label", _BINARY, ("accuracy",), "sst2", ("sentence",)),
    "mrpc": _Layout(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        _BINARY,
        ("accuracy", "f1"),
        "mrpc",
        unordered=True,
    ),
    "stsb": _Layout(
        "STS-B", _PAIR, "score", (), ("spearman", "pearson", "mse"), "stsb", unordered=True
    ),
    "qqp": _Layout(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        _BINARY,
        ("accuracy", "f1"),
        "qqp",
        ("question1", "question2"),
    ),
    "mnli": _Layout(
        "MNLI",
        _PAIR,
        "gold_label",
        ("contradiction", "entailment", "neutral"),
        ("accuracy",),
        "mnli",
        ("premise", "hypothesis"),
    ),
    "qnli": _Layout(
        "QNLI",
        ("question", "sentence"),
        "label",
        _ENTAILMENT,
        ("accuracy",),
        "qnli",
        ("question", "sentence"),
    ),
    "rte": _Layout("RTE", _PAIR, "label", _ENTAILMENT, ("accuracy",), "rte"),
    "wnli": _Layout("WNLI", _PAIR, "label", _BINARY, ("accuracy",), "wnli"),
}
TASKS = tuple(_LAYOUTS)

# CoLA's labelled files have no line of names.
_COLA_COLUMNS = ["source", "label", "mark", "sentence"]

# TensorFlow's numbers of labels follow our order but here.
_TFDS_LABELS = {"mnli": ("entailment", "neutral", "contradiction")}

# What the files of a submission are called, where it is not the folder.
_SUBMISSIONS = {
    ("mnli", "test_matched"): "MNLI-m",
    ("mnli", "test_mismatched"): "MNLI-mm",
    ("mnli", DIAGNOSTIC): "AX",
}
SUBMISSION = tuple(
    sorted({*(x.folder for x in _LAYOUTS.values()), *_SUBMISSIONS.values()} - {"MNLI"})
)


class GlueTask(SentenceTask):
    """One of the nine tasks.

    The main metrics are those of ELECTRA's tables: Matthews' correlation for CoLA, Spearman's for
    STS-B, accuracy for the others.

    Args:
      name: one of `TASKS`.
      source: the directory that holds the folders of the tasks, or the folder of this task; or
        `tfds:glue`.
      double_unordered: as the original, train on MRPC and STS-B also with each pair swapped.
      on_error: `raise`, or `skip` malformed rows of the training file, with a line in the log (the
        official QQP file has some). Rows of other files are never left out.
      log: takes that line.

    Raises:
      UserError: there is no such task.
    """

    def __init__(
        self,
        name: str,
        source: str,
        *,
        double_unordered: bool = True,
        on_error: str = "raise",
        log: Log = print,
    ):
        if name not in _LAYOUTS:
            raise UserError(f"there is no GLUE task {name!r}; allowed: {', '.join(_LAYOUTS)}")
        self.name = name
        self._layout = layout = _LAYOUTS[name]
        self._source = source
        self._on_error = on_error
        self._log = log
        self.head = Head("classification" if layout.labels else "regression", layout.labels)
        if not layout.labels:
            self.value_range = _SCORES
        self.unordered = double_unordered and layout.unordered
        self.text_columns = layout.text
        self.metrics = layout.metrics
        self.eval_splits: tuple[str, ...] = ("dev",)
        self.test_splits: tuple[str, ...] = ("test",)
        if name == "mnli":
            self.eval_splits = ("dev_matched", "dev_mismatched")
            self.test_splits = ("test_matched", "test_mismatched", DIAGNOSTIC)
        if not source.startswith("tfds:"):
            missing = [split for split in self.test_splits if not os.path.exists(self._path(split))]
            self.test_splits = tuple(split for split in self.test_splits if split not in missing)
            for split in missing:
                log(f"there is no {self._path(split)}: nothing to predict there")

    def read(self, split: str) -> list[Example]:
        """See `Task.read`. Ids are what the column `index` or `id` says, or count rows from 0."""
        allowed = (TRAIN, *self.eval_splits, *self.test_splits)
        if split not in allowed:
            raise UserError(f"{self.name} has no split {split!r}; allowed: {', '.join(allowed)}")
        if self._source.startswith("tfds:"):
            return self._read_data_set(split)
        return self._read_file(split)

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Adds, for splits without labels, the TSV file that the GLUE server wants."""
        paths = super().write(predictions, directory, split)
        if split in self.test_splits:
            name = _SUBMISSIONS.get((self.name, split), self._layout.folder)
            lines = [f"{guess.id}\t{self._submitted(guess)}\n" for guess in predictions]
            text = "".join(["index\tprediction\n", *lines])
            paths.append(write_text(directory / f"{name}.tsv", text))
        return paths

    def _submitted(self, guess: Prediction) -> str:
        if self.head.kind == "regression":
            low, high = _SCORES
            return f"{min(max(guess.label, low), high):.3f}"
        return str(guess.label)

    def _read_file(self, split: str) -> list[Example]:
        path = self._path(split)
        lines = read_lines(path)
        labelled = split not in self.test_splits
        if self.name == "cola" and labelled:
            columns, first = _COLA_COLUMNS, 0
        else:
            columns, first = lines[0].split("\t") if lines else [], 1
        for column in (*self._layout.text, *([self._layout.label] if labelled else [])):
            if column not in columns:
                raise UserError(
                    f"{path}, line 1: there is no column {column!r}; found {', '.join(columns)}"
                )
        examples, malformed = [], []
        for row, line in enumerate(lines[first:]):
            try:
                examples.append(self._example(columns, line.split("\t"), row, labelled))
            except ValueError as error:
                message = f"{path}, line {row + first + 1}: {error}"
                if split != TRAIN or self._on_error == "raise":
                    raise UserError(message) from error
                malformed.append(message)
        if malformed:
            self._log(f"left out: {len(malformed):,} malformed rows, the first is {malformed[0]}")
        return examples

    def _path(self, split: str) -> str:
        folder = os.path.join(self._source, self._layout.folder)
        folder = folder if os.path.isdir(folder) else self._source
        path = os.path.join(folder, f"{split}.tsv")
        if split == DIAGNOSTIC and not os.path.exists(path):  # it has a folder of its own
            return os.path.join(os.path.dirname(folder), DIAGNOSTIC, f"{DIAGNOSTIC}.tsv")
        return path

    def _example(self, columns: list[str], fields: list[str], row: int, labelled: bool) -> Example:
        """The example of a row. ValueError says what is wrong with it."""
        if len(fields) != len(columns):
            raise ValueError(f"{len(fields)} fields; the file has {len(columns)} columns")
        values = dict(zip(columns, fields, strict=True))
        text_a, text_b = (*(values[name] for name in self._layout.text), None)[:2]
        index = values.get("index", values.get("id", str(row)))
        label = self._label(values[self._layout.label]) if labelled else None
        return Example(index, text_a, text_b, label)

    def _label(self, value: str) -> str | float:
        if self.head.kind == "classification":
            if value not in self.head.labels:
                raise ValueError(f"label {value!r}; allowed: {', '.join(self.head.labels)}")
            return value
        low, high = _SCORES
        try:
            score = float(value)
        except ValueError:
            score = math.nan
        if not low <= score <= high:
            raise ValueError(f"score {value!r}; allowed: a number from {low:g} to {high:g}")
        return score

    def _read_data_set(self, split: str) -> list[Example]:
        """Records in the order of the official file, which TensorFlow's data sets have shuffled."""
        config, theirs = self._layout.tfds, split.replace("dev", "validation")
        if split == DIAGNOSTIC:
            config, theirs = "ax", "test"
        name = f"{self._source}/{config}"
        records = read_data_set(name, theirs, *self._layout.tfds_text, "label", "idx")
        records.sort(key=lambda record: record["idx"])
        labelled = split not in self.test_splits
        return [
            Example(
                str(record["idx"]),
                *(*(record[field] for field in self._layout.tfds_text), None)[:2],
                self._tfds_label(record["label"]) if labelled else None,
            )
            for record in records
        ]

    def _tfds_label(self, value: Any) -> str | float:
        if self.head.kind == "regression":
            return float(value)
        return _TFDS_LABELS.get(self.name, self.head.labels)[int(value)]


def zip_submission(files: Sequence[Path], path: Path) -> Path:
    """The archive that the GLUE server takes, of the files that `GlueTask.write` has written.

    Args:
      files: one for each of `SUBMISSION`, such as `CoLA.tsv`, from wherever they are.
      path: of the archive.

    Raises:
      UserError: a file is missing or there twice; the server accepts all or none.
    """
    found: dict[str, Path] = {}
    for file in files:
        if found.setdefault(file.stem, file) != file:
            raise UserError(f"{path}: {found[file.stem]} and {file} are both for {file.stem}")
    missing = [name for name in SUBMISSION if name not in found or not found[name].is_file()]
    if missing:
        raise UserError(
            f"{path}: {', '.join(f'{name}.tsv' for name in missing)} missing; a submission has "
            "predictions of all tasks"
        )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SUBMISSION:
            archive.write(found[name], f"{name}.tsv")
    return write_bytes(path, content.getvalue())
