"""What all tasks share that label a text or a pair of texts, whatever file they are read from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from electra_jax.data.features import Arrays, encode_texts
from electra_jax.data.tables import text_cell
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.finetune.heads.sentence import Label, SentenceHead
from electra_jax.finetune.scores import Score
from electra_jax.finetune.tasks.base import Task


@dataclass(frozen=True)
class Example:
    """A text, or a pair of texts.

    Attributes:
      id: the number of the row in its file, or what the file says.
      text_a, text_b: as in the file, white space included. `text_b` is None for single texts.
      label: a name (classification), several (multilabel) or a number (regression); None: unknown.
    """

    id: str
    text_a: str
    text_b: str | None
    label: Label | None


@dataclass(frozen=True)
class Prediction:
    """The label of an example.

    Attributes:
      id: of the example.
      label: as `Example.label`.
      probabilities: of all labels, in the order of the head; empty for a regression.
    """

    id: str
    label: Label
    probabilities: tuple[float, ...]


class SentenceTask(Task):
    """Features, predictions and scores; subclasses read files.

    Attributes:
      text_columns: of the text, or of the two of a pair, in files.
      unordered: whether training data are doubled by each pair with its texts swapped.
    """

    head: SentenceHead
    metrics: dict[str, Score]
    text_columns: tuple[str, ...]
    unordered: bool = False

    def example(self, number: int, values: Mapping[str, Any], where: str) -> Example:
        """See `Task.example`. The id is what the column `id` or `index` says, or else `number`."""
        text_a, text_b = (*(text_cell(values, x, where) for x in self.text_columns), None)[:2]
        return Example(str(values.get("id", values.get("index", number))), text_a, text_b, None)

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
        return [
            Prediction(example.id, label, probabilities)
            for example, (label, probabilities) in zip(
                examples, self.head.decode(logits), strict=True
            )
        ]

    def is_labeled(self, example: Example) -> bool:
        """See `Task.is_labeled`."""
        return example.label is not None

    def compare(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
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
