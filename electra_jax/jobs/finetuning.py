"""Fine-tuning: an encoder, a task and a head as a job for the loop, once for every seed."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.config import check_best
from electra_jax.data import loader
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.assembly import feature_rows, make_objective, make_task, to_predict
from electra_jax.finetune.buckets import Buckets, make_buckets
from electra_jax.finetune.config import SIZES, layerwise_decay, learning_rate, settings, validate
from electra_jax.finetune.objective import FineTuning
from electra_jax.finetune.task import TRAIN, Arrays, Task
from electra_jax.interop.pretrained import Pretrained, load_encoder
from electra_jax.modeling.encoder import EncoderConfig
from electra_jax.modeling.params import Params, path_name
from electra_jax.monitoring.writer import read_metrics
from electra_jax.objectives.metrics import Metric
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import RESULTS, check, steps_in, write_run_files
from electra_jax.settings import field
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training import loop
from electra_jax.training.checkpoint import Checkpoints, restore_params
from electra_jax.training.loop import IsStopped, Job, log_line
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.prediction import Predict, make_predict, predict_rows
from electra_jax.training.program import Program, make_trials_program, program_of

Predictions = dict[str, list]  # of each split
SCORES = {
    name: Metric(label, better="higher", console=console, figure="Scores", tile="{:.4g}")
    for name, label, console in (
        ("accuracy", "accuracy", "acc"),
        ("f1", "F1", "f1"),
        ("macro_f1", "macro F1", ""),
        ("micro_f1", "micro F1", ""),
        ("matthews", "Matthews' correlation", "matthews"),
        ("spearman", "Spearman's correlation", "spearman"),
        ("pearson", "Pearson's correlation", ""),
        ("exact", "exact match", "exact"),
        ("exact_match", "exact match", ""),
    )
}


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples that are predicted, and what the network sees of them."""

    name: str
    examples: Sequence
    features: Arrays


@dataclasses.dataclass(frozen=True)
class Work:
    """What all trials share.

    Attributes:
      rows: to train on.
      num_examples: that they are from.
      splits: those that are predicted.
      program: trains; `with_seed` makes it that of a trial.
      predict: compiled for all splits.
    """

    task: Task
    pretrained: Pretrained
    rows: Buckets
    num_examples: int
    splits: Sequence[Split]
    objective: FineTuning
    optimizer: OptimizerConfig
    program: Program
    predict: Predict


def finetune(config: ConfigDict, workdir: Path) -> None:
    """Train, score and predict, for every seed; what is finished stays as it is.

    A single trial is a run in `workdir`; several have a directory each below it. `results.json`
    has the scores.

    Raises:
      UserError: the configuration, the data, the weights or what `workdir` holds does not fit. In
        this case nothing has been written there.
      FloatingPointError, Stopped, OSError: as `train.run`.
    """
    validate(config, jax.device_count())
    pretrained = load_encoder(config.init_from)
    log_line(f"weights of {config.init_from}:")
    for line in pretrained.table:
        log_line(f"  {line}")
    task = make_task(config)
    tokenizer, max_length = pretrained.tokenizer, config.data.max_length
    examples = read_split(config, task, TRAIN)
    features = task.features(examples, tokenizer, max_length, training=True)
    if not len(features["example"]):
        raise UserError(f"config.data.{TRAIN} is {config.data.train!r}: none can be trained on")
    splits = []
    for name in (*task.eval_splits, *task.test_splits):
        examples = read_split(config, task, name)
        splits.append(Split(name, examples, to_predict(task, examples, tokenizer, max_length)))
    config = complete(config, task, pretrained.encoder_config, len(features["example"]))
    work = make_work(config, task, pretrained, features, splits)
    numbers = range(config.num_trials)
    workdirs = [workdir / f"trial_{i}" if config.num_trials > 1 else workdir for i in numbers]
    for number, path in enumerate(workdirs):
        check_workdir(trial_config(config, number), path)
    with Interruption() as interruption:
        for first in numbers[:: config.trials_at_once]:
            group = numbers[first : first + config.trials_at_once]
            is_done = all((workdirs[i] / RESULTS).exists() for i in group)
            if is_done and config.resume == "same":
                log_line(f"{workdirs[first]}: nothing to do, there is a {RESULTS}")
            elif len(group) == 1:
                run_trial(trial_config(config, first), workdirs[first], work, interruption)
            else:
                run_together(config, group, workdir, workdirs, work, interruption)
    if config.num_trials > 1 and jax.process_index() == 0:
        summary = summarize(task, workdirs)
        write_text(workdir / RESULTS, json.dumps(summary, indent=2) + "\n")
        for line in describe_summary(summary):
            log_line(line)


