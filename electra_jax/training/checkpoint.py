"""Checkpoints: Orbax behind three verbs, `save`, `restore_newest` and `restore_params`.

Saving is asynchronous and atomic: what lies under a step's number was whole when it was written. A
checkpoint holds the train state, the hash of the token store it was trained on, and how far the
metrics are; the run's configuration and tokenizer lie beside the checkpoints in the run directory.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from electra_jax.errors import UserError
from electra_jax.modeling.params import Params
from electra_jax.run import processes
from electra_jax.run.workdir import steps_in
from electra_jax.training.step import TrainState

# How TensorStore tells what the operating system said.
SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds; `progress` is what was saved with the state, plain JSON."""

    step: int
    state: TrainState
    progress: dict


class Checkpoints:
    """The checkpoints of one run. Leaving the `with` block waits for what is being saved.

    Args:
      store_hash: of the token store; a checkpoint made with another one is refused.
      keep: number of newest checkpoints that stay.
      score: of the metrics that are saved with a checkpoint: the one with the highest stays, too.
    """

    def __init__(
        self,
        directory: Path,
        store_hash: str,
        keep: int,
        score: Callable[[dict[str, float]], float] | None = None,
    ):
        policies = [preservation.LatestN(keep)]
        if score:
            policies.append(
                preservation.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
            )
        self.directory = directory.absolute()
        self.store_hash = store_hash
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation.AnyPreservationPolicy(policies),
                best_fn=score,  # or else Orbax does not store metrics
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        with self._system_errors():
            self.manager.close()

    def latest_step(self) -> int | None:
        """The newest checkpoint, be it on its way to the disk, or None."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, metrics: dict[str, float], progress: dict) -> None:
        """Start to save; returns when `state` may change again. A step is saved once.

        Args:
          metrics: of the evaluation at this step, if there was one.
          progress: comes back with the state; plain JSON.

        Raises:
          OSError: the disk is full or the like, now or at the checkpoint before. Others are whole.
        """
        if step == self.latest_step():
            return
        # Known beforehand, it is one line. Orbax has a traceback for each array it was writing.
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        if shutil.disk_usage(self.directory).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
        with self._system_errors():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    provenance=ocp.args.JsonSave({"store_hash": self.store_hash}),
                    progress=ocp.args.JsonSave(progress),
                ),
                metrics=metrics,
            )

    def restore_newest(
        self, abstract_state: TrainState, log: Callable[[str], None]
    ) -> Restored | None:
        """The newest checkpoint that can be read, or None where there is none at all.

        Those after it are renamed, so that they are out of the way of those to come. Several
        processes make the same choice: a checkpoint counts where each of them can read it.

        Args:
          abstract_state: shapes, dtypes and shardings of what is returned.

        Raises:
          UserError: a checkpoint was trained on another token store, or none can be read.
        """
        damaged = []
        for step in sorted(self.manager.all_steps(), reverse=True):
            restored, problem = None, "another process says so"
            try:
                restored = self._restore(step, abstract_state)
            except UserError:
                raise
            except Exception as error:  # Orbax has no class of its own for what it cannot read
                problem = reason(error)
            if processes.everywhere(restored is not None):
                for other in damaged:
                    self._set_aside(other, log)
                return restored
            log(f"warning: {self.directory / str(step)} cannot be read: {problem}")
            damaged.append(step)
        if damaged:
            raise UserError(
                f"{self.directory}: no checkpoint can be read, of the steps "
                f"{', '.join(map(str, damaged))}; the reasons are above. Move away those that are "
                "damaged to go on without them, or use another --workdir"
            )
        return None

    def _restore(self, step: int, abstract_state: TrainState) -> Restored:
        provenance = self._read(step, "provenance", ocp.args.JsonRestore())
        if provenance["store_hash"] != self.store_hash:
            raise UserError(
                f"{self.directory / str(step)} was trained on the token store "
                f"{provenance['store_hash'][:12]}, but config.data gives the store "
                f"{self.store_hash[:12]}; use another --workdir"
            )
        progress = self._read(step, "progress", ocp.args.JsonRestore())
        state = self._read(step, "state", ocp.args.StandardRestore(abstract_state))
        return Restored(step, state, progress)

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs):
        return self.manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]

    def _set_aside(self, step: int, log: Callable[[str], None]) -> None:
        def rename() -> None:
            names = (self.directory / f"{step}.damaged.{number}" for number in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            (self.directory / str(step)).rename(aside)
            log(f"warning: {self.directory / str(step)} is now {aside.name}, and of no further use")

        processes.main_only(rename)
        self.manager.reload()

    @contextlib.contextmanager
    def _system_errors(self) -> Iterator[None]:
        """Turns what TensorStore raises when the system refuses to write into an OSError."""
        try:
            yield
        except ValueError as error:
            if code := SYSTEM_ERROR.search(str(error)):
                number = int(code[1])
                raise OSError(number, os.strerror(number), str(self.directory)) from error
            raise


def restore_params(directory: Path, step: int | None = None) -> tuple[int, Params]:
    """Parameters alone, on the host: the optimizer's moments are neither read nor held.

    Returns:
      The step, by default the newest, and float32 NumPy arrays in the layout of the model.

    Raises:
      UserError: there is no such checkpoint, or it cannot be read.
    """
    steps = steps_in(directory)
    if not steps:
        raise UserError(f"{directory}: there is no checkpoint")
    if step not in (None, *steps):
        found = ", ".join(map(str, steps))
        raise UserError(f"{directory}: there is no checkpoint of step {step}; there are {found}")
    step = steps[-1] if step is None else step
    path = directory.absolute() / str(step)
    try:
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            params = handler.metadata(path / "state").tree["params"]
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), params)
            wanted = ocp.args.PyTreeRestore(
                {"params": params}, restore_args={"params": as_numpy}, partial_restore=True
            )
            return step, handler.restore(path / "state", args=wanted)["params"]
    except Exception as error:  # Orbax has no class of its own for what it cannot read
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The beginning of what Orbax says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
