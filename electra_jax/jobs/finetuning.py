"""Fine-tuning: an encoder, a task and a head as a job for the loop, once for every seed."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from electra_jax.config import check_best
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
    Split,
    as_metrics,
)
from electra_jax.finetune.objective import FineTuning
from electra_jax.finetune.tasks.base import TRAIN, Task
from electra_jax.interop.pretrained import Pretrained, load_encoder
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.params import Params, path_name
from electra_jax.monitoring.writer import read_metrics
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import RESULTS, check, steps_in, write_run_files
from electra_jax.settings import field
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training import loop
from electra_jax.training.checkpoint import Checkpoints, restore_params
from electra_jax.training.loop import IsStopped, Job, log_line
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.prediction import make_predict
from electra_jax.training.program import Program, make_trials_program, program_of

Batches = Iterator[dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Work:
    """What all trials share.

    Attributes:
      rows: to train on.
      num_examples: that they are from.
      batches: (seed, first step, (i, n)) to batches, see `Job.batches`.
    """

    task: Task
    pretrained: Pretrained
    rows: Buckets
    num_examples: int
    batches: Callable[[int, int, tuple[int, int]], Batches]
    evaluation: Evaluation
    mesh: Mesh
    objective: FineTuning
    optimizer: OptimizerConfig


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
    numbers = range(config.num_trials)
    workdirs = [workdir / f"trial_{i}" if config.num_trials > 1 else workdir for i in numbers]
    for number, path in enumerate(workdirs):
        check_workdir(trial_config(config, number), path)
    program = program_of(config, work.mesh, work.objective, work.optimizer)
    with Interruption() as interruption:
        for first in numbers[:: config.trials_at_once]:
            group = numbers[first : first + config.trials_at_once]
            is_done = all((workdirs[i] / RESULTS).exists() for i in group)
            if is_done and config.resume == "same":
                log_line(f"{workdirs[first]}: nothing to do, there is a {RESULTS}")
            elif len(group) == 1:
                own = trial_config(config, first)
                run_trial(own, workdirs[first], work, program.with_seed(own.seed), interruption)
            else:
                run_together(config, group, workdir, workdirs, work, interruption)
    if config.num_trials > 1 and jax.process_index() == 0:
        summary = results.write_summary(workdir, work.task, workdirs)
        for line in results.describe_summary(summary):
            log_line(line)


def prepare(config: ConfigDict, task: Task, pretrained: Pretrained) -> tuple[ConfigDict, Work]:
    """The completed configuration; data, network and compiled functions for all trials."""
    tokenizer, max_length = pretrained.tokenizer, config.data.max_length
    features = task.features(read_split(task, TRAIN), tokenizer, max_length, training=True)
    if not len(features["example"]):
        raise UserError(f"{task.place(TRAIN)}: no example can be trained on")
    config = complete(config, task, pretrained.encoder_config, len(features["example"]))
    mesh, objective = make_mesh(config.parallel), make_objective(config, task)
    predict = make_predict(mesh, objective.outputs)
    predictor = Predictor(task, tokenizer, predict, max_length, config.batch_size)
    splits = []
    for name in (*task.eval_splits, *task.test_splits):
        examples = read_split(task, name)
        splits.append(Split(name, examples, predictor.features(examples)))
    arrays = {name: x for name, x in features.items() if name != "example"}
    rows = make_buckets(arrays, config.data.length_buckets, config.batch_size)
    num_steps = max(1, int(len(rows) / config.batch_size * config.num_train_epochs))
    options = dict(config.optimizer)
    warmup_steps = round(options.pop("warmup_fraction") * num_steps)

    def batches(seed: int, start: int, share: tuple[int, int]) -> Batches:
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

    return config, Work(
        task=task,
        pretrained=pretrained,
        rows=rows,
        num_examples=len(np.unique(features["example"])),
        batches=batches,
        evaluation=Evaluation(predictor, splits),
        mesh=mesh,
        objective=objective,
        optimizer=OptimizerConfig(num_steps=num_steps, warmup_steps=warmup_steps, **options),
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
        raise UserError("config.checkpoint.keep_best needs a labelled config.data.dev")
    optimizer = config.optimizer
    optimizer.learning_rate = optimizer.learning_rate or learning_rate(encoder)
    optimizer.layerwise_decay = optimizer.layerwise_decay or layerwise_decay(encoder)
    config.data.update(task.resolved())
    return config


def trial_config(config: ConfigDict, number: int) -> ConfigDict:
    """That of one of several trials: a run like any other, with its own seed."""
    config = config.copy_and_resolve_references()
    config.update(seed=config.seed + number, num_trials=1, trials_at_once=1)
    return config


def run_trial(
    config: ConfigDict, workdir: Path, work: Work, program: Program, interruption: Interruption
) -> None:
    """One seed: train, then predict and score all splits."""
    newest: Predictions = {}

    def evaluate(_, params: Params, is_stopped: IsStopped) -> dict[str, float] | None:
        return evaluate_trial(work, params, newest, is_stopped)

    job = make_job(work, program, (config.seed,), evaluate, config.checkpoint.keep_best)
    job = dataclasses.replace(job, patience=config.patience)
    state = loop.run(config, workdir, job, interruption)
    step, params = int(state.step), state.params
    if config.checkpoint.keep_best:
        step = best_step(workdir, job.keep_best)
        log_line(f"predicting with step {step:,}, the best by {job.keep_best}")
        _, best = restore_params(workdir / "checkpoints", step)
        params = jax.device_put(best, jax.tree.map(lambda x: x.sharding, params))
        newest.clear()
    finish(work, workdir, config.seed, step, params, newest)


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
        trials = []
        for place, known in enumerate(newest):
            found = evaluate_trial(work, one_of(params, place=place), known, is_stopped)
            if found is None:
                return None
            trials.append(found)
        return {name: float(np.mean([trial[name] for trial in trials])) for name in trials[0]}

    program = make_trials_program(
        work.mesh, work.objective, work.optimizer, seeds, config.num_microbatches
    )
    job = make_job(work, program, seeds, evaluate, keep_best=False)
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
        finish(work, path, own.seed, int(of_one.step), of_one.params, newest[place])


def evaluate_trial(
    work: Work, params: Params, known: Predictions, is_stopped: IsStopped
) -> dict[str, float] | None:
    """The scores of all labelled splits, whose predictions join `known`; None if stopped."""
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
    missing = [split.name for split in evaluation.splits if split.name not in known]
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
    keep_best: bool,
) -> Job:
    """What the loop is to do for one seed, or for several at once; `program` has them, too."""
    rows, num_steps = work.rows, work.optimizer.num_steps
    arrays = rows.rows.arrays
    batch_size = work.evaluation.predictor.batch_size

    def batches(start: int, share: tuple[int, int]) -> Batches:
        sources = [work.batches(seed, start, share) for seed in seeds]
        return sources[0] if len(seeds) == 1 else stacked(sources)

    real = int(arrays["piece_ids"].sum()) / (len(rows) * rows.mean_width)
    flops_per_token = work.objective.flops_per_token(round(rows.mean_width))
    initial = jax.tree.leaves_with_path(work.pretrained.params)
    facts = {
        "data": {
            "task": work.task.name,
            "examples": f"{work.num_examples:,}",
            "rows": f"{len(rows):,}",
            "padded to": " or ".join(f"{width}" for width in rows.widths),
            "padding": f"{1 - real:.2%}",
            "epochs": f"{num_steps * batch_size / len(rows):.2f}",
        }
        | {split.name: f"{len(split.examples):,} examples" for split in work.evaluation.splits},
        "step": loop.describe_step(
            round(batch_size * rows.mean_width) * len(seeds), flops_per_token
        ),
    }
    return Job(
        objective=work.objective,
        num_steps=num_steps,
        program=program,
        tokenizer=work.pretrained.tokenizer,
        data_hash=content_hash(arrays, work.pretrained.tokenizer),
        batches=batches,
        evaluate=evaluate,
        initial={path_name(path): x for path, x in initial},
        facts=facts,
        flops_per_token=flops_per_token,
        metrics={**work.objective.metrics, **work.task.metrics},
        check=check_workdir,
        keep_best=f"eval/{work.task.main_metric}" if keep_best else "",
    )


def stacked(sources: list[Batches]) -> Batches:
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
