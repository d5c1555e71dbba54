"""Fine-tuning: an encoder, a task and a head as a job for the loop, once for every seed."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from electra_jax.checks import check_best
from electra_jax.data import loader
from electra_jax.data.features import Arrays
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.finetune import results
from electra_jax.finetune.buckets import Buckets, make_buckets
from electra_jax.finetune.config import (
    layerwise_decay,
    learning_rate,
    make_objective,
    make_task,
    settings,
    sizes,
    validate,
)
from electra_jax.finetune.evaluation import (
    Evaluation,
    Predictions,
    Predictor,
    as_metrics,
)
from electra_jax.finetune.objective import FineTuning
from electra_jax.finetune.tasks.base import TRAIN, Task
from electra_jax.interop.pretrained import Pretrained, load_encoder
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.params import Params, path_name
from electra_jax.monitoring.display import log_line
from electra_jax.monitoring.writer import read_metrics
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import RESULTS, check, steps_in, write_run_files
from electra_jax.settings import field
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training import loop
from electra_jax.training.checkpoint import Checkpoints, restore_params
from electra_jax.training.job import Data, Evaluator, IsStopped, Job, describe_step
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.prediction import Predict
from electra_jax.training.program import Program, make_trials_program, program_of

Batches = Iterator[dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Work:
    """What all trials share.

    Attributes:
      rows: to train on.
      num_examples: that they are from.
      batches: `loader.train_batches` of the rows, with all settings but seed and place.
      program: of a single trial; `with_seed` makes it that of another one.
    """

    task: Task
    pretrained: Pretrained
    rows: Buckets
    num_examples: int
    batches: Callable[..., Batches]
    evaluation: Evaluation
    objective: FineTuning
    optimizer: OptimizerConfig
    mesh: Mesh
    program: Program


def finetune(config: ConfigDict, workdir: Path) -> None:
    """Train, score and predict, for every seed; what is finished stays as it is.

    A single trial is a run in `workdir`; several have a directory each below it. `results.json`
    has the scores.

    Raises:
      UserError: the configuration, the data, the weights or what `workdir` holds does not fit. In
        this case nothing has been written there.
      FloatingPointError, Stopped, OSError: as `loop.run`.
    """
    validate(config, jax.device_count())
    pretrained = load_encoder(config.init_from)
    log_line(f"weights of {config.init_from}:")
    for line in pretrained.table:
        log_line(f"  {line}")
    config, work = prepare(config, make_task(config, log_line), pretrained)
    workdirs = [workdir / f"trial_{i}" for i in range(config.num_trials)]
    workdirs = workdirs if config.num_trials > 1 else [workdir]
    for number, path in enumerate(workdirs):
        check_workdir(trial_config(config, config.seed + number), path)
    with Interruption() as interruption:
        for first in range(0, config.num_trials, config.trials_at_once):
            group = workdirs[first : first + config.trials_at_once]
            if all((path / RESULTS).exists() for path in group) and config.resume == "same":
                log_line(f"{group[0]}: nothing to do, there is a {RESULTS}")
                continue
            trials = {config.seed + first + i: path for i, path in enumerate(group)}
            if len(trials) == 1:
                run_trial(config, trials, work, interruption)
            else:
                together = workdir / f"trials_{first}_to_{first + len(group) - 1}"
                run_together(config, trials, together, work, interruption)
    if config.num_trials > 1 and jax.process_index() == 0:
        summary = results.write_summary(workdir, work.task, workdirs)
        for line in results.describe_summary(summary):
            log_line(line)


def prepare(config: ConfigDict, task: Task, pretrained: Pretrained) -> tuple[ConfigDict, Work]:
    """The completed configuration; data, network and compiled functions for all trials."""
    tokenizer, max_length = pretrained.tokenizer, config.data.max_length
    features = task.features(read_split(task, TRAIN), tokenizer, max_length, training=True)
    num_examples = len(np.unique(features.pop("example")))
    if not num_examples:
        raise UserError(f"{task.place(TRAIN)}: no example can be trained on")
    config = complete(config, task, pretrained.encoder_config, len(features["input_ids"]))
    mesh, objective = make_mesh(config.parallel), make_objective(config, task)
    predict = Predict(mesh, objective.outputs)
    predictor = Predictor(task, tokenizer, predict, max_length, config.batch_size)
    splits = {name: read_split(task, name) for name in (*task.eval_splits, *task.test_splits)}
    splits = {name: (examples, predictor.features(examples)) for name, examples in splits.items()}
    rows = make_buckets(features, config.data.length_buckets, config.batch_size)
    num_steps = max(1, int(len(rows) / config.batch_size * config.num_train_epochs))
    options = dict(config.optimizer)
    warmup_steps = round(options.pop("warmup_fraction") * num_steps)
    optimizer = OptimizerConfig(num_steps=num_steps, warmup_steps=warmup_steps, **options)
    return config, Work(
        task=task,
        pretrained=pretrained,
        rows=rows,
        num_examples=num_examples,
        batches=functools.partial(
            loader.train_batches,
            rows,
            batch_size=config.batch_size,
            weights=rows.weights,
            one_group=True,
            num_threads=config.data.num_threads,
            prefetch=config.data.prefetch,
        ),
        evaluation=Evaluation(predictor, splits),
        objective=objective,
        optimizer=optimizer,
        mesh=mesh,
        program=program_of(config, mesh, objective, optimizer),
    )


def check_workdir(config: ConfigDict, workdir: Path) -> list[str]:
    """See `workdir.check`."""
    return check(config, workdir, settings(), fits)


def fits(before: ConfigDict, now: ConfigDict, step: int) -> bool:
    """Whether both configurations have the same parameters, as far as they tell."""
    names = ("data.labels", *(f"model.{name}" for name in sizes()))
    return all(field(before, name) == field(now, name) for name in names)


def read_split(task: Task, name: str) -> Sequence:
    """The examples of a split, of which there must be some."""
    examples = task.read(name)
    if not examples:
        raise UserError(f"{task.place(name)}: {name} has no examples; allowed: at least one")
    return examples


def complete(config: ConfigDict, task: Task, encoder: EncoderConfig, num_rows: int) -> ConfigDict:
    """`config` with all that follows from weights and data filled in.

    Raises:
      UserError: sizes are given that the weights do not have, or rows are too long for them.
    """
    config = config.copy_and_resolve_references()
    for name, size in encoder.sizes().items():
        if config.model[name] not in (None, size):
            raise UserError(
                f"config.model.{name} is {config.model[name]}, but {config.init_from} has {size}; "
                "it need not be given"
            )
        config.model[name] = size
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
        raise UserError("config.checkpoint.keep_best needs a labeled config.data.dev")
    optimizer = config.optimizer
    optimizer.learning_rate = optimizer.learning_rate or learning_rate(encoder)
    optimizer.layerwise_decay = optimizer.layerwise_decay or layerwise_decay(encoder)
    config.data.update(task.resolved())
    return config


def trial_config(config: ConfigDict, seed: int) -> ConfigDict:
    """That of one of several trials: a run like any other, with its own seed."""
    config = config.copy_and_resolve_references()
    config.update(seed=seed, num_trials=1, trials_at_once=1)
    return config


def run_trial(
    config: ConfigDict, trials: Mapping[int, Path], work: Work, interruption: Interruption
) -> None:
    """One seed: train, then predict and score all splits.

    Args:
      trials: the directory of the trial by its seed.
    """
    [(seed, workdir)] = trials.items()
    config = trial_config(config, seed)
    newest: Predictions = {}
    job = make_job(
        work,
        work.program.with_seed(seed),
        [seed],
        evaluate=lambda params, is_stopped: evaluate(work, params, newest, is_stopped),
        keep_best=config.checkpoint.keep_best,
        patience=config.patience,
    )
    state = loop.run(config, workdir, job, interruption)
    step, params = int(state.step), state.params
    if config.checkpoint.keep_best:
        step = best_step(workdir, job.evaluator)
        log_line(f"predicting with step {step:,}, the best by {job.evaluator.keep_best}")
        _, best = restore_params(workdir / "checkpoints", step)
        params = jax.device_put(best, jax.tree.map(lambda x: x.sharding, params))
        newest.clear()
    finish(work, workdir, seed, step, params, newest)


def run_together(
    config: ConfigDict,
    trials: Mapping[int, Path],
    together: Path,
    work: Work,
    interruption: Interruption,
) -> None:
    """Several seeds as one run; what comes out is a directory for each, as if it had run alone.

    Args:
      trials: the directory of each trial by its seed.
      together: of all of them.
    """
    one_of = jax.jit(
        lambda tree, place: jax.tree.map(lambda x: x[place], tree), static_argnames="place"
    )
    newest: list[Predictions] = [{} for _ in trials]

    def means(params: Params, is_stopped: IsStopped) -> dict[str, float] | None:
        found = []
        for place, known in enumerate(newest):
            found.append(evaluate(work, one_of(params, place=place), known, is_stopped))
            if found[-1] is None:
                return None
        return {name: float(np.mean([scores[name] for scores in found])) for name in found[0]}

    program = make_trials_program(
        work.mesh, work.objective, work.optimizer, tuple(trials), config.num_microbatches
    )
    job = make_job(work, program, [*trials], evaluate=means)
    state = loop.run(config, together, job, interruption)
    for place, (seed, path) in enumerate(trials.items()):
        of_one = one_of(state, place=place)
        step = int(of_one.step)
        with Checkpoints(path / "checkpoints", job.data.hash, keep=1) as checkpoints:
            checkpoints.save(step, of_one, {}, {})
        if jax.process_index() == 0:
            write_run_files(trial_config(config, seed), path, job.data.tokenizer, job.facts)
        finish(work, path, seed, step, of_one.params, newest[place])


def evaluate(
    work: Work, params: Params, known: Predictions, is_stopped: IsStopped
) -> dict[str, float] | None:
    """The scores of all labeled splits, whose predictions join `known`; None if stopped."""
    found = work.evaluation.predictions(params, work.task.eval_splits, is_stopped)
    if found is None:
        return None
    known.update(found)
    return as_metrics(work.evaluation.scores(found))


def finish(
    work: Work, workdir: Path, seed: int, step: int, params: Params, known: Predictions
) -> None:
    """Predictions of all splits, and `results.json`.

    Args:
      step, params: of the checkpoint that predicts.
      known: what it has predicted already.
    """
    evaluation, metric = work.evaluation, work.task.main_metric
    missing = [name for name in evaluation.splits if name not in known]
    predictions = known | evaluation.predictions(params, missing)
    scores = evaluation.scores(predictions)
    failed = results.failed_splits(scores, evaluation.floors(), metric)
    for line in (*results.describe(scores), *failed.values()):
        log_line(line)
    if jax.process_index() == 0:
        results.write_results(workdir, work.task, predictions, scores, [*failed], seed, step)


def make_job(
    work: Work,
    program: Program,
    seeds: Sequence[int],
    evaluate: Callable[..., dict[str, float] | None],
    keep_best: bool = False,
    patience: int = 0,
) -> Job:
    """What the loop is to do for one seed, or for several at once; `program` has them, too."""
    rows, num_steps, task = work.rows, work.optimizer.num_steps, work.task
    arrays, params, tokenizer = rows.rows.arrays, work.pretrained.params, work.pretrained.tokenizer
    batch_size = work.evaluation.predictor.batch_size

    def batches(start: int, share: tuple[int, int]) -> Batches:
        place = {"process_index": share[0], "process_count": share[1]}
        sources = [work.batches(start, num_steps - start, seed=seed, **place) for seed in seeds]
        return sources[0] if len(seeds) == 1 else stacked(sources)

    real = int(arrays["segment_ids"].sum()) / (len(rows) * rows.mean_width)
    flops_per_token = work.objective.flops_per_token(round(rows.mean_width))
    facts = {
        "task": task.name,
        "examples": f"{work.num_examples:,}",
        "rows": f"{len(rows):,}",
        "padded to": " or ".join(map(str, rows.widths)),
        "padding": f"{1 - real:.2%}",
        "epochs": f"{num_steps * batch_size / len(rows):.2f}",
    }
    splits = {name: f"{len(x):,} examples" for name, (x, _) in work.evaluation.splits.items()}
    tokens = round(batch_size * rows.mean_width) * len(seeds)
    return Job(
        objective=work.objective,
        program=program,
        num_steps=num_steps,
        data=Data(tokenizer, content_hash(arrays, tokenizer), batches),
        evaluator=Evaluator(
            run=evaluate,
            metrics={**work.objective.metrics, **task.metrics},
            keep_best=f"eval/{task.main_metric}" if keep_best else "",
            patience=patience,
        ),
        initial={path_name(path): x for path, x in jax.tree.leaves_with_path(params)},
        facts={"data": facts | splits, "step": describe_step(tokens, flops_per_token)},
        flops_per_token=flops_per_token,
        check=check_workdir,
    )


def stacked(sources: list[Batches]) -> Batches:
    """Batches of several trials, [B, ...] each, as one of [T, B, ...]."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.enter_context(contextlib.closing(source))
        for batches in zip(*sources, strict=True):
            yield {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def content_hash(arrays: Arrays, tokenizer: Tokenizer) -> str:
    """The hash of the rows that are trained on; checkpoints hold it."""
    digest = hashlib.sha256(tokenizer.hash.encode())
    # The name of then, so that checkpoints of version 0.1.0 go on.
    arrays = {"piece_ids" if name == "segment_ids" else name: x for name, x in arrays.items()}
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]))
    return digest.hexdigest()


def best_step(workdir: Path, evaluator: Evaluator) -> int:
    """Of the checkpoints there are, that with the best evaluation; the earliest of equal ones."""
    saved = steps_in(workdir / "checkpoints")
    rows = [row for row in read_metrics(workdir) if row["step"] in saved]
    return max(rows, key=evaluator.score)["step"]
