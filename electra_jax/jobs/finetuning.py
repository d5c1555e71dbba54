"""Fine-tuning: an encoder, a task and a head as a job for the loop, once for every seed."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.checks import check_best
from electra_jax.data import loader
from electra_jax.data.features import Arrays
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.finetune import results
from electra_jax.finetune.buckets import make_buckets
from electra_jax.finetune.config import make_objective, make_task, rates, settings, sizes, validate
from electra_jax.finetune.results import Predictions, Predictor
from electra_jax.finetune.tasks.base import TRAIN, Scores, Task
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
    trials = Trials(config, make_task(config, log_line), pretrained)
    workdirs = [workdir / f"trial_{i}" for i in range(config.num_trials)]
    workdirs = workdirs if config.num_trials > 1 else [workdir]
    for number, path in enumerate(workdirs):
        check_workdir(trials.config_of(config.seed + number), path)
    with Interruption() as interruption:
        for first in range(0, config.num_trials, config.trials_at_once):
            group = workdirs[first : first + config.trials_at_once]
            if all((path / RESULTS).exists() for path in group) and config.resume == "same":
                log_line(f"{group[0]}: nothing to do, there is a {RESULTS}")
                continue
            together = workdir / f"trials_{first}_to_{first + len(group) - 1}"
            by_seed = {config.seed + first + i: path for i, path in enumerate(group)}
            trials.run(by_seed, together, interruption)
    if config.num_trials > 1 and jax.process_index() == 0:
        results.write_summary(workdir, trials.task, workdirs)


class Trials:
    """The completed configuration; data, network and compiled functions that all trials share."""

    def __init__(self, config: ConfigDict, task: Task, pretrained: Pretrained):
        tokenizer, max_length = pretrained.tokenizer, config.data.max_length
        features = task.features(read_split(task, TRAIN), tokenizer, max_length, training=True)
        self.num_examples = len(np.unique(features.pop("example")))
        if not self.num_examples:
            raise UserError(f"{task.files[TRAIN]}: no example can be trained on")
        config = complete(config, task, pretrained.encoder_config, len(features["input_ids"]))
        self.config, self.task, self.pretrained = config, task, pretrained
        self.mesh, self.objective = make_mesh(config.parallel), make_objective(config, task)
        predict = Predict(self.mesh, self.objective.outputs)
        self.predictor = Predictor(task, tokenizer, predict, max_length, config.batch_size)
        splits = {name: read_split(task, name) for name in (*task.eval_splits, *task.test_splits)}
        self.splits = {name: (x, self.predictor.features(x)) for name, x in splits.items()}
        self.rows = make_buckets(features, config.data.length_buckets, config.batch_size)
        num_steps = max(1, int(len(self.rows) / config.batch_size * config.num_train_epochs))
        options = dict(config.optimizer)
        warmup_steps = round(options.pop("warmup_fraction") * num_steps)
        self.optimizer = OptimizerConfig(num_steps=num_steps, warmup_steps=warmup_steps, **options)
        self.program = program_of(config, self.mesh, self.objective, self.optimizer)

    def config_of(self, seed: int) -> ConfigDict:
        """The configuration of one of several trials: a run like any other, with its own seed."""
        config = self.config.copy_and_resolve_references()
        config.update(seed=seed, num_trials=1, trials_at_once=1)
        return config

    def run(self, workdirs: Mapping[int, Path], together: Path, interruption: Interruption) -> None:
        """Trains with one seed, or with several as one run; predicts and scores all splits.

        Args:
          workdirs: the directory of each trial by its seed. What comes out there is as if it had
            run alone.
          together: the directory of the run of several.
        """
        seeds, is_single = [*workdirs], len(workdirs) == 1
        newest: list[Predictions] = [{} for _ in seeds]
        if is_single:
            config, program = self.config_of(*seeds), self.program.with_seed(*seeds)
            [together], one_of = workdirs.values(), lambda tree, place: tree
        else:
            config, microbatches = self.config, self.config.num_microbatches
            program = make_trials_program(
                self.mesh, self.objective, self.optimizer, seeds, microbatches
            )
            one_of = jax.jit(
                lambda tree, place: jax.tree.map(lambda x: x[place], tree), static_argnames="place"
            )

        def evaluate(params: Params, is_stopped: IsStopped) -> dict[str, float] | None:
            found = []
            for place, known in enumerate(newest):
                own = one_of(params, place=place)
                predictions = self.predictions(own, self.task.eval_splits, is_stopped)
                if predictions is None:
                    return None
                known.update(predictions)
                found.append(results.as_metrics(self.scores(predictions)))
            first, *others = found
            return {x: float(np.mean([y[x] for y in found])) for x in first} if others else first

        job = self.job(program, seeds, evaluate)
        state = loop.run(config, together, job, interruption)
        for place, (seed, workdir) in enumerate(workdirs.items()):
            own = one_of(state, place=place)
            step, params, known = int(own.step), own.params, newest[place]
            if not is_single:
                with Checkpoints(workdir / "checkpoints", job.data.hash, keep=1) as checkpoints:
                    checkpoints.save(step, own, {}, {})
                if jax.process_index() == 0:
                    write_run_files(self.config_of(seed), workdir, job.data.tokenizer, job.facts)
            elif config.checkpoint.keep_best:
                step = best_step(workdir, job.evaluator)
                log_line(f"predicting with step {step:,}, the best by {job.evaluator.keep_best}")
                _, best = restore_params(workdir / "checkpoints", step)
                params = jax.device_put(best, jax.tree.map(lambda x: x.sharding, params))
                known = {}
            known |= self.predictions(params, [name for name in self.splits if name not in known])
            floors = {x: self.task.floor(self.splits[x][0]) for x in self.task.eval_splits}
            results.write_results(workdir, self.task, known, self.scores(known), floors, seed, step)

    def predictions(
        self, params: Params, splits: Iterable[str], is_stopped: IsStopped = lambda: False
    ) -> Predictions | None:
        """Predictions for these splits; None if `is_stopped` has said so."""
        found = {}
        for name in splits:
            found[name] = self.predictor(params, *self.splits[name], is_stopped)
            if found[name] is None:
                return None
        return found

    def scores(self, predictions: Predictions) -> dict[str, Scores]:
        """The scores of the labeled splits."""
        splits = self.task.eval_splits
        return {name: self.task.score(self.splits[name][0], predictions[name]) for name in splits}

    def job(
        self,
        program: Program,
        seeds: Sequence[int],
        evaluate: Callable[[Params, IsStopped], dict[str, float] | None],
    ) -> Job:
        """What the loop is to do for one seed, or for several at once; `program` has them, too."""
        config, rows, task = self.config, self.rows, self.task
        arrays, tokenizer = rows.rows.arrays, self.pretrained.tokenizer
        num_steps, batch_size = self.optimizer.num_steps, config.batch_size

        def batches(start: int, share: tuple[int, int]) -> Batches:
            sources = [
                loader.train_batches(
                    rows,
                    start,
                    num_steps - start,
                    batch_size=batch_size,
                    seed=seed,
                    weights=rows.weights,
                    one_group=True,
                    num_threads=config.data.num_threads,
                    prefetch=config.data.prefetch,
                    process_index=share[0],
                    process_count=share[1],
                )
                for seed in seeds
            ]
            return sources[0] if len(seeds) == 1 else stacked(sources)

        real = int(arrays["segment_ids"].sum()) / (len(rows) * rows.mean_width)
        flops_per_token = self.objective.flops_per_token(round(rows.mean_width))
        facts = {
            "task": task.name,
            "examples": f"{self.num_examples:,}",
            "rows": f"{len(rows):,}",
            "padded to": " or ".join(map(str, rows.widths)),
            "padding": f"{1 - real:.2%}",
            "epochs": f"{num_steps * batch_size / len(rows):.2f}",
            **{name: f"{len(x):,} examples" for name, (x, _) in self.splits.items()},
        }
        tokens = round(batch_size * rows.mean_width) * len(seeds)
        params = jax.tree.leaves_with_path(self.pretrained.params)
        return Job(
            objective=self.objective,
            program=program,
            num_steps=num_steps,
            data=Data(tokenizer, content_hash(arrays, tokenizer), batches),
            evaluator=Evaluator(
                run=evaluate,
                metrics={**self.objective.metrics, **task.metrics},
                keep_best=f"eval/{task.main_metric}" if config.checkpoint.keep_best else "",
                patience=config.patience,
            ),
            initial={path_name(path): x for path, x in params},
            facts={"data": facts, "step": describe_step(tokens, flops_per_token)},
            flops_per_token=flops_per_token,
            check=check_workdir,
        )


def check_workdir(config: ConfigDict, workdir: Path) -> list[str]:
    """As `workdir.check`, for settings of fine-tuning; labels and sizes decide the parameters."""

    def fits(before: ConfigDict, now: ConfigDict, step: int) -> bool:
        names = ("data.labels", *(f"model.{name}" for name in sizes()))
        return all(field(before, name) == field(now, name) for name in names)

    return check(config, workdir, settings(), fits)


def read_split(task: Task, name: str) -> Sequence:
    """The examples of a split, of which there must be some."""
    examples = task.read(name)
    if not examples:
        raise UserError(f"{task.files[name]}: {name} has no examples; allowed: at least one")
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
    for name, usual in zip(("learning_rate", "layerwise_decay"), rates(encoder), strict=True):
        config.optimizer[name] = config.optimizer[name] or usual
    config.data.update(task.resolved())
    return config


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
