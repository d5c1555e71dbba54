"""What a fine-tuning task is: examples in, arrays for a network, its outputs back to predictions.

A task does all that is not the network: it reads files, makes features, turns outputs into
predictions, scores and writes them. The loop that trains knows no task but through this interface:

    examples = task.read("train")
    features = task.features(examples, tokenizer, max_length=128, training=True)
    ...  # the network is trained on batches of these rows

    for split in (*task.eval_splits, *task.test_splits):
        examples = task.read(split)
        features = task.features(examples, tokenizer, max_length=128, training=False)
        predictions = task.predict(examples, features, outputs)  # of the network, for all rows
        task.write(predictions, directory, split)
        if split in task.eval_splits:
            scores = task.score(examples, predictions)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError

Arrays = dict[str, np.ndarray]
Log = Callable[[str], None]

TRAIN = "train"


@dataclass(frozen=True)
class Head:
    """What a task asks of the network.

    Attributes:
      kind: one of
        `classification`: one of `labels` for a text or pair of texts;
        `multilabel`: any number of `labels`;
        `regression`: one number;
        `tagging`: one of `labels` for each word;
        `qa`: the start and end of an answer in a text.
      labels: their names; a label's place is its id. Empty for `regression` and `qa`.
    """

    kind: str
    labels: tuple[str, ...] = ()


class Task(ABC):
    """A data set to fine-tune on.

    Features are a dict of arrays, whose first axis is the row. A row is what the network sees at
    once; most examples have one, long documents several. All tasks have

        input_ids, piece_ids (1, and 0 for padding), position_ids, token_type_ids   int32 [N, L]
        example: the index of the example that a row belongs to                     int32 [N]

    and when all examples are labelled, by kind of head,

        classification  label           int32 [N]
        multilabel      label           float32 [N, C], ones and zeros
        regression      label           float32 [N], scaled so that training data lie in [0, 1]
        tagging         label           int32 [N, L], -1 where no word starts
        qa              start, end      int32 [N], 0 in rows that do not hold the whole answer
                        is_impossible   int32 [N]

    `qa` has `allowed` int32 [N, L] in any case: where an answer may start or end (spec 6.4).

    L is `max_length`, or less where no row needs so much.

    Outputs of the network are float32 arrays with as many rows as the features, in the same order:

        classification, multilabel   logits [N, C]
        regression                   logits [N]
        tagging                      logits [N, L, C]
        qa, joint head               start_top int32 [N, K], start_log_prob [N, K],
                                     end_top int32 [N, K, K], end_log_prob [N, K, K],
                                     answerable_logit [N], positive for "no answer"
        qa, independent head         start_logits, end_logits [N, L]

    Attributes:
      name: for messages and results.
      head: what the network predicts.
      eval_splits: the labelled splits beside `train`; they are predicted and scored.
      test_splits: splits without labels; they are predicted, never scored.
      main_metric: the score by which runs are compared.
    """

    name: str
    head: Head
    eval_splits: tuple[str, ...]
    test_splits: tuple[str, ...]
    main_metric: str

    @abstractmethod
    def read(self, split: str) -> list[Any]:
        """The examples of a split: frozen dataclasses, one for each row of its file, in order.

        Raises:
          UserError: the file is missing, or has a row that is malformed; names file and line.
        """

    @abstractmethod
    def features(
        self, examples: Sequence[Any], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """The rows that the network sees, each of length `max_length`.

        Args:
          examples: of one split.
          tokenizer: of the encoder.
          max_length: in tokens; longer texts are cut, or divided among several rows.
          training: whether the rows are to be trained on; these may be more or fewer.
        """

    @abstractmethod
    def predict(self, examples: Sequence[Any], features: Arrays, outputs: Arrays) -> list[Any]:
        """A prediction for each example, in the order of the examples.

        Args:
          examples: those that gave `features`, made with `training=False`.
          features: of all rows.
          outputs: of the network for all rows.
        """

    @abstractmethod
    def score(self, examples: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        """Metrics over all labelled examples; empty when there are none."""

    @abstractmethod
    def floor(self, examples: Sequence[Any]) -> float:
        """The main score of the best answer that is the same for all of these labelled examples."""

    @abstractmethod
    def write(self, predictions: Sequence[Any], directory: Path, split: str) -> list[Path]:
        """Writes the predictions of a split; returns the files.

        A file is there as a whole or not at all.
        """


class FileTask(Task):
    """A task whose splits are files, labelled or not, as their content says.

    Subclasses set `name` and `_files`, the path of each split, and say what a label is.
    """

    _files: dict[str, str]

    @abstractmethod
    def is_labelled(self, examples: Sequence[Any]) -> bool:
        """Whether all of these examples of a split have a label."""

    @cached_property
    def eval_splits(self) -> tuple[str, ...]:
        """The labelled splits beside `train`."""
        return tuple(split for split in self._others if self.is_labelled(self.read(split)))

    @cached_property
    def test_splits(self) -> tuple[str, ...]:
        """The splits without labels."""
        return tuple(split for split in self._others if not self.is_labelled(self.read(split)))

    @property
    def _others(self) -> list[str]:
        return [split for split in self._files if split != TRAIN]

    def _path(self, split: str) -> str:
        """The file of a split; UserError where there is none."""
        if split not in self._files:
            raise UserError(
                f"{self.name} has no split {split!r}; allowed: {', '.join(self._files)}"
            )
        return self._files[split]
