"""What a fine-tuned run leaves behind: `predictions/` and `results.json`; a summary of trials."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from electra_jax.files import read_json, write_text
from electra_jax.finetune.evaluation import Predictions, Scores
from electra_jax.finetune.tasks.base import Task
from electra_jax.run.workdir import RESULTS


def describe(scores: Scores) -> Iterator[str]:
    """A line for each split."""
    for split, of_split in scores.items():
        yield f"{split}: {', '.join(f'{name} {value:.4f}' for name, value in of_split.items())}"


def failed_splits(scores: Scores, floors: dict[str, float], metric: str) -> dict[str, str]:
    """The splits whose main score always giving the same answer reaches, too, with warnings."""
    return {
        split: f"warning: {split}: {metric} {scores[split][metric]:.4f} is no better than that of "
        f"always giving the same answer, {floor:.4f}: nothing is learned"
        for split, floor in floors.items()
        if scores[split][metric] <= floor
    }


def write_results(
    workdir: Path,
    task: Task,
    predictions: Predictions,
    scores: Scores,
    failed: Sequence[str],
    seed: int,
    step: int,
) -> None:
    """Writes predictions of all splits, and `results.json`.

    Args:
      failed: splits that nothing was learned for.
      step: of the checkpoint that has predicted.
    """
    for split, of_split in predictions.items():
        task.write(of_split, workdir / "predictions", split)
    content = {"task": task.name, "seed": seed, "step": step, "scores": scores}
    content |= {"failed": list(failed)} if failed else {}
    write_text(workdir / RESULTS, json.dumps(content, indent=2) + "\n")


def write_summary(workdir: Path, task: Task, trials: Sequence[Path]) -> dict:
    """Writes and returns the scores of all trials: each, their median and spread."""
    results = [read_json(path / RESULTS) for path in trials]
    scores = {
        split: {
            metric: spread([trial["scores"][split][metric] for trial in results])
            for metric in results[0]["scores"][split]
        }
        for split in task.eval_splits
    }
    summary = {
        "task": task.name,
        "main_metric": task.main_metric,
        "trials": results,
        "scores": scores,
    }
    write_text(workdir / RESULTS, json.dumps(summary, indent=2) + "\n")
    return summary


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, range and deviation."""
    return {
        "median": float(np.median(values)),
        "min": min(values),
        "max": max(values),
        "stddev": float(np.std(values)),
    }


def describe_summary(summary: dict) -> Iterator[str]:
    """A line for each split."""
    for split, scores in summary["scores"].items():
        failed = sum(split in trial.get("failed", ()) for trial in summary["trials"])
        medians = ", ".join(
            f"{metric} {x['median']:.4f} ({x['min']:.4f} to {x['max']:.4f})"
            for metric, x in scores.items()
        )
        yield (
            f"{split}: median of {len(summary['trials'])} trials: {medians}"
            + (f"; {failed} failed: no better than always the same answer" if failed else "")
        )
