"""The story of a run, in order: state, restore, loop. Every task is trained by it.

What is trained, on what, and how it is judged comes as a `Job`, made by `jobs/pretraining.py` or by
`jobs/finetuning.py`.
"""

import contextlib
import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

from electra_jax.errors import UserError
from electra_jax.monitoring.display import Display
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import held
from electra_jax.training.checkpoint import Checkpoints, Restored
from electra_jax.training.job import Job, describe
from electra_jax.training.program import with_params
from electra_jax.training.recorder import Recorder
from electra_jax.training.step import TrainState


@dataclasses.dataclass
class Place:
    """Where a run is; a checkpoint holds it beside the state."""

    step: int  # the number of updates done
    scores: list[float]  # of the evaluations, where they may end the training
    is_evaluation_due: bool  # it was told to stop before the evaluation of `step` was done

    @classmethod
    def of(cls, found: Restored) -> "Place":
        """That of a checkpoint."""
        saved = found.progress
        return cls(found.step, saved.get("history", []), saved.get("is_evaluation_due", False))

    def to_save(self, recorder: Recorder) -> dict:
        """What a checkpoint holds beside the state: plain JSON."""
        return {
            "is_evaluation_due": self.is_evaluation_due,
            "history": self.scores,
            "progress": recorder.window.to_save(),
        }

    def is_end(self, job: Job) -> bool:
        """Whether nothing is left to train or to evaluate."""
        is_over = self.step >= job.num_steps or job.evaluator.is_enough(self.scores)
        return is_over and not self.is_evaluation_due


def run(config: ConfigDict, workdir: Path, job: Job, interruption: Interruption) -> TrainState:
    """Train as `job` says, from the newest checkpoint in `workdir` if there is one, to the end.

    Raises:
      UserError: the configuration does not fit what `workdir` holds. In this case nothing has been
        written there.
      FloatingPointError: a loss is not finite. All checkpoints are from before that.
      Stopped: SIGTERM or SIGINT came; the state is saved.
      OSError: a file cannot be written. All checkpoints are whole.
    """
    program, evaluator = job.program, job.evaluator
    keep, score = config.checkpoint.keep, evaluator.score if evaluator.keep_best else None
    every = config.eval_every_steps, config.checkpoint.every_steps, config.log_every_steps
    with (
        Display() as display,
        held(workdir),
        Checkpoints(workdir / "checkpoints", job.data.hash, keep, score) as checkpoints,
    ):
        changed = job.check(config, workdir)  # again: now no other run can change it
        found = checkpoints.restore_newest(program.abstract_state, display.log)
        found = found or Restored(0, with_params(program.init(), job.initial), {})
        state, place = found.state, Place.of(found)
        refuse_fewer_steps(config, workdir, job, place)
        if place.is_end(job):
            display.log(f"{workdir}: nothing to do, all {place.step:,} steps are done")
            return state
        with (
            contextlib.closing(job.data.batches(place.step, program.share)) as loaded,
            Recorder(config, workdir, job, display, found) as recorder,
            contextlib.closing(recorder.watched(loaded)) as batches,
            jax.transfer_guard("disallow"),
        ):
            recorder.begin(describe(config, job, state.params), changed)
            evaluates, saves, is_told = place.is_evaluation_due, False, False
            while True:
                # Do not reorder: what is not finite ends the run before it is judged or saved, and
                # whoever goes on from a checkpoint finds all lines up to it.
                if evaluates or saves:
                    recorder.catch_up()
                    with recorder.paused():
                        results = {}
                        if evaluates:
                            results = evaluator.run(state.params, lambda: interruption.is_requested)
                            place.is_evaluation_due = results is None
                        if evaluates and results is not None:
                            recorder.evaluated(place.step, results, state.params)
                            if evaluator.patience:
                                place.scores.append(evaluator.score(results))
                        if place.is_end(job) or (saves and results is not None):
                            checkpoints.save(place.step, state, results, place.to_save(recorder))
                if is_told or place.is_evaluation_due or place.is_end(job):
                    break
                batch = next(batches)
                state, sums = program.train_step(state, program.place(batch))
                place.step += 1
                recorder.add(place.step, sums, batch["input_ids"].shape)
                is_told, is_last = interruption.reached(place.step), place.step == job.num_steps
                evaluates, saves, closes = (is_last or place.step % n == 0 for n in every)
                if closes:
                    recorder.close_window()
            if not place.is_end(job):
                recorder.log(f"stopping at step {place.step:,}")
                recorder.catch_up()
                checkpoints.save(place.step, state, {}, place.to_save(recorder))
                raise interruption.stopped(place.step)
    display.log(f"done: {workdir / 'report.html'}")
    return state


def refuse_fewer_steps(config: ConfigDict, workdir: Path, job: Job, place: Place) -> None:
    """Raises UserError where a run has more steps than it is to have."""
    if place.step > job.num_steps:
        length = "num_train_steps" if "num_train_steps" in config else "num_train_epochs"
        raise UserError(
            f"config.{length} is {config[length]}, but {workdir} is at step {place.step} already"
        )
