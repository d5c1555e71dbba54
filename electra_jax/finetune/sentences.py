"""What all tasks share that label a text or a pair of texts, whatever file they are read from."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune import metrics
from electra_jax.finetune.encoding import encode_texts
from electra_jax.finetune.task import Arrays, Task

Label = str | tuple[str, ...] | float
Columns = Mapping[str, Any]  # values of a row by column


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
      value_range: the labels of a regression that the network sees as 0 and 1.
      text_columns: of the text, or of the two of a pair, in files.
      unordered: whether training data are doubled by each pair with its texts swapped.
      metrics: names of scores, the main one first, out of `accuracy`, `f1` (of the second of two
        labels), `macro_f1`, `micro_f1` (multilabel), `matthews`, `pearson`, `spearman`, `mse`.
    """

    value_range: tuple[float, float] = (0.0, 1.0)
    unordered: bool = False
    text_columns: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def main_metric(self) -> str:
        """The score by which runs are compared."""
        return self.metrics[0]

    def unlabelled(self, number: int, values: Columns, where: str) -> Example:
        """A row to predict. Its id is what the column `id` or `index` says, or else `number`.

        Raises:
          UserError: a column of text is missing, or holds something else; begins with `where`.
        """
        text_a, text_b = (*(text(values, name, where) for name in self.text_columns), None)[:2]
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
        if all(example.label is not None for example in examples):
            arrays["label"] = self._targets(examples)[index]
        return arrays

    def predict(
        self, examples: Sequence[Example], features: Arrays, outputs: Arrays
    ) -> list[Prediction]:
        """See `Task.predict`."""
        logits = np.empty((len(examples), *outputs["logits"].shape[1:]))
        logits[features["example"]] = outputs["logits"]
        names = np.array(self.head.labels, object)
        if self.head.kind == "regression":
            low, high = self.value_range
            values, shares = (low + logits * (high - low)).tolist(), [[]] * len(examples)
        elif self.head.kind == "multilabel":
            values = [tuple(names[chosen]) for chosen in logits > 0]
            shares = special.expit(logits).tolist()
        else:
            values = names[logits.argmax(axis=-1)].tolist()
            shares = special.softmax(logits, axis=-1).tolist()
        return [
            Prediction(example.id, value, tuple(share))
            for example, value, share in zip(examples, values, shares, strict=True)
        ]

    def score(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """See `Task.score`; a regression is scored in the unit of its labels."""
        pairs = zip(examples, predictions, strict=True)
        pairs = [(example, guess) for example, guess in pairs if example.label is not None]
        if not pairs:
            return {}
        labelled, guesses = zip(*pairs, strict=True)
        if self.head.kind == "regression":
            gold, predicted = (np.array([x.label for x in xs]) for xs in (labelled, guesses))
        else:
            gold, predicted = self._targets(labelled), self._targets(guesses)
        if self.head.kind == "multilabel":
            scores = metrics.multilabel_f1(gold > 0, predicted > 0)
            scores["accuracy"] = float((gold == predicted).all(axis=1).mean())
            return {name: scores[name] for name in self.metrics}
        return {name: _METRICS[name](gold, predicted) for name in self.metrics}

    def floor(self, examples: Sequence[Example]) -> float:
        """See `Task.floor`. The answer is the most frequent label, or several of these."""
        if self.head.kind == "regression":
            return 0.0  # no correlation
        names = Counter(
            name
            for example in examples
            for name in ((example.label,) if isinstance(example.label, str) else example.label)
        )
        frequent = [name for name, _ in names.most_common()]
        if self.head.kind == "multilabel":
            answers = [tuple(frequent[:count]) for count in range(len(frequent) + 1)]
        else:
            answers = frequent[:1]
        return max(
            self.score(examples, [Prediction(example.id, answer, ()) for example in examples])[
                self.main_metric
            ]
            for answer in answers
        )

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Writes `SPLIT.jsonl`: an object with `id`, `label` and `probabilities` a line."""
        lines = [
            {"id": guess.id, "label": guess.label}
            | (
                {"probabilities": dict(zip(self.head.labels, guess.probabilities, strict=True))}
                if guess.probabilities
                else {}
            )
            for guess in predictions
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return [write_text(directory / f"{split}.jsonl", text)]

    def _targets(self, labelled: Sequence[Example | Prediction]) -> np.ndarray:
        """Labels as the network sees them: ids [N], rows of zeros and ones [N, C], scaled [N]."""
        labels = [one.label for one in labelled]
        if self.head.kind == "regression":
            low, high = self.value_range
            return ((np.array(labels) - low) / ((high - low) or 1.0)).astype(np.float32)
        ids = {label: i for i, label in enumerate(self.head.labels)}
        if self.head.kind == "multilabel":
            targets = np.zeros((len(labels), len(ids)), np.float32)
            for row, names in enumerate(labels):
                targets[row, [ids[name] for name in names]] = 1
            return targets
        return np.array([ids[label] for label in labels], np.int32)


def value(values: Columns, column: str, where: str) -> Any:
    """What a row has in a column, which must be there."""
    if column not in values:
        raise UserError(
            f"{where}: there is no column {column!r}; found {', '.join(map(str, values))}"
        )
    return values[column]


def text(values: Columns, column: str, where: str) -> str:
    """As `value`; must be text."""
    found = value(values, column, where)
    if not isinstance(found, str):
        raise UserError(f"{where}: {column} is {found!r}; allowed: text")
    return found


_METRICS = {
    "accuracy": metrics.accuracy,
    "f1": lambda gold, predicted: metrics.f1(gold == 1, predicted == 1),
    "macro_f1": metrics.macro_f1,
    "matthews": metrics.matthews,
    "pearson": metrics.pearson,
    "spearman": metrics.spearman,
    "mse": metrics.mean_squared_error,
}
