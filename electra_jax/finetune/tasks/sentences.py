"""Labels of a text or a pair of texts: what all such tasks share, and the user's own tables.

A table has a text or a pair of texts and a label a row, see `data.tables`. Every row of every file
is used: a row that cannot be is an error that names its line.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from electra_jax.data.features import Arrays, encode_texts
from electra_jax.data.tables import cell, read_table, text_cell
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.finetune.heads import HEADS
from electra_jax.finetune.heads.sentence import Label, SentenceHead
from electra_jax.finetune.scores import Score
from electra_jax.finetune.tasks.base import TRAIN, Files, Labels, Scores, Task
from electra_jax.settings import Check, setting


@dataclasses.dataclass(frozen=True)
class Example:
    """A text or a pair of texts as in the file, white space included."""

    id: str  # the number of the row in its file, or what the file says
    text_a: str
    text_b: str | None  # None for single texts
    label: Label | None  # a name, several (multilabel) or a number (regression); None: unknown


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The label of the example `id`; probabilities of all labels, none for a regression."""

    id: str
    label: Label
    probabilities: tuple[float, ...]


class SentenceTask(Task):
    """Features, predictions and scores; subclasses read files."""

    head: SentenceHead
    metrics: dict[str, Score]
    text_columns: tuple[str, ...]  # of the text, or of the two of a pair, in files
    unordered: bool = False  # whether training data are doubled by each pair with its texts swapped

    def example(self, number: int, values: Mapping[str, Any], where: str) -> Example:
        """See `Task.example`. The id is what the column `id` or `index` says, or else `number`."""
        text_a, text_b = (*(text_cell(values, x, where) for x in self.text_columns), None)[:2]
        return Example(str(values.get("id", values.get("index", number))), text_a, text_b, None)

    def is_labeled(self, example: Example) -> bool:
        """See `Task.is_labeled`."""
        return example.label is not None

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """See `Task.features`. With `unordered`, the swapped pairs follow after all others."""
        texts = [(example.text_a, example.text_b) for example in examples]
        index = np.arange(len(examples), dtype=np.int32)
        if training and self.unordered:
            texts += [(b, a) for a, b in texts]
            index = np.concatenate([index, index])
        arrays = {**encode_texts(tokenizer, texts, max_length), "example": index}
        if all(map(self.is_labeled, examples)):
            arrays["label"] = self.head.targets([example.label for example in examples])[index]
        return arrays

    def predict(
        self, examples: Sequence[Example], features: Arrays, outputs: Arrays
    ) -> list[Prediction]:
        """See `Task.predict`."""
        logits = np.empty((len(examples), *outputs["logits"].shape[1:]))
        logits[features["example"]] = outputs["logits"]
        decoded = zip(examples, self.head.decode(logits), strict=True)
        return [Prediction(example.id, *answer) for example, answer in decoded]

    def compare(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> Scores:
        """See `Task.compare`; a regression is scored in the unit of its labels."""
        gold, predicted = (
            self.head.comparable([one.label for one in ones]) for ones in (examples, predictions)
        )
        return {name: float(score.of(gold, predicted)) for name, score in self.metrics.items()}

    def floor(self, examples: Sequence[Example]) -> float:
        """See `Task.floor`. The answer is the most frequent label, or several of these."""
        answers = self.head.constants([example.label for example in examples])
        scores = [self.compare(examples, [Prediction("", x, ())] * len(examples)) for x in answers]
        return max(score[self.main_metric] for score in scores)

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        """See `Task.answer`. Without probabilities, as of a regression, there is no such field."""
        found = {"id": prediction.id, "label": prediction.label}
        if prediction.probabilities:
            shares = zip(self.head.labels, prediction.probabilities, strict=True)
            found["probabilities"] = dict(shares)
        return found


def label_in(head: SentenceHead, column: str, values: Mapping, where: str) -> Label:
    """The label in a row of a table; UserError, which begins with `where`, if it is none."""
    value = cell(values, column, where)
    try:
        return head.parse(value)
    except ValueError as error:
        raise UserError(f"{where}: {column} is {error}") from error


def is_range(values: tuple) -> bool:
    """Whether a regression can be scaled by these; by none, the data say."""
    if not all(isinstance(x, int | float) and -math.inf < x < math.inf for x in values):
        return False
    return not values or (len(values) == 2 and values[0] < values[1])


class TableTask(SentenceTask):
    """Classification, multi-label classification, regression or another head on tables.

    A split without the label column is predicted, never scored; if any row has it, all must.
    """

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Files, Labels):
        """Columns, and what a label is."""

        target: str = setting(
            "classification",
            "what a label is",
            Check(
                lambda x: issubclass(HEADS.get(x, object), SentenceHead),
                "classification, multilabel, regression, or another head that reads whole texts",
            ),
        )
        text: tuple = setting(
            ("text",),
            "the column of the text, or the two of a pair",
            Check(lambda x: len(x) in (1, 2), "one column, or two for pairs"),
        )
        label: str = setting("label", "the column of the label")
        value_range: tuple = setting(
            (),
            "numbers that a regression sees as 0 and 1; default: smallest and largest",
            Check(is_range, "two numbers, the smaller one first"),
        )

    @property
    def text_columns(self) -> tuple[str, ...]:
        """See `SentenceTask`."""
        return self.settings.text

    @property
    def metrics(self) -> dict[str, Score]:
        """All scores of the head."""
        return self.head.scores

    @cached_property
    def head(self) -> SentenceHead:
        """That of the settings if they have all that it needs; or else of the training table."""
        if self._given:
            return self._given
        labels = [example.label for example in self.read(TRAIN)]
        try:
            return self._kind.fitted(labels, self.style)
        except ValueError as error:
            where = f"{self.files[TRAIN]}, column {self.settings.label}"
            raise UserError(f"{where}: {error}") from error

    def read_file(self, split: str, path: str) -> list[Example]:
        """See `Task.read`. Ids count the rows from 0."""
        rows, column = list(read_table(path)), self.settings.label
        head = None
        if split == TRAIN:
            head = self._given or self._kind(style=self.style)  # whose labels are not known yet
        elif any(column in values for _, values in rows):
            head = self.head
        examples = []
        for number, (line, values) in enumerate(rows):
            where = f"{path}, line {line}"
            example = self.example(number, values, where)
            label = head and label_in(head, column, values, where)
            examples.append(dataclasses.replace(example, id=str(number), label=label))
        return examples

    @property
    def _kind(self) -> type[SentenceHead]:
        return HEADS[self.settings.target]

    @property
    def _given(self) -> SentenceHead | None:
        found = {name: getattr(self.settings, name) for name in self._kind.from_data}
        return self._kind(**found, style=self.style) if all(found.values()) else None
