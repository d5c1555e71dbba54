"""Predictions of a network, their scores, and what a fine-tuned run leaves behind of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from electra_jax.data.features import Arrays, FeatureRows
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.files import read_json, write_json
from electra_jax.finetune.buckets import trimmed
from electra_jax.finetune.tasks.base import Scores, Task
from electra_jax.modeling.params import Params
from electra_jax.monitoring.display import log_line
from electra_jax.run.workdir import RESULTS
from electra_jax.training.prediction import Predict, predict_rows

INPUTS = ("input_ids", "segment_ids", "position_ids", "token_type_ids")

Predictions = dict[str, list]  # of each split


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A network that predicts examples of a task."""

    task: Task
    tokenizer: Tokenizer
    predict: Predict  # compiled outputs of the head
    max_length: int  # tokens of a row
    batch_size: int  # rows that the network sees at once

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


def as_metrics(scores: Mapping[str, Scores]) -> dict[str, float]:
    """Scores of the first split by `eval/NAME`, of the others by `eval/SPLIT/NAME`."""
    return {
        f"eval/{name}" if place == 0 else f"eval/{split}/{name}": value
        for place, (split, of_split) in enumerate(scores.items())
        for name, value in of_split.items()
    }


def write_results(
    workdir: Path,
    task: Task,
    predictions: Predictions,
    scores: Mapping[str, Scores],
    floors: Mapping[str, float],
    seed: int,
    step: int,
) -> None:
    """Writes predictions of all splits and `results.json`, and logs the scores.

    Args:
      floors: the main score of always giving the same answer, for each labeled split.
      step: of the checkpoint that has predicted.
    """
    metric, failed = task.main_metric, []
    for split, of_split in scores.items():
        log_line(f"{split}: {', '.join(f'{name} {x:.4f}' for name, x in of_split.items())}")
        if of_split[metric] <= floors[split]:
            failed.append(split)
            log_line(
                f"warning: {split}: {metric} {of_split[metric]:.4f} is no better than that of "
                f"always giving the same answer, {floors[split]:.4f}: nothing is learned"
            )
    if jax.process_index() == 0:
        for split, of_split in predictions.items():
            task.write(of_split, workdir / "predictions", split)
        content = {"task": task.name, "seed": seed, "step": step, "scores": scores}
        content |= {"failed": failed} if failed else {}
        write_json(workdir / RESULTS, content)


def write_summary(workdir: Path, task: Task, workdirs: Sequence[Path]) -> None:
    """Writes the scores of all trials: each, their median and spread; logs the latter."""
    trials, scores = [read_json(path / RESULTS) for path in workdirs], {}
    for split in task.eval_splits:
        scores[split], shown = {}, []
        for metric in trials[0]["scores"][split]:
            values = [trial["scores"][split][metric] for trial in trials]
            median, low, high = float(np.median(values)), min(values), max(values)
            spread = {"median": median, "min": low, "max": high, "stddev": float(np.std(values))}
            scores[split][metric] = spread
            shown.append(f"{metric} {median:.4f} ({low:.4f} to {high:.4f})")
        failed = sum(split in trial.get("failed", ()) for trial in trials)
        note = f"; {failed} failed: no better than always the same answer" if failed else ""
        log_line(f"{split}: median of {len(trials)} trials: {', '.join(shown)}{note}")
    summary = {"task": task.name, "main_metric": task.main_metric}
    summary |= {"trials": trials, "scores": scores}
    write_json(workdir / RESULTS, summary)
