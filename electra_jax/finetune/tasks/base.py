"""What a task is: examples in, arrays for a network, its outputs back to predictions.

A task does all that is not the network. The job that trains knows no task but through this
interface:

    features = task.features(task.read("train"), tokenizer, max_length=128, training=True)
    ...  # the network is trained on batches of these rows

    for split in (*task.eval_splits, *task.test_splits):
        examples = task.read(split)
        features = task.features(examples, tokenizer, max_length=128, training=False)
        predictions = task.predict(examples, features, outputs)  # of the network, for all rows
        task.write(predictions, directory, split)
        if split in task.eval_splits:
            scores = task.score(examples, predictions)
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from electra_jax.data.features import Arrays
from electra_jax.data.tables import read_table
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.heads.base import Head
from electra_jax.objectives.metrics import Metric
from electra_jax.settings import Check, setting

TRAIN = "train"

Log = Callable[[str], None]
Scores = dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """The splits of a task."""

    train: str = setting("", "the file of the split")
    dev: str = setting("", "likewise")
    test: str = setting("", "likewise")


def are_names(labels: tuple) -> bool:
    """Whether these can be labels."""
    return all(x and isinstance(x, str) for x in labels) and len({*labels}) == len(labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """Names of what is predicted."""

    labels: tuple = setting(
        (), "names; default: those of the training data", Check(are_names, "text, each once")
    )


class Task(ABC):
    """A data set to fine-tune on; with the settings that a run has kept, what the run predicts.

    Its splits are files, labeled or not, as their content says. They are read when they are asked
    for, and then once. Features are a dict of arrays, whose first axis is the row. A row is what
    the network sees at once; most examples have one, long documents several. All tasks have

        input_ids, segment_ids (1, and 0 for padding), position_ids, token_type_ids   int32 [N, L]
        example: the index of the example that a row belongs to                     int32 [N]

    and, if all examples are labeled, what the head is trained on. L is `max_length`. Outputs are
    those of the head, with as many rows as the features, in the same order.

    Args:
      name: for messages and results.
      style: of the head.
      log: takes lines about the files.
    """

    Settings: ClassVar[type] = Files  # a frozen dataclass: the task's own fields of `config.data`
    can_read_lines: ClassVar[bool] = False  # whether `unlabeled` knows files of an example a line

    head: Head  # what the network predicts
    metrics: Mapping[str, Metric]  # of the scores; runs are compared by the first, the main one

    def __init__(self, name: str, settings: Any, style: str = "original", log: Log = print):
        self.name, self.settings, self.style, self.log = name, settings, style, log
        self._examples: dict[str, list[Any]] = {}

    @classmethod
    def check(cls, name: str, settings: Any) -> None:
        """Raises UserError if nothing can be trained with this name and these settings."""
        if not settings.train:
            raise UserError("config.data.train is ''; allowed: the file to train on")

    @property
    def main_metric(self) -> str:
        """The name of the main score."""
        return next(iter(self.metrics))

    def resolved(self) -> dict[str, Any]:
        """Settings that follow from the training data; with them, predicting needs no data."""
        return {name: getattr(self.head, name) for name in ("labels", *self.head.from_data)}

    @cached_property
    def files(self) -> dict[str, str]:
        """Where each split is read from."""
        paths = {split: getattr(self.settings, split) for split in (TRAIN, "dev", "test")}
        return {split: path for split, path in paths.items() if path}

    @cached_property
    def eval_splits(self) -> tuple[str, ...]:
        """The labeled splits beside `train`; they are predicted and scored."""
        others = [split for split in self.files if split != TRAIN]
        return tuple(split for split in others if all(map(self.is_labeled, self.read(split))))

    @property
    def test_splits(self) -> tuple[str, ...]:
        """The splits without labels; they are predicted, never scored."""
        return tuple(split for split in self.files if split not in (TRAIN, *self.eval_splits))

    def read(self, split: str) -> list[Any]:
        """The examples of a split: frozen dataclasses, one for each row of its file, in order.

        Raises:
          UserError: the file is missing, or has a row that is malformed; names file and line.
        """
        if split not in self.files:
            raise UserError(f"{self.name} has no split {split!r}; allowed: {', '.join(self.files)}")
        if split not in self._examples:
            self._examples[split] = self.read_file(split, self.files[split])
        return self._examples[split]

    @abstractmethod
    def read_file(self, split: str, path: str) -> list[Any]:
        """As `read`, from the file of the split."""

    @abstractmethod
    def features(
        self, examples: Sequence[Any], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """The rows that the network sees of the examples of a split, each of length `max_length`.

        Args:
          max_length: in tokens; longer texts are cut, or divided among several rows.
          training: whether the rows are to be trained on; these may be more or fewer.
        """

    @abstractmethod
    def predict(self, examples: Sequence[Any], features: Arrays, outputs: Arrays) -> list[Any]:
        """A prediction for each example, from its features and what the head has made of them."""

    @abstractmethod
    def is_labeled(self, example: Any) -> bool:
        """Whether the right answer to an example is known."""

    def score(self, examples: Sequence[Any], predictions: Sequence[Any]) -> Scores:
        """Scores over all labeled examples; empty if there are none."""
        pairs = zip(examples, predictions, strict=True)
        pairs = [(example, guess) for example, guess in pairs if self.is_labeled(example)]
        return self.compare(*zip(*pairs, strict=True)) if pairs else {}

    @abstractmethod
    def compare(self, examples: Sequence[Any], predictions: Sequence[Any]) -> Scores:
        """As `score`, for examples that are all labeled, and at least one."""

    @abstractmethod
    def floor(self, examples: Sequence[Any]) -> float:
        """The main score of the best answer that is the same for all of these labeled examples."""

    def write(self, predictions: Sequence[Any], directory: Path, split: str) -> list[Path]:
        """Writes the predictions of a split, an answer a line; returns the files."""
        lines = [json.dumps(self.answer(prediction)) + "\n" for prediction in predictions]
        return [write_text(directory / f"{split}.jsonl", "".join(lines))]

    @abstractmethod
    def answer(self, prediction: Any) -> dict[str, Any]:
        """A prediction as a JSON object."""

    @abstractmethod
    def example(self, number: int, values: Mapping[str, Any], where: str) -> Any:
        """The example that a JSON object, or a row of a table, stands for; its label is not read.

        Args:
          number: its id, if the object has none.
          where: begins messages.

        Raises:
          UserError: something is missing or of another kind.
        """

    def unlabeled(self, path: str, by_line: bool = False) -> list[Any]:
        """The examples of a file, in order; labels that are in it are not read.

        Args:
          by_line: there is an example a line, in plain text.

        Raises:
          UserError: the file cannot be read, or is not of the task's format; names the line.
        """
        rows = enumerate(read_table(path))
        return [self.example(i, values, f"{path}, line {line}") for i, (line, values) in rows]
