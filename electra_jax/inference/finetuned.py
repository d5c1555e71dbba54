"""What a fine-tuned run answers to new examples: no training data, no labels, no scores.

The completed configuration of a run holds all that its task needs. An example is a row of a file,
or a JSON object; see `Task.unlabeled` and `Task.example`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from electra_jax.data import tokenizers
from electra_jax.errors import UserError
from electra_jax.finetune.config import make_objective, make_task
from electra_jax.finetune.results import Predictor
from electra_jax.inference.request import Answer, Model, Request
from electra_jax.run.workdir import chosen_step
from electra_jax.training.prediction import Predict


class FineTuned(Model):
    """A fine-tuned run, which answers with what it was trained for.

    It predicts with the checkpoint that the request names, or else with the one that the run's own
    predictions are from.
    """

    flags = ("sentences",)

    def __init__(self, config: ConfigDict, request: Request):
        self.task = make_task(config, log=lambda line: None)  # of files that are not needed
        self.by_line = request.sentences
        if self.by_line and not self.task.can_read_lines:
            raise UserError("--sentences is for runs that tag words only")
        workdir = request.workdir
        super().__init__(workdir, chosen_step(workdir) if request.step is None else request.step)
        self.predictor = Predictor(
            task=self.task,
            tokenizer=tokenizers.load(workdir / "tokenizer"),
            predict=Predict(self.mesh, make_objective(config, self.task).outputs),
            max_length=config.data.max_length,
            batch_size=self.batch_size,
        )

    def read(self, path: str) -> list[Any]:
        """See `Task.unlabeled`."""
        return self.task.unlabeled(path, self.by_line)

    def example(self, number: int, values: Mapping[str, Any], where: str) -> Any:
        """See `Task.example`."""
        return self.task.example(number, values, where)

    def respond(self, examples: Sequence[Any]) -> list[Answer]:
        """See `Task.answer`."""
        features = self.predictor.features(examples)
        predictions = self.predictor(self.params, examples, features)
        return [self.task.answer(prediction) for prediction in predictions]
