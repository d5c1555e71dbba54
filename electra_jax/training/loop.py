"""The story of a run, in order: state, restore, loop. Every task is trained by it.

What is trained, on what, and how it is judged comes as a `Job`, made by `pretrain.py` or by
`finetune/trials.py`.
"""

import contextlib
import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.modeling.flops import peak_flops
from electra_jax.modeling.params import Params
from electra_jax.monitoring.console import Console
from electra_jax.monitoring.health import Health
from electra_jax.monitoring.histograms import histograms
from electra_jax.monitoring.profiling import profiled
from electra_jax.monitoring.progress import Progress, compilations
from electra_jax.monitoring.tracking import tracked
from electra_jax.monitoring.writer import MetricWriter
from electra_jax.objectives import Objective
from electra_jax.objectives.metrics import Metric, sign_of
from electra_jax.reporting.gallery import Token, as_markdown
from electra_jax.reporting.page import write_report, write_samples
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import held, write_run_files
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.program import Program, with_params
from electra_jax.training.step import TrainState

Log = Callable[[str], None]
Facts = dict[str, dict[str, str]]
IsStopped = Callable[[], bool]
Show = Callable[[Program, Params], list[list[Token]]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What the loop is to do.

    Attributes:
      objective: what is minimised.
      num_steps: the length of the run.
      program: `objective` and how it is minimised, compiled for the devices.
      tokenizer: of the data.
      data_hash: of the data: a checkpoint made with others is refused.
      batches: (first step, (i, n)) to the batches from then on, the i-th of n parts of each.
      evaluate: (program, parameters, whether to stop early) to metrics whose names start with
        `eval/`, or None when it has stopped early.
      initial: parameters to start with, by path, in place of random ones.
      facts: for the log and the report, beside those of the machine.
      flops_per_token: operations for one token of one training step.
      metrics: those that are measured, without the prefix `train/` or `eval/`.
      check: refuses a run directory that does not go with the configuration, see `workdir.check`.
      keep_best: name of a metric whose best checkpoint stays, such as `eval/rtd_auc`, or "".
      patience: evaluations without a better `keep_best`, after which training ends; 0: none.
      learned_from: step from which on the networks should have learned something.
      show: (program, parameters) to held-out texts with the networks' verdicts, see `shading`.
    """

    objective: Objective
    num_steps: int
    program: Program
    tokenizer: Tokenizer
    data_hash: str
    batches: Callable[[int, tuple[int, int]], Iterator[dict[str, np.ndarray]]]
    evaluate: Callable[[Program, Params, IsStopped], dict[str, float] | None]
    initial: dict[str, np.ndarray]
    facts: Facts
    flops_per_token: float
    metrics: Mapping[str, Metric]
    check: Callable[[ConfigDict, Path], list[str]]
    keep_best: str = ""
    patience: int = 0
    learned_from: int = 0
    show: Show | None = None

    def is_enough(self, history: list[float]) -> bool:
        """Whether the evaluations so far, by their `keep_best`, end the training."""
        best = history.index(max(history)) if history else 0
        return 0 < self.patience <= len(history) - 1 - best


def run(config: ConfigDict, workdir: Path, job: Job, interruption: Interruption) -> TrainState:
    """Train as `job` says, from the newest checkpoint in `workdir` if there is one.

    Returns:
      The final state.

    Raises:
      UserError: the configuration does not fit what `workdir` holds. In this case nothing has been
        written there.
      FloatingPointError: a loss is not finite. All checkpoints are from before that.
      Stopped: SIGTERM or SIGINT came; the state is saved.
      OSError: a file cannot be written. All checkpoints are whole.
    """
    is_main = jax.process_index() == 0  # one of all processes writes and prints
    objective, num_steps, program = job.objective, job.num_steps, job.program
    sign = sign_of(job.metrics, job.keep_best) if job.keep_best else 1

    with (
        Console() as console,
        held(workdir) if is_main else contextlib.nullcontext(),
        Checkpoints(
            workdir / "checkpoints",
            job.data_hash,
            config.checkpoint.keep,
            job.keep_best,
            sign,
        ) as checkpoints,
    ):
        log = console.log
        changed = job.check(config, workdir)  # again: now no other run can change it
        found = checkpoints.restore_newest(program.abstract_state, log)
        start, saved = (found.step, found.progress) if found else (0, {})
        state = found.state if found else with_params(program.init(), job.initial)
        if start > num_steps:
            length = "num_train_steps" if "num_train_steps" in config else "num_train_epochs"
            raise UserError(
                f"config.{length} is {config[length]}, but {workdir} is at step {start} already"
            )
        history = saved.get("history", [])  # of `keep_best`, where it may end the training
        is_evaluation_due = saved.get("is_evaluation_due", False)
        if (start == num_steps and not is_evaluation_due) or job.is_enough(history):
            log(f"{workdir}: nothing to do, all {start:,} steps are done")
            return state

        mesh = make_mesh(config.parallel)
        facts = describe(objective, state.params, mesh, job.tokenizer) | job.facts
        if is_main:
            write_run_files(config, workdir, job.tokenizer, facts)
        for section, values in facts.items():
            log(f"{section}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
        log(f"{workdir}: {'resuming' if start else 'starting'} at step {start:,}")
        if changed:
            log(
                f"going on with another configuration: {', '.join(changed)}; the order of the data "
                f"is that of the new one, from its step {start:,} on"
            )

        batches = job.batches(start, program.share)
        with (
            contextlib.closing(batches),
            tracked(config, workdir) if is_main else contextlib.nullcontext() as track,
            MetricWriter(workdir, start, track) if is_main else contextlib.nullcontext() as writer,
            compilations() as compiled,
            jax.transfer_guard("disallow"),
        ):
            progress = Progress(
                num_steps,
                objective.loss_terms,
                peak_tokens_per_second(job.flops_per_token),
                compiled,
                writer.write if is_main else lambda step, values: None,
                console,
                config.checkpoint.every_steps,
                job.metrics,
                Health(objective, job.learned_from).warnings,
                config.max_skipped_updates,
                saved.get("progress"),
            )

            def evaluate_at(step: int) -> dict[str, float] | None:
                results = job.evaluate(program, state.params, lambda: interruption.is_requested)
                if results is not None:
                    progress.write_evaluation(step, results)
                    if job.patience:
                        history.append(results[job.keep_best])
                    if job.show:
                        texts = job.show(program, state.params)
                        if is_main:
                            write_samples(workdir, step, texts)
                            writer.write_text(step, "held-out texts", as_markdown(texts))
                    if config.histograms:
                        found = histograms(state.params)
                        if is_main:
                            writer.write_histograms(step, found)
                    if is_main:
                        write_report(workdir)
                return results

            def save(step: int, results: dict[str, float]) -> None:
                kept = {"progress": progress.to_save(), "is_evaluation_due": is_evaluation_due}
                checkpoints.save(step, state, results, kept | {"history": history})

            step = start
            if is_evaluation_due:  # the run was stopped just before
                with progress.paused():
                    is_evaluation_due = evaluate_at(step) is None
            batches = progress.timed(batches)
            tensorboard, newest = workdir / "tensorboard", lambda: progress.newest
            batches = profiled(batches, start, config.profile_steps, tensorboard, newest)
            for step, batch in enumerate(batches, start + 1):
                state, sums = program.train_step(state, program.place(batch))
                progress.add(step, sums, batch["input_ids"].shape)

                stops = interruption.reached(step)
                is_last = step == num_steps
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
                        if (saves or job.is_enough(history)) and not is_evaluation_due:
                            save(step, results)
                if stops or is_evaluation_due or job.is_enough(history):
                    break

            if (step < num_steps and not job.is_enough(history)) or is_evaluation_due:
                log(f"stopping at step {step:,}")
                progress.catch_up()
                if checkpoints.latest_step() != step:
                    save(step, {})
                raise interruption.stopped(step)
    log(f"done: {workdir / 'report.html'}")
    return state


def describe(objective: Objective, params: Params, mesh: Mesh, tokenizer: Tokenizer) -> Facts:
    """Facts about machine, network and versions."""
    device = jax.devices()[0]
    count = lambda tree: f"{sum(x.size for x in jax.tree.leaves(tree)):,}"  # noqa: E731
    return {
        "devices": {
            "kind": device.device_kind,
            "number": str(jax.device_count()),
            "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            "processes": str(jax.process_count()),
            "compute": str(np.dtype(objective.dtype)),
        },
        "tokenizer": {
            "family": tokenizer.family,
            "tokens": f"{tokenizer.vocab_size:,}",
            "hash": tokenizer.hash[:12],
        }
        | {name: str(value) for name, value in tokenizer.settings.items()},
        "parameters": {"total": count(params)} | {part: count(params[part]) for part in params},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
    }


def describe_step(num_tokens: int, flops_per_token: float) -> dict[str, str]:
    """Facts about a step of the training, padding included."""
    return {
        "tokens": f"{num_tokens:,}",
        "GFLOP": f"{flops_per_token * num_tokens / 1e9:.4g}",
        "GFLOP per token": f"{flops_per_token / 1e9:.4g}",
    }


def peak_tokens_per_second(flops_per_token: float) -> float | None:
    """What all devices together could do at most, or None where the kind of device is not known."""
    peak = peak_flops(jax.devices()[0])
    return peak * jax.device_count() / flops_per_token if peak else None


def log_line(line: str) -> None:
    """Print it; of several processes, the first one alone does."""
    Console().log(line)
