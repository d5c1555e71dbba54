"""What a fine-tuned run answers to new examples: no training data, no labels, no scores.

The completed configuration of a run holds all that its task needs: kind, columns, labels, scheme
and range. An example is a row of a file, or a JSON object:

    text, or a pair    the columns of the task, such as {"title": TEXT, "body": TEXT}
    question           {"question": TEXT, "context": TEXT}
    tagging            {"words": [TEXT, ...]}, or {"text": TEXT} with spaces between the words

`id` may be given anywhere and comes back; otherwise examples are numbered from 0.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config import get_config
from electra_jax.data import tokenizers
from electra_jax.data.text import read_lines
from electra_jax.errors import UserError
from electra_jax.finetune import squad, tagging
from electra_jax.finetune.assembly import feature_rows, make_objective, make_task, to_predict
from electra_jax.finetune.sentences import text
from electra_jax.finetune.tables import is_json_lines, read_table
from electra_jax.finetune.task import TRAIN, Task
from electra_jax.inference.configuration import load_config
from electra_jax.inference.request import Answer, Model, Request
from electra_jax.run.workdir import chosen_step
from electra_jax.sharding.mesh import everywhere, make_mesh
from electra_jax.training.checkpoint import restore_params
from electra_jax.training.prediction import make_predict, predict_rows

Respond = Callable[[Sequence[Any]], list[Answer]]
SPAN = ("start", "end", "probability")


class FineTuned(Model):
    """A fine-tuned run, which answers with what it was trained for."""

    flags = ("sentences",)

    def __init__(self, config: ConfigDict, request: Request):
        self.task, self._respond = load(request.workdir, request.step, request.batch_size)
        self.has_sentences = request.sentences
        if request.sentences and self.task.head.kind != "tagging":
            raise UserError("--sentences is for runs that tag words only")

    def read(self, path: str) -> list[Any]:
        """The examples of a file, see `read`."""
        return read(self.task, path, self.has_sentences)

    def example(self, number: int, values: dict[str, Any], where: str) -> Any:
        """The example that a JSON object stands for, see `example`."""
        return example(self.task, number, values, where)

    def respond(self, examples: Sequence[Any]) -> list[Answer]:
        """What the network predicts for each example, in words."""
        return self._respond(examples)


def load(workdir: Path, step: int | None, batch_size: int) -> tuple[Task, Respond]:
    """The task of a fine-tuned run, and a function from examples to answers.

    Args:
      step: that of a checkpoint; None for the one that the run's own predictions are from.
      batch_size: rows that the network sees at once, if that is a multiple of the devices.

    Raises:
      UserError: there is no such run or checkpoint, or it is damaged.
    """
    config = load_config(workdir)
    for split in (TRAIN, "dev", "test"):
        config.data[split] = ""
    task = make_task(config, log=lambda line: None)  # of files that are not needed
    step = chosen_step(workdir) if step is None else step
    _, params = restore_params(workdir / "checkpoints", step)
    tokenizer = tokenizers.load(workdir / "tokenizer")
    mesh = make_mesh(get_config().parallel)  # the devices here, not those of the training
    predict = make_predict(mesh, make_objective(config, task).outputs)
    params = everywhere(mesh, params)
    rows_at_once = -(batch_size // -mesh.size) * mesh.size

    def respond(examples: Sequence[Any]) -> list[Answer]:
        if not examples:
            return []
        features = to_predict(task, examples, tokenizer, config.data.max_length)
        outputs = predict_rows(predict, params, feature_rows(features), rows_at_once)
        predictions = task.predict(examples, features, outputs)
        return [answer(task, guess) for guess in predictions]

    return task, respond


def answer(task: Task, guess: Any) -> Answer:
    """A prediction in words."""
    match task.head.kind:
        case "tagging":
            return vars(guess)
        case "qa":
            best = guess.n_best[0] if guess.text else None
            span = {name: vars(best)[name] if best else None for name in SPAN}
            n_best = [vars(span) for span in guess.n_best]
            return {"id": guess.id, "text": guess.text, **span} | {
                "null_odds": guess.null_odds,
                "n_best": n_best,
            }
        case "regression":
            return {"id": guess.id, "label": guess.label}
    shares = dict(zip(task.head.labels, guess.probabilities, strict=True))
    return {"id": guess.id, "label": guess.label, "probabilities": shares}


def example(task: Task, number: int, values: dict[str, Any], where: str) -> Any:
    """The example that a JSON object, or a row of a table, stands for.

    Raises:
      UserError: something is missing or of another kind; begins with `where`.
    """
    key = str(values.get("id", number))
    match task.head.kind:
        case "qa":
            question, context = (text(values, name, where) for name in ("question", "context"))
            return squad.Example(key, question, context, None)
        case "tagging":
            words = values.get("words")
            if words is None:
                words = text(values, "text", where).split()
            if not isinstance(words, list) or not all(isinstance(x, str) and x for x in words):
                raise UserError(f"{where}: words is {words!r}; allowed: a list of words")
            return tagging.Example(key, tuple(words), None)
    return task.unlabelled(number, values, where)


def read(task: Task, path: str, has_sentences: bool) -> list[Any]:
    """The examples of a file, in order; labels that are in it are not looked at.

    Args:
      has_sentences: for tagging: the file has a sentence a line, its words between spaces, in place
        of words in columns.

    Raises:
      UserError: the file cannot be read, or is not of the task's format; names the line.
    """
    is_text = task.head.kind in ("classification", "multilabel", "regression")
    if is_text or is_json_lines(path):
        return list(from_table(task, path))
    if task.head.kind == "qa":
        return [dataclasses.replace(found, answers=None) for found in squad.read_squad(path)]
    if has_sentences:
        sentences = [line.split() for line in read_lines(path)]
    else:
        sentences = tagging.read_words(path)
    return [tagging.Example(str(i), tuple(words), None) for i, words in enumerate(sentences)]


def from_table(task: Task, path: str) -> Iterator[Any]:
    """The rows of a table, by `example`."""
    for number, (line, values) in enumerate(read_table(path)):
        yield example(task, number, values, f"{path}, line {line}")
