"""The story of a run, in order: mesh, data, model, state, restore, loop."""

import collections
import contextlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax import config as configuration
from electra_jax import metrics, parallel, processes
from electra_jax import workdir as run_directory
from electra_jax.checkpoint import Checkpoints
from electra_jax.data import layout, loader, sources
from electra_jax.data.layout import Rows
from electra_jax.errors import UserError
from electra_jax.flops import peak_flops, train_flops_per_token
from electra_jax.generator import generator_of, with_generator
from electra_jax.interop.pretrained import load_networks
from electra_jax.interruption import Interruption
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


def train_and_evaluate(config: ConfigDict, workdir: Path) -> TrainState:
    """Pre-train by `config`, from the newest checkpoint in `workdir` if there is one.

    Returns:
      The final state.

    Raises:
      UserError: the configuration, the data or what `workdir` holds does not fit. In this case
        nothing has been written there.
      FloatingPointError: a loss is not finite. All checkpoints are from before that.
      Stopped: SIGTERM or SIGINT came; the state is saved.
      OSError: a file cannot be written. All checkpoints are whole.
    """
    configuration.validate(config, jax.device_count())
    run_directory.check(config, workdir)
    with Interruption() as interruption:
        return run(config, workdir, interruption)


def run(config: ConfigDict, workdir: Path, interruption: Interruption) -> TrainState:
    """The story; arguments and results are those of `train_and_evaluate`."""
    is_main = jax.process_index() == 0  # of all processes, the one that writes and prints
    log = log_line if is_main else lambda _: None

    mesh = parallel.make_mesh(config.parallel)
    store = processes.main_first(lambda: prepare(config.data, log))
    processes.check_equal(store.hash, "the token store")
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
    is_unigram = config.generator.kind == "unigram"
    counts = store.token_counts("train") if is_unigram else None
    objective = make_objective(config, store.tokenizer, counts)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = parallel.make_program(
        mesh,
        objective,
        optimizer,
        config.seed,
        config.num_microbatches,
        config.parallel.api,
        config.parallel.shard_optimizer,
    )

    starts_from_weights = config.init_from and not run_directory.has_checkpoint(workdir)
    loaded = load_networks(config, objective, store.tokenizer, log) if starts_from_weights else {}

    with (
        run_directory.hold(workdir) if is_main else contextlib.nullcontext(),
        Checkpoints(
            workdir / "checkpoints", store.hash, config.checkpoint.keep, config.checkpoint.keep_best
        ) as checkpoints,
    ):
        changed = run_directory.check(config, workdir)  # again: now no other run can change it
        found = checkpoints.restore_newest(program.abstract_state, log)
        start, saved = (found.step, found.progress) if found else (0, {})
        state = found.state if found else parallel.with_params(program.init(), loaded)
        if not found and config.generator.init_from:
            run = Path(config.generator.init_from)
            state = with_generator(state, generator_of(run, store.tokenizer))
        if start > config.num_train_steps:
            raise UserError(
                f"config.num_train_steps is {config.num_train_steps}, but {workdir} is at step "
                f"{start} already"
            )
        is_evaluation_due = saved.get("is_evaluation_due", False)
        if start == config.num_train_steps and not is_evaluation_due:
            log(f"{workdir}: nothing to do, all {start:,} steps are done")
            return state

        facts = describe(config, objective, state.params, store.manifest["splits"], rows, held_out)
        if is_main:
            run_directory.write_run_files(config, workdir, store.tokenizer, facts)
        for section, values in facts.items():
            log(f"{section}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
        log(f"{workdir}: {'resuming' if start else 'starting'} at step {start:,}")
        if changed:
            log(
                f"going on with another configuration: {', '.join(changed)}; the order of the data "
                f"is that of the new one, from its step {start:,} on"
            )

        batches = loader.train_batches(
            rows,
            start,
            config.num_train_steps - start,
            batch_size=config.batch_size,
            seed=config.seed,
            weights=weights or (1.0,),
            process_index=program.share[0],
            process_count=program.share[1],
            num_threads=config.data.num_threads,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
        )
        with (
            contextlib.closing(batches),
            MetricWriter(workdir, start) if is_main else contextlib.nullcontext() as writer,
            compilations() as compiled,
            jax.transfer_guard("disallow"),
        ):
            progress = Progress(
                config.num_train_steps,
                objective.loss_terms,
                peak_tokens_per_second(objective, config.data.sequence_length),
                compiled,
                writer.write if is_main else lambda step, values: None,
                log,
                config.max_skipped_updates,
                saved.get("progress"),
            )

            def evaluate_at(step: int) -> dict[str, float] | None:
                results = evaluate(
                    program,
                    objective,
                    state.params,
                    held_out,
                    config.batch_size,
                    interruption.requested.is_set,
                )
                if results is not None:
                    progress.write_evaluation(step, results)
                    if is_main:
                        write_report(workdir)
                return results

            def save(step: int, results: dict[str, float]) -> None:
                kept = {"progress": progress.to_save(), "is_evaluation_due": is_evaluation_due}
                checkpoints.save(step, state, results, kept)

            step = start
            if is_evaluation_due:  # the run was stopped just before
                with progress.paused():
                    is_evaluation_due = evaluate_at(step) is None
            batches = progress.timed(until_workers_are_stopped(batches, interruption))
            for step, batch in enumerate(batches, start + 1):
                state, sums = program.train_step(state, program.place(batch))
                progress.add(step, sums)

                stops = interruption.reached(step)
                is_last = step == config.num_train_steps
                is_evaluation_due = is_last or step % config.eval_every_steps == 0
                saves = is_last or step % config.checkpoint.every_steps == 0
                if is_last or step % config.log_every_steps == 0:
                    progress.close_window()
                if is_evaluation_due or saves:
                    # Reports first, saves last: what is not finite stops the run before it can
                    # reach a checkpoint, and resuming finds all lines up to the checkpoint.
                    progress.catch_up()
                    with progress.paused():
                        results = evaluate_at(step) if is_evaluation_due else {}
                        is_evaluation_due = results is None
                        if saves and not is_evaluation_due:
                            save(step, results)
                if stops or is_evaluation_due:
                    break

            if step < config.num_train_steps or is_evaluation_due:
                log(f"stopping at step {step:,}")
                progress.catch_up()
                if checkpoints.latest_step() != step:
                    save(step, {})
                raise interruption.stopped(step)
    log(f"done: {workdir / 'report.html'}")
    return state


def until_workers_are_stopped(
    batches: Iterator[dict[str, np.ndarray]], interruption: Interruption
) -> Iterator[dict[str, np.ndarray]]:
    """`batches`, which end early where a signal to this run has ended the workers, too."""
    try:
        yield from batches
    except BrokenProcessPool:
        if not interruption.requested.wait(timeout=1):
            raise


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
    program: Program,
    objective: Objective,
    params: Params,
    held_out: Rows,
    batch_size: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Metrics over every held-out row, each once; names start with `eval/`.

    None where `is_stopped`, asked before every batch, has said so.
    """
    totals: dict[str, np.ndarray] = {}
    running = collections.deque()
    for batch in loader.eval_batches(
        held_out,
        batch_size=batch_size,
        process_index=program.share[0],
        process_count=program.share[1],
    ):
        if is_stopped():
            return None
        running.append(program.eval_step(params, program.place(batch)))
        if len(running) > 4:  # the device always has work, and memory stays flat
            totals = add_up([totals, jax.device_get(running.popleft())])
    totals = add_up([totals, *jax.device_get(list(running))])
    values = metrics.summarize(totals, objective.loss_terms)
    return {f"eval/{name}": value for name, value in values.items()}


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
            "compute": str(np.dtype(objective.model.main.dtype)),
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
    return train_flops_per_token(
        objective.model,
        length,
        objective.masking.max_predictions(length),
        objective.generator_passes,
    )


def peak_tokens_per_second(objective: Objective, length: int) -> float | None:
    """What all devices together could do at most, or None where the kind of device is not known."""
    peak = peak_flops(jax.devices()[0])
    return peak * jax.device_count() / flops_per_token(objective, length) if peak else None


def log_line(line: str) -> None:
    """Print at once, so that a log file is never behind."""
    print(line, flush=True)
