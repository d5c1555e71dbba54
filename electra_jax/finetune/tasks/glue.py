"""GLUE: nine tasks on sentences and pairs of sentences (Wang et al., ICLR 2019; spec 6.2).

Read from the official files, in the directories that the official archives make,

    glue/CoLA/train.tsv, dev.tsv, test.tsv, glue/SST-2/..., glue/MNLI/dev_matched.tsv, ...

or from TensorFlow's data sets (`tfds:glue`). The files are tab-separated without quoting: a
quotation mark is a character like any other.
"""

import dataclasses
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from os.path import dirname, exists, isdir, join
from pathlib import Path

from electra_jax.data.formats.tfds import records as read_data_set
from electra_jax.data.opening import read_lines
from electra_jax.data.tables import cell
from electra_jax.errors import UserError
from electra_jax.files import read_json, write_bytes, write_text
from electra_jax.finetune.heads.sentence import Classification, Regression, SentenceHead
from electra_jax.finetune.scores import ACCURACY, F1, MATTHEWS, Score
from electra_jax.finetune.tasks.base import TRAIN, Log
from electra_jax.finetune.tasks.sentences import Example, Prediction, SentenceTask, label_in
from electra_jax.run.workdir import RESULTS
from electra_jax.settings import one_of, setting

DIAGNOSTIC = "diagnostic"

_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_WITH_F1 = {"accuracy": ACCURACY, "f1": F1}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where a task's files lie and what is in them."""

    folder: str  # the directory; also the name of the file to submit
    text: tuple[str, ...] = _PAIR  # names of columns, as in the first line of a file
    label: str = "label"  # likewise
    labels: tuple[str, ...] = ("0", "1")  # a label's place is its id; none for a regression
    # The main one first. Papers report that one, and for MRPC and QQP also F1.
    metrics: Mapping[str, Score] = dataclasses.field(default_factory={"accuracy": ACCURACY}.copy)
    limits: tuple[float, float] | None = None  # of a regression, in files and submissions
    tfds_text: tuple[str, ...] = ()  # fields of TensorFlow's data set, if these are others
    tfds_labels: tuple[str, ...] = ()  # labels in the order of its numbers, likewise
    unordered: bool = False  # whether the original doubles the training data by swapped pairs
    eval_splits: tuple[str, ...] = ("dev",)
    test_splits: tuple[str, ...] = ("test",)
    submissions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names, by split


_LAYOUTS = {
    "cola": _Layout("CoLA", ("sentence",), metrics={"matthews": MATTHEWS, "accuracy": ACCURACY}),
    "sst2": _Layout("SST-2", ("sentence",)),
    "mrpc": _Layout(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        metrics=_WITH_F1,
        tfds_text=_PAIR,
        unordered=True,
    ),
    "stsb": _Layout(
        "STS-B",
        label="score",
        labels=(),
        metrics=Regression.scores,
        limits=(0.0, 5.0),
        unordered=True,
    ),
    "qqp": _Layout("QQP", ("question1", "question2"), "is_duplicate", metrics=_WITH_F1),
    "mnli": _Layout(
        "MNLI",
        label="gold_label",
        labels=("contradiction", "entailment", "neutral"),
        tfds_text=("premise", "hypothesis"),
        tfds_labels=("entailment", "neutral", "contradiction"),
        eval_splits=("dev_matched", "dev_mismatched"),
        test_splits=("test_matched", "test_mismatched", DIAGNOSTIC),
        submissions={"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm", DIAGNOSTIC: "AX"},
    ),
    "qnli": _Layout("QNLI", ("question", "sentence"), labels=_ENTAILMENT),
    "rte": _Layout("RTE", labels=_ENTAILMENT),
    "wnli": _Layout("WNLI"),
}
NAMES = tuple(_LAYOUTS)

# CoLA's labeled files have no line of names.
_COLA_COLUMNS = ["source", "label", "mark", "sentence"]

# The files of a submission, without their ending.
SUBMISSION = tuple(
    sorted(name for x in _LAYOUTS.values() for name in (x.submissions.values() or [x.folder]))
)


