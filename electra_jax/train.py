"""The story of a run, in order: mesh, data, model, state, restore, loop."""

import collections
import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax import config as configuration
from electra_jax import metrics, parallel
from electra_jax.checkpoint import Checkpoints
from electra_jax.data import layout, loader, sources
from electra_jax.data.layout import Rows
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.errors import UserError
from electra_jax.flops import peak_flops, train_flops_per_token
from electra_jax.modeling.electra import Params
from electra_jax.objectives import Objective, make_objective
from electra_jax.optimizer import OptimizerConfig
from electra_jax.parallel import Program
from electra_jax.prepare import prepare
from electra_jax.progress import Progress, add_up, compilations
from electra_jax.report import write_report
from electra_jax.step import TrainState
from electra_jax.writer import MetricWriter

Log = Callable[[str], None]

# Fields that may change when a run is resumed: no number that training computes depends on them.
FREE_FIELDS = (
    "log_every_steps",
    "eval_every_steps",
    "checkpoint.",
    "parallel.",
    "data.dir",
    "data.num_",
    "data.prefetch",
    "model.remat",
    "model.scan_unroll",
)


def train_and_evaluate(config: ConfigDict, workdir: Path) -> TrainState:
    """Pre-train by `config`, from the newest checkpoint in `workdir` if there is one.

    Returns:
      The final state.

    Raises:
      UserError: the configuration, the data or what `workdir` holds does not fit. In this case
        nothing has been written there.
      FloatingPointError: a loss is not finite. All checkpoints are from before that.
    """
    configuration.validate(config, jax.device_count())
    check_workdir(config, workdir)
    log = log_line if jax.process_index() == 0 else lambda _: None

    mesh = parallel.make_mesh(config.parallel)
    store = prepare(config.data, log)
    weights = sources.weights(sources.parse(config.data.source))
    rows, held_out = (
        layout.rows(
            store,
            split,
            config.data.sequence_length,
            config.data.layout,
            seed=config.seed,
            by_source=split == "train" and weights is not None,
        )
        for split in ("train", "held_out")
    )
    if len(rows) < config.batch_size:
        raise UserError(
            f"config.batch_size is {config.batch_size}, but config.data.source gives only "
            f"{len(rows)} rows of {config.data.sequence_length} tokens to train on"
        )
    warn_of_long_words(config, store.manifest["splits"]["train"], log)
    objective = make_objective(config, store.tokenizer)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = parallel.make_program(
        mesh, objective, optimizer, config.seed, config.num_microbatches, config.parallel.api
    )

    with Checkpoints(
        workdir / "checkpoints", store.hash, config.checkpoint.keep, config.checkpoint.keep_best
    ) as checkpoints:
        start = checkpoints.latest_step() or 0
        state = checkpoints.restore(start, program.abstract_state) if start else program.init()
        if start == config.num_train_steps:
            log(f"{workdir}: nothing to do, all {start:,} steps are done")
            return state

        facts = describe(config, objective, state.params, store.manifest["splits"], rows, held_out)
        write_run_files(config, workdir, store.tokenizer, facts)
        for section, values in facts.items():
            log(f"{section}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
        log(f"{workdir}: {'resuming' if start else 'starting'} at step {start:,}")

        batches = loader.train_batches(
            rows,
            start,
            config.num_train_steps - start,
            batch_size=config.batch_size,
            seed=config.seed,
            weights=weights or (1.0,),
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            num_threads=config.data.num_threads,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
        )
        with (
            contextlib.closing(batches),
            MetricWriter(workdir, start) as writer,
            compilations() as compiled,
            jax.transfer_guard("disallow"),
        ):
            progress = Progress(
                config.num_train_steps,
                objective.loss_terms,
                peak_tokens_per_second(objective, config.data.sequence_length),
                compiled,
                writer,
                log,
            )
            for step, batch in enumerate(batches, start + 1):
                state, sums = program.train_step(state, program.place(batch))
                progress.add(step, sums)

                is_last = step == config.num_train_steps
                evaluates = is_last or step % config.eval_every_steps == 0
                saves = is_last or step % config.checkpoint.every_steps == 0
                if evaluates or saves or step % config.log_every_steps == 0:
                    progress.close_window()
                if evaluates or saves:
                    # Reports first, saves last: what is not finite stops the run before it can
                    # reach a checkpoint, and resuming finds all lines up to the checkpoint.
                    progress.report()
                    with progress.paused():
                        results = {}
                        if evaluates:
                            results = evaluate(
                                program, objective, state.params, held_out, config.batch_size
                            )
                            progress.write_evaluation(step, results)
                            write_report(workdir)
                        if saves:
                            checkpoints.save(step, state, results)
    log(f"done: {workdir / 'report.html'}")
    return state


def warn_of_long_words(config: ConfigDict, counts: dict[str, int], log: Log) -> None:
    """Say so when whole words are to be masked in a script that does not separate them."""
    tokens_per_word = counts["tokens"] / counts["words"]
    if config.masking.unit != "token" and tokens_per_word > 3:
        log(
            f"warning: config.masking.unit is {config.masking.unit!r}, but words have "
            f"{tokens_per_word:.1f} tokens on average here; words that exceed a row's share of "
            "predictions are never masked, and fewer tokens are predicted than asked for"
        )


def evaluate(
    program: Program, objective: Objective, params: Params, held_out: Rows, batch_size: int
) -> dict[str, float]:
    """Metrics over every held-out row, each once; names start with `eval/`."""
    totals: dict[str, np.ndarray] = {}
    running = collections.deque()
    for batch in loader.eval_batches(
        held_out,
        batch_size=batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    ):
        running.append(program.eval_step(params, program.place(batch)))
        if len(running) > 4:  # the device always has work, and memory stays flat
            totals = add_up([totals, jax.device_get(running.popleft())])
    totals = add_up([totals, *jax.device_get(list(running))])
    values = metrics.summarize(totals, objective.loss_terms)
    return {f"eval/{name}": value for name, value in values.items()}


def check_workdir(config: ConfigDict, workdir: Path) -> None:
    """Refuse what cannot be written to, and a run whose configuration computes something else."""
    existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--workdir is {workdir}, but {existing} is not a directory to write to")
    checkpoints = workdir / "checkpoints"
    if not checkpoints.exists() or not any(path.name.isdigit() for path in checkpoints.iterdir()):
        return
    before, now = (
        configuration.flatten(ConfigDict(json.loads(content)))
        for content in ((workdir / "config.json").read_text(), json.dumps(config.to_dict()))
    )
    differing = [
        f"config.{name} (was {before.get(name)!r}, is {now.get(name)!r})"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not name.startswith(FREE_FIELDS)
    ]
    if differing:
        raise UserError(
            f"{workdir} holds a run with another configuration: {', '.join(differing)}; "
            "use another --workdir"
        )


def write_run_files(config: ConfigDict, workdir: Path, tokenizer: Tokenizer, facts: dict) -> None:
    """What makes the run directory self-contained, beside checkpoints and metrics."""
    if jax.process_index() != 0:
        return
    for name, content in {"config.json": config.to_dict(), "facts.json": facts}.items():
        temporary = workdir / f"{name}.tmp"
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(workdir / name)
    tokenizer.save(workdir / "tokenizer")


def describe(
    config: ConfigDict,
    objective: Objective,
    params: Params,
    splits: dict[str, dict],
    rows: Rows,
    held_out: Rows,
) -> dict[str, dict[str, str]]:
    """Facts for the log and the report: devices, model, data, versions."""
    device = jax.devices()[0]
    length = config.data.sequence_length
    filled = rows.real_tokens / (len(rows) * length)
    epochs = config.num_train_steps * config.batch_size / len(rows)
    count = lambda tree: f"{sum(x.size for x in jax.tree.leaves(tree)):,}"  # noqa: E731
    return {
        "devices": {
            "kind": device.device_kind,
            "number": str(jax.device_count()),
            "processes": str(jax.process_count()),
            "compute": str(np.dtype(objective.model.generator.dtype)),
        },
        "parameters": {"total": count(params)} | {part: count(params[part]) for part in params},
        "data": {
            "source": config.data.source,
            "documents": f"{splits['train']['documents']:,}",
            "rows": f"{len(rows):,}",
            "tokens": f"{rows.real_tokens:,}",
            "padding": f"{1 - filled:.2%}",
            "cut off": f"{rows.dropped_tokens / splits['train']['tokens']:.2%}",
            "epochs": f"{epochs:.2f}",
            "held-out documents": f"{splits['held_out']['documents']:,}",
            "held-out tokens": f"{held_out.real_tokens:,}",
        },
        "step": {
            "tokens": f"{config.batch_size * length:,}",
            "GFLOP per token": f"{flops_per_token(objective, length) / 1e9:.4g}",
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
    }


def flops_per_token(objective: Objective, length: int) -> float:
    """Operations for one token of one training step."""
    return train_flops_per_token(objective.model, length, objective.masking.max_predictions(length))


def peak_tokens_per_second(objective: Objective, length: int) -> float | None:
    """What all devices together could do at most, or None where the kind of device is not known."""
    peak = peak_flops(jax.devices()[0])
    return peak * jax.device_count() / flops_per_token(objective, length) if peak else None


def log_line(line: str) -> None:
    """Print at once, so that a log file is never behind."""
    print(line, flush=True)
