"""The user's own tables: a text or a pair of texts and a label a row, see `data.tables`.

The labels are those of the training file. Every row of every file is used: a row that cannot be is
an error that names its line.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from electra_jax.data.tables import cell, read_table
from electra_jax.errors import UserError
from electra_jax.finetune.heads import HEADS
from electra_jax.finetune.heads.sentence import Label, SentenceHead
from electra_jax.finetune.scores import Score
from electra_jax.finetune.tasks.base import TRAIN, Files, FileTask, Labels
from electra_jax.finetune.tasks.sentences import Example, SentenceTask
from electra_jax.settings import Check, setting


def is_range(values: tuple) -> bool:
    """Whether a regression can be scaled by these; by none, the data say."""
    if not all(isinstance(x, int | float) and -math.inf < x < math.inf for x in values):
        return False
    return not values or (len(values) == 2 and values[0] < values[1])


class TableTask(FileTask, SentenceTask):
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

    @cached_property
    def head(self) -> SentenceHead:
        """That of the settings if they have all that it needs; or else of the training table."""
        if self._given:
            return self._given
        labels = [example.label for example in self.read(TRAIN)]
        try:
            return self._kind.fitted(labels, self.style)
        except ValueError as error:
            raise UserError(
                f"{self.files[TRAIN]}, column {self.settings.label}: {error}"
            ) from error

    @property
    def metrics(self) -> dict[str, Score]:
        """All scores of the head."""
        return self.head.scores

    def read_file(self, split: str, path: str) -> list[Example]:
        """See `Task.read`. Ids count the rows from 0."""
        rows = list(read_table(path))
        head = None
        if split == TRAIN:
            head = self._given or self._kind(style=self.style)  # whose labels are not known yet
        elif any(self.settings.label in values for _, values in rows):
            head = self.head
        examples = []
        for number, (line, values) in enumerate(rows):
            where = f"{path}, line {line}"
            example = self.example(number, values, where)
            label = head and self._label(head, values, where)
            examples.append(dataclasses.replace(example, id=str(number), label=label))
        return examples

    @property
    def _kind(self) -> type[SentenceHead]:
        return HEADS[self.settings.target]

    @property
    def _given(self) -> SentenceHead | None:
        found = {name: getattr(self.settings, name) for name in self._kind.from_data}
        return self._kind(**found, style=self.style) if all(found.values()) else None

    def _label(self, head: SentenceHead, values: Mapping[str, Any], where: str) -> Label:
        value = cell(values, self.settings.label, where)
        try:
            return head.parse(value)
        except ValueError as error:
            raise UserError(f"{where}: {self.settings.label} is {error}") from error