class GlueTask(SentenceTask):
    """One of the nine tasks, by name; the main metrics are those of ELECTRA's tables."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings:
        """Where the files are, and how they are trained on."""

        source: str = setting("", "the directory with the tasks' folders, or tfds:glue")
        on_error: str = setting(
            "raise", "at malformed rows to train on; others raise", one_of("raise", "skip")
        )
        double_unordered: bool = setting(True, "MRPC and STS-B with each pair swapped, too")

    settings: Settings

    def __init__(self, name: str, settings: Settings, style: str = "original", log: Log = print):
        super().__init__(name, settings, style, log)
        self._layout = layout = _LAYOUTS[name]
        self.head: SentenceHead = (
            Regression(value_range=layout.limits, style=style)
            if layout.limits
            else Classification(labels=layout.labels, style=style)
        )
        self.unordered = settings.double_unordered and layout.unordered
        self.text_columns, self.metrics = layout.text, layout.metrics
        self.eval_splits = layout.eval_splits
        splits = TRAIN, *layout.eval_splits, *layout.test_splits
        self.files = {split: self._place(split) for split in splits}
        for split in layout.test_splits:
            path = self.files[split]
            if not self._is_data_set and not exists(path):
                log(f"there is no {path}: nothing to predict there")
                del self.files[split]

    @classmethod
    def check(cls, name: str, settings: Settings) -> None:
        """See `Task.check`."""
        if name not in _LAYOUTS:
            raise UserError(f"config.data.name is {name!r}; allowed: {', '.join(_LAYOUTS)}")
        if not settings.source:
            raise UserError(
                "config.data.source is ''; allowed: the directory of the GLUE files, or tfds:glue"
            )

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Adds, for splits without labels, the TSV file that the GLUE server wants."""
        paths = super().write(predictions, directory, split)
        if split in self.test_splits:
            name = self._layout.submissions.get(split, self._layout.folder)
            text = "index\tprediction\n"
            for guess in predictions:
                label = guess.label
                if limits := self._layout.limits:
                    label = f"{min(max(label, limits[0]), limits[1]):.3f}"
                text += f"{guess.id}\t{label}\n"
            paths.append(write_text(directory / f"{name}.tsv", text))
        return paths

    @property
    def _is_data_set(self) -> bool:
        return self.settings.source.startswith("tfds:")

    def _place(self, split: str) -> str:
        source, folder = self.settings.source, self._layout.folder
        if self._is_data_set:
            return source
        own = join(source, folder)
        own = own if isdir(own) else source
        path = join(own, f"{split}.tsv")
        if split == DIAGNOSTIC and not exists(path):  # it has a folder of its own
            return join(dirname(own), DIAGNOSTIC, f"{DIAGNOSTIC}.tsv")
        return path

    def read_file(self, split: str, path: str) -> list[Example]:
        """See `Task.read`. Ids are what the column `index` or `id` says, or count rows from 0."""
        if self._is_data_set:
            return self._read_data_set(split)
        lines, is_labeled = read_lines(path), split not in self.test_splits
        column, limits = self._layout.label, self._layout.limits
        if self.name == "cola" and is_labeled:
            columns, first = _COLA_COLUMNS, 0
        else:
            columns, first = lines[0].split("\t") if lines else [], 1
        for name in (*self._layout.text, *([column] if is_labeled else [])):
            cell(dict.fromkeys(columns), name, f"{path}, line 1")
        examples, malformed = [], []
        for row, line in enumerate(lines[first:]):
            where, fields = f"{path}, line {row + first + 1}", line.split("\t")
            try:
                if len(fields) != len(columns):
                    found = f"{len(fields)} fields; the file has {len(columns)} columns"
                    raise UserError(f"{where}: {found}")
                values = dict(zip(columns, fields, strict=True))
                example = self.example(row, values, where)
                if is_labeled:
                    label = label_in(self.head, column, values, where)
                    if limits and not limits[0] <= label <= limits[1]:
                        found, (low, high) = values[column], limits
                        raise UserError(
                            f"{where}: {column} is {found!r}; allowed: a number from {low:g} to "
                            f"{high:g}"
                        )
                    example = dataclasses.replace(example, label=label)
                examples.append(example)
            except UserError as error:
                if split != TRAIN or self.settings.on_error == "raise":
                    raise
                malformed.append(str(error))
        if malformed:
            self.log(f"left out: {len(malformed):,} malformed rows, the first is {malformed[0]}")
        return examples

    def _read_data_set(self, split: str) -> list[Example]:
        """Records in the order of the official file, which TensorFlow's data sets have shuffled."""
        config, theirs = self.name, split.replace("dev", "validation")
        if split == DIAGNOSTIC:
            config, theirs = "ax", "test"
        fields = self._layout.tfds_text or self._layout.text
        names = self._layout.tfds_labels or self._layout.labels
        records = read_data_set(f"{self.settings.source}/{config}", theirs, *fields, "label", "idx")
        records.sort(key=lambda record: record["idx"])
        examples = []
        for record in records:
            text_a, text_b = (*(record[field] for field in fields), None)[:2]
            label = names[int(record["label"])] if names else float(record["label"])
            label = None if split in self.test_splits else label
            examples.append(Example(str(record["idx"]), text_a, text_b, label))
        return examples


def zip_submission(runs: Iterable[Path], path: Path) -> Path:
    """Writes the archive `path` with the TSV files that `GlueTask.write` has written in `runs`.

    Of a run with several trials, the best one counts.

    Raises:
      UserError: a run is not finished or has nothing to submit, or a file is missing or there
        twice; the server accepts all or none.
    """
    found: dict[str, Path] = {}
    for run in runs:
        results = read_json(run / RESULTS)
        if "trials" in results:
            metric = results["main_metric"]
            scores = [next(iter(trial["scores"].values()))[metric] for trial in results["trials"]]
            run = run / f"trial_{scores.index(max(scores))}"
        files = sorted((run / "predictions").glob("*.tsv"))
        if not files:
            raise UserError(f"{run / 'predictions'}: there is nothing to submit to GLUE")
        for file in files:
            if found.setdefault(file.stem, file) != file:
                raise UserError(f"{path}: {found[file.stem]} and {file} are both for {file.stem}")
    missing = [f"{name}.tsv" for name in SUBMISSION if name not in found]
    if missing:
        raise UserError(
            f"{path}: {', '.join(missing)} missing; a submission has predictions of all tasks"
        )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SUBMISSION:
            archive.write(found[name], f"{name}.tsv")
    return write_bytes(path, content.getvalue())
