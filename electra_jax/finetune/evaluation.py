"""Predictions and scores of the splits of a task."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from electra_jax.data.features import Arrays, FeatureRows
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.finetune.buckets import trimmed
from electra_jax.finetune.tasks.base import Task
from electra_jax.modeling.params import Params
from electra_jax.training.prediction import Predict, predict_rows

INPUTS = ("input_ids", "segment_ids", "position_ids", "token_type_ids")

Predictions = dict[str, list]  # of each split
Scores = dict[str, dict[str, float]]  # of each labeled split


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A network that predicts examples of a task.

    Attributes:
      predict: compiled outputs of the head.
      max_length: tokens of a row.
      batch_size: rows that the network sees at once.
    """

    task: Task
    tokenizer: Tokenizer
    predict: Predict
    max_length: int
    batch_size: int

    def features(self, examples: Sequence) -> Arrays:
        """What the network sees of examples."""
        return trimmed(self.task.features(examples, self.tokenizer, self.max_length, False))

    def __call__(
        self,
        params: Params,
        examples: Sequence,
        features: Arrays,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> list | None:
        """A prediction for each example; None if `is_stopped` has said so."""
        rows = FeatureRows({name: features[name] for name in (*INPUTS, *self.task.head.inputs)})
        outputs = predict_rows(self.predict, params, rows, self.batch_size, is_stopped)
        return outputs and self.task.predict(examples, features, outputs)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The splits that a run predicts, and how.

    Attributes:
      splits: the examples of each split, and their features.
    """

    predictor: Predictor
    splits: dict[str, tuple[Sequence, Arrays]]

    def predictions(
        self,
        params: Params,
        names: Iterable[str],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Predictions | None:
        """Predictions for the splits in `names`; None if `is_stopped` has said so."""
        found = {}
        for name in names:
            found[name] = self.predictor(params, *self.splits[name], is_stopped)
            if found[name] is None:
                return None
        return found

    def scores(self, predictions: Predictions) -> Scores:
        """The scores of the labeled splits."""
        task = self.predictor.task
        return {
            name: task.score(self.splits[name][0], predictions[name]) for name in task.eval_splits
        }

    def floors(self) -> dict[str, float]:
        """The main score of always giving the same answer, for each labeled split."""
        task = self.predictor.task
        return {name: task.floor(self.splits[name][0]) for name in task.eval_splits}


def as_metrics(scores: Scores) -> dict[str, float]:
    """Scores of the first split by `eval/NAME`, of the others by `eval/SPLIT/NAME`."""
    return {
        f"eval/{name}" if place == 0 else f"eval/{split}/{name}": value
        for place, (split, of_split) in enumerate(scores.items())
        for name, value in of_split.items()
    }