def check_workdir(config: ConfigDict, workdir: Path) -> list[str]:
    """See `workdir.check`."""
    return check(config, workdir, settings(), fits)


def fits(before: ConfigDict, now: ConfigDict, step: int) -> bool:
    """Whether both configurations have the same parameters, as far as they tell."""
    names = ("data.labels", *(f"model.{name}" for name in SIZES))
    return all(field(before, name) == field(now, name) for name in names)


def read_split(config: ConfigDict, task: Task, name: str) -> Sequence:
    """The examples of a split, of which there must be some."""
    examples = task.read(name)
    if not examples:
        place = "source" if config.data.kind == "glue" else name
        raise UserError(f"config.data.{place} is {config.data[place]!r}: {name} has no examples")
    return examples


def make_work(
    config: ConfigDict,
    task: Task,
    pretrained: Pretrained,
    features: Arrays,
    splits: Sequence[Split],
) -> Work:
    """Batches, network and compiled functions for all trials.

    Args:
      config: complete.
      features: of the rows to train on.
    """
    num_examples = len(np.unique(features["example"]))
    arrays = {name: x for name, x in features.items() if name != "example"}
    rows = make_buckets(arrays, config.data.length_buckets, config.batch_size)
    num_steps = max(1, int(len(rows) / config.batch_size * config.num_train_epochs))
    options = dict(config.optimizer)
    warmup = round(options.pop("warmup_fraction") * num_steps)
    optimizer = OptimizerConfig(num_steps=num_steps, warmup_steps=warmup, **options)
    objective = make_objective(config, task)
    mesh = make_mesh(config.parallel)
    return Work(
        task,
        pretrained,
        rows,
        num_examples,
        splits,
        objective,
        optimizer,
        program_of(config, mesh, objective, optimizer),
        make_predict(mesh, objective.outputs),
    )


def complete(config: ConfigDict, task: Task, encoder: EncoderConfig, num_rows: int) -> ConfigDict:
    """`config` with all that follows from weights and data filled in.

    Raises:
      UserError: sizes are given that the weights do not have, or rows are too long for them.
    """
    config = config.copy_and_resolve_references()
    for name in SIZES:
        found = getattr(encoder, name)
        if config.model[name] not in (None, found):
            raise UserError(
                f"config.model.{name} is {config.model[name]}, but {config.init_from} has {found}; "
                "it need not be given"
            )
        config.model[name] = found
    if config.data.max_length > encoder.max_positions:
        raise UserError(
            f"config.data.max_length is {config.data.max_length}, but {config.init_from} has "
            f"{encoder.max_positions} positions"
        )
    per_epoch = max(1, round(num_rows / config.batch_size))
    config.eval_every_steps = config.eval_every_steps or per_epoch
    config.checkpoint.every_steps = config.checkpoint.every_steps or config.eval_every_steps
    check_best(config.checkpoint, config.eval_every_steps)
    if config.checkpoint.keep_best and not task.eval_splits:
        raise UserError("config.checkpoint.keep_best needs a labelled config.data.dev")
    optimizer = config.optimizer
    optimizer.learning_rate = optimizer.learning_rate or learning_rate(encoder)
    optimizer.layerwise_decay = optimizer.layerwise_decay or layerwise_decay(encoder)
    config.data.labels = task.head.labels
    if config.data.kind == "tagging":
        config.data.scheme = task.scheme
    if task.head.kind == "regression":
        config.data.value_range = tuple(task.value_range)
    return config


def trial_config(config: ConfigDict, number: int) -> ConfigDict:
    """That of one of several trials: a run like any other, with its own seed."""
    config = config.copy_and_resolve_references()
    config.update(seed=config.seed + number, num_trials=1, trials_at_once=1)
    return config


def run_trial(config: ConfigDict, workdir: Path, work: Work, interruption: Interruption) -> None:
    """One seed: train, then predict and score all splits."""
    newest: Predictions = {}

    def evaluate(_, params: Params, is_stopped: IsStopped) -> dict[str, float] | None:
        found = predict_splits(work, work.task.eval_splits, params, config, is_stopped)
        newest.update(found or {})
        return found and metrics(work, found)

    program = work.program.with_seed(config.seed)
    job = make_job(config, work, program, (config.seed,), evaluate)
    state = loop.run(config, workdir, job, interruption)
    step, params = int(state.step), state.params
    if config.checkpoint.keep_best:
        step = best_step(workdir, job.keep_best)
        log_line(f"predicting with step {step:,}, the best by {job.keep_best}")
        _, best = restore_params(workdir / "checkpoints", step)
        params = jax.device_put(best, jax.tree.map(lambda x: x.sharding, params))
        newest.clear()
    finish(config, workdir, work, step, params, newest)


