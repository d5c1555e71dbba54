"""Several processes that train as one: how they find each other.

On a TPU pod, under Slurm (`srun`) and under Open MPI (`mpirun`) JAX finds the others by itself.
Anywhere else three flags say it: the address of process 0, how many there are, which one this is.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from electra_jax.errors import UserError

Result = TypeVar("Result")

# A process that does not answer for so long is taken for dead, and all others end with an error.
HEARTBEAT_SECONDS = 60


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes of this run, if there are any. Call before JAX is used.

    Raises UserError where the flags do not make sense, or the others do not come.
    """
    given = {
        "--coordinator": coordinator,
        "--num_processes": num_processes,
        "--process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        if not _started_by_a_cluster():
            return
    elif missing:
        raise UserError(f"{missing[0]} is missing; {', '.join(given)} belong together")
    elif not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id is {process_id}; allowed: 0 to {num_processes - 1}, as "
            f"--num_processes is {num_processes}"
        )
    elif ":" not in coordinator:
        raise UserError(f"--coordinator is {coordinator!r}; allowed: HOST:PORT of process 0")
    try:
        jax.distributed.initialize(*given.values(), heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as error:  # the latter where JAX does not know the launcher
        raise UserError(
            f"the processes of this run did not find each other: {error}; "
            f"{', '.join(given)} say where they are"
        ) from error


def main_first(work: Callable[[], Result]) -> Result:
    """Calls `work` in process 0, then in all others.

    What process 0 makes is found by the others where they see its disk, and made again where not.
    """
    is_main = jax.process_index() == 0
    made = [work()] if is_main else []
    multihost_utils.sync_global_devices("process 0 is ready")
    return made[0] if is_main else work()


def main_only(work: Callable[[], None]) -> None:
    """Calls `work` in process 0; the others wait until it is done."""
    if jax.process_index() == 0:
        work()
    multihost_utils.sync_global_devices("process 0 has done it")


def everywhere(flag: bool) -> bool:
    """Whether `flag` is true in all processes."""
    return bool(multihost_utils.process_allgather(flag).all())


def check_equal(text: str, what: str) -> None:
    """Raises UserError where a text is not the same in all processes."""
    mine = np.frombuffer(text.encode().ljust(256)[:256], np.uint8)
    differs = (multihost_utils.process_allgather(mine) != mine).any(axis=1)
    if differs.any():
        raise UserError(
            f"{what} of process {jax.process_index()} is not that of the processes "
            f"{np.flatnonzero(differs).tolist()}"
        )


def _started_by_a_cluster() -> bool:
    """Whether this process is one of several by the signs that JAX itself looks for."""
    of_slurm = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", 1)) > 1
    of_mpi = int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
    has_tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    on_tpu = has_tpu and not os.environ.get("JAX_PLATFORMS", "tpu").startswith("cpu")
    return of_slurm or of_mpi or on_tpu
