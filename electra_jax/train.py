"""The story of a run, in order: mesh, data, model, state, restore, loop."""

import collections
import importlib.metadata
import json
import platform
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax import config as configuration
from electra_jax import metrics, parallel
from electra_jax.checkpoint import Checkpoints
from electra_jax.data import layout, loader
from electra_jax.data.layout import Rows
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.errors import UserError
from electra_jax.flops import peak_flops, train_flops_per_token
from electra_jax.modeling.electra import Params
from electra_jax.objectives import Objective, make_objective
from electra_jax.optimizer import OptimizerConfig
from electra_jax.parallel import Program
from electra_jax.prepare import prepare
from electra_jax.progress import Progress, add_up
from electra_jax.report import write_report
from electra_jax.step import TrainState
from electra_jax.writer import MetricWriter

# Fields that may change when a run is resumed: no number that training computes depends on them.
FREE_FIELDS = (
    "log_every_steps",
    "eval_every_steps",
    "checkpoint.",
    "parallel.",
    "data.dir",
    "data.num_threads",
    "data.prefetch",
    "model.remat",
    "model.scan_unroll",
)


def train_and_evaluate(config: ConfigDict, workdir: Path) -> TrainState:
    """Pre-train by `config`, from the newest checkpoint in `workdir` if there is one.

    Returns:
      The final state.

    Raises:
      UserError: the configuration, the data or what `workdir` holds does not fit.
      FloatingPointError: a loss is not finite. Checkpoints are from before that.
    """
    configuration.validate(config, jax.device_count())
    check_same_run(config, workdir)
    log = log_line if jax.process_index() == 0 else lambda _: None

    mesh = parallel.make_mesh(config.parallel)
    store = prepare(config.data, log)
    rows, held_out = (
        layout.rows(store, split, config.data.sequence_length, config.data.layout)
        for split in ("train", "held_out")
    )
    objective = make_objective(config, store.tokenizer)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = parallel.make_program(
        mesh, objective, optimizer, config.seed, config.num_microbatches, config.parallel.api
    )

    checkpoints = Checkpoints(
        workdir / "checkpoints", store.hash, config.checkpoint.keep, config.checkpoint.keep_best
    )
    start = checkpoints.latest_step() or 0
    state = checkpoints.restore(start, program.abstract_state) if start else program.init()
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
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        num_threads=config.data.num_threads,
        prefetch=config.data.prefetch,
    )
    with MetricWriter(workdir, start) as writer, jax.transfer_guard("disallow"):
        progress = Progress(
            config.num_train_steps,
            objective.loss_terms,
            flops_per_token(objective, config.data.sequence_length),
            peak_of_all_devices(),
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
                progress.report()  # stops here if a loss is not finite: before the save
                with progress.paused():
                    results = {}
                    if evaluates:
                        results = evaluate(program, objective, state.params, held_out, config)
                        progress.write_evaluation(step, results)
                        write_report(workdir)
                    if saves:
                        checkpoints.save(step, state, results)
    checkpoints.close()
    log(f"done: {write_report(workdir)}")
    return state


def evaluate(
    program: Program, objective: Objective, params: Params, held_out: Rows, config: ConfigDict
) -> dict[str, float]:
    """Metrics over every held-out row, each once; names start with `eval/`."""
    totals = None
    running = collections.deque()

    def fetch_oldest() -> None:
        nonlocal totals
        sums = jax.device_get(running.popleft())
        totals = add_up([totals, sums] if totals else [sums])

    for batch in loader.eval_batches(
        held_out,
        batch_size=config.batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    ):
        running.append(program.eval_step(params, program.place(batch)))
        if len(running) > 4:  # the device always has work, and memory stays flat
            fetch_oldest()
    while running:
        fetch_oldest()
    values = metrics.summarize(totals, objective.loss_terms)
    return {f"eval/{name}": value for name, value in values.items()}


def check_same_run(config: ConfigDict, workdir: Path) -> None:
    """Refuse to continue a run under a configuration that computes something else."""
    path = workdir / "config.json"
    if not path.exists() or not any((workdir / "checkpoints").glob("[0-9]*")):
        return
    before = configuration.flatten(ConfigDict(json.loads(path.read_text())))
    now = configuration.flatten(config)
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
    (workdir / "config.json").write_text(json.dumps(config.to_dict(), indent=1))
    (workdir / "facts.json").write_text(json.dumps(facts, indent=1))
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
    return train_flops_per_token(
        objective.model, length, objective.masking.max_predictions(length)
    )


def peak_of_all_devices() -> float | None:
    """FLOP/s, or None where the kind of device is not known."""
    peak = peak_flops(jax.devices()[0])
    return peak * jax.device_count() if peak else None


def log_line(line: str) -> None:
    """Print at once, so that a log file is never behind."""
    print(line, flush=True)