def run_together(
    config: ConfigDict,
    group: Sequence[int],
    workdir: Path,
    workdirs: Sequence[Path],
    work: Work,
    interruption: Interruption,
) -> None:
    """Several seeds as one run; what comes out is a directory for each, as if it had run alone.

    Args:
      group: numbers of the trials.
      workdir: of all of them.
      workdirs: of each trial.
    """
    one_of = jax.jit(
        lambda tree, place: jax.tree.map(lambda x: x[place], tree), static_argnames="place"
    )
    seeds = tuple(config.seed + number for number in group)
    newest: list[Predictions] = [{} for _ in group]

    def evaluate(_, params: Params, is_stopped: IsStopped) -> dict[str, float] | None:
        """Means over the trials."""
        results = []
        for place, of_this in enumerate(newest):
            of_one = one_of(params, place=place)
            found = predict_splits(work, work.task.eval_splits, of_one, config, is_stopped)
            if found is None:
                return None
            of_this.update(found)
            results.append(metrics(work, found))
        return {name: float(np.mean([result[name] for result in results])) for name in results[0]}

    program = make_trials_program(
        make_mesh(config.parallel),
        work.objective,
        work.optimizer,
        seeds,
        config.num_microbatches,
    )
    job = make_job(config, work, program, seeds, evaluate)
    together = workdir / f"trials_{group[0]}_to_{group[-1]}"
    state = loop.run(config, together, job, interruption)
    for place, number in enumerate(group):
        own, path = trial_config(config, number), workdirs[number]
        of_one = one_of(state, place=place)
        with Checkpoints(path / "checkpoints", job.data_hash, keep=1) as checkpoints:
            if checkpoints.latest_step() is None:
                checkpoints.save(int(of_one.step), of_one, {}, {})
        if jax.process_index() == 0:
            write_run_files(own, path, job.tokenizer, job.facts)
        finish(own, path, work, int(of_one.step), of_one.params, newest[place])


def predict_splits(
    work: Work,
    names: Sequence[str],
    params: Params,
    config: ConfigDict,
    is_stopped: IsStopped = lambda: False,
) -> Predictions | None:
    """Predictions for the splits in `names`; None where `is_stopped` has said so."""
    found = {}
    for split in work.splits:
        if split.name in names:
            rows = feature_rows(split.features)
            outputs = predict_rows(work.predict, params, rows, config.batch_size, is_stopped)
            if outputs is None:
                return None
            found[split.name] = work.task.predict(split.examples, split.features, outputs)
    return found


def metrics(work: Work, found: Predictions) -> dict[str, float]:
    """Scores of the labelled splits by `eval/NAME`, of all but the first by `eval/SPLIT/NAME`."""
    first, *_ = work.task.eval_splits or ("",)
    return {
        f"eval/{name}" if split == first else f"eval/{split}/{name}": value
        for split, scores in scores_of(work, found).items()
        for name, value in scores.items()
    }


def scores_of(work: Work, found: Predictions) -> dict[str, dict[str, float]]:
    """Of each labelled split."""
    task = work.task
    return {
        split.name: task.score(split.examples, found[split.name])
        for split in work.splits
        if split.name in task.eval_splits
    }


def finish(
    config: ConfigDict,
    workdir: Path,
    work: Work,
    step: int,
    params: Params,
    known: Predictions,
) -> None:
    """Predictions of all splits, and `results.json`.

    Args:
      step, params: of the checkpoint that predicts.
      known: what it has predicted already.
    """
    missing = [split.name for split in work.splits if split.name not in known]
    found = known | predict_splits(work, missing, params, config)
    scores = scores_of(work, found)
    for name, of_split in scores.items():
        log_line(f"{name}: {', '.join(f'{metric} {x:.4f}' for metric, x in of_split.items())}")
    failed = [*no_better_than_constant(work, scores)]
    if jax.process_index() == 0:
        for name, predictions in found.items():
            work.task.write(predictions, workdir / "predictions", name)
        content = {"task": work.task.name, "seed": config.seed, "step": step, "scores": scores}
        content |= {"failed": failed} if failed else {}
        write_text(workdir / RESULTS, json.dumps(content, indent=2) + "\n")


def no_better_than_constant(work: Work, scores: dict[str, dict[str, float]]) -> Iterator[str]:
    """The splits whose main score always giving the same answer reaches, too; the log says so."""
    task = work.task
    for split in work.splits:
        if split.name in scores:
            found, floor = scores[split.name][task.main_metric], task.floor(split.examples)
            if found <= floor:
                log_line(
                    f"warning: {split.name}: {task.main_metric} {found:.4f} is no better than "
                    f"that of always giving the same answer, {floor:.4f}: nothing is learnt"
                )
                yield split.name


def make_job(
    config: ConfigDict,
    work: Work,
    program: Program,
    seeds: Sequence[int],
    evaluate: Callable[..., dict[str, float] | None],
) -> Job:
    """What the loop is to do for one seed, or for several at once; `program` has them, too."""
    rows, num_steps = work.rows, work.optimizer.num_steps
    arrays = rows.rows.arrays

    def of_seed(seed: int, start: int, share: tuple[int, int]) -> Iterator[dict[str, np.ndarray]]:
        return loader.train_batches(
            rows,
            start,
            num_steps - start,
            batch_size=config.batch_size,
            seed=seed,
            weights=rows.weights,
            one_group=True,
            process_index=share[0],
            process_count=share[1],
            num_threads=config.data.num_threads,
            prefetch=config.data.prefetch,
        )

    def batches(start: int, share: tuple[int, int]) -> Iterator[dict[str, np.ndarray]]:
        if len(seeds) == 1:
            return of_seed(seeds[0], start, share)
        return stacked([of_seed(seed, start, share) for seed in seeds])

    real = int(arrays["piece_ids"].sum()) / (len(rows) * rows.mean_width)
    flops_per_token = work.objective.flops_per_token(round(rows.mean_width))
    initial = {path_name(path): x for path, x in jax.tree.leaves_with_path(work.pretrained.params)}
    facts = {
        "data": {
            "task": work.task.name,
            "examples": f"{work.num_examples:,}",
            "rows": f"{len(rows):,}",
            "padded to": " or ".join(f"{width}" for width in rows.widths),
            "padding": f"{1 - real:.2%}",
            "epochs": f"{num_steps * config.batch_size / len(rows):.2f}",
        }
        | {split.name: f"{len(split.examples):,} examples" for split in work.splits},
        "step": loop.describe_step(
            round(config.batch_size * rows.mean_width) * len(seeds), flops_per_token
        ),
    }
    return Job(
        work.objective,
        num_steps,
        program,
        work.pretrained.tokenizer,
        content_hash(arrays, work.pretrained.tokenizer),
        batches,
        evaluate,
        initial,
        facts,
        flops_per_token,
        work.objective.metrics | SCORES,
        check_workdir,
        keep_best=f"eval/{work.task.main_metric}" if config.checkpoint.keep_best else "",
        patience=config.patience,
    )


def stacked(sources: list[Iterator[dict[str, np.ndarray]]]) -> Iterator[dict[str, np.ndarray]]:
    """Batches of several trials, [B, ...] each, as one of [T, B, ...]."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.enter_context(contextlib.closing(source))
        for batches in zip(*sources, strict=True):
            yield {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def content_hash(arrays: Arrays, tokenizer: Tokenizer) -> str:
    """Of the rows that are trained on."""
    digest = hashlib.sha256(tokenizer.hash.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]))
    return digest.hexdigest()


def best_step(workdir: Path, metric: str) -> int:
    """Of the checkpoints there are, that with the highest score; the earliest of equal ones."""
    saved = steps_in(workdir / "checkpoints")
    rows = [row for row in read_metrics(workdir) if metric in row and row["step"] in saved]
    return max(rows, key=lambda row: row[metric])["step"]


def summarize(task: Task, workdirs: Sequence[Path]) -> dict:
    """Scores of all trials: each, their median and spread."""
    trials = [json.loads((path / RESULTS).read_text()) for path in workdirs]
    scores = {
        split: {
            metric: spread([trial["scores"][split][metric] for trial in trials])
            for metric in trials[0]["scores"][split]
        }
        for split in task.eval_splits
    }
    return {
        "task": task.name,
        "main_metric": task.main_metric,
        "trials": trials,
        "scores": scores,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, range and deviation."""
    return {
        "median": float(np.median(values)),
        "min": min(values),
        "max": max(values),
        "stddev": float(np.std(values)),
    }


def describe_summary(summary: dict) -> Iterator[str]:
    """A line for each split."""
    for name, scores in summary["scores"].items():
        failed = sum(name in trial.get("failed", ()) for trial in summary["trials"])
        medians = ", ".join(
            f"{metric} {x['median']:.4f} ({x['min']:.4f} to {x['max']:.4f})"
            for metric, x in scores.items()
        )
        yield (
            f"{name}: median of {len(summary['trials'])} trials: {medians}"
            + (f"; {failed} failed: no better than always the same answer" if failed else "")
        )
