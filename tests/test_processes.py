"""Several real processes on this machine, started by the local launcher."""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_run
from tiny import flat

from electra_jax.errors import UserError
from electra_jax.run import processes
from electra_jax.training.checkpoint import restore_params

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
STEPS = 6


def start(place: Path, count: int, devices: int, workdir: str, *flags: str) -> subprocess.Popen:
    """A run of `count` processes with `devices` devices each."""
    return subprocess.Popen(
        [
            *(sys.executable, ROOT / "launch" / "local.py"),
            *(f"--processes={count}", f"--devices={devices}", "--"),
            *("--config=recipe.py", f"--workdir={workdir}"),
            *(f"--config.num_train_steps={STEPS}", "--config.eval_every_steps=3"),
            *("--config.model.dropout=0", "--config.model.attention_dropout=0"),
            *("--config.checkpoint.every_steps=3", *flags),
        ],
        cwd=place,
        env=tiny_run.environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(run: subprocess.Popen, code: int = 0) -> str:
    """What a run has printed, which must end with this exit code."""
    output, _ = run.communicate(timeout=300)
    assert run.returncode == code, output
    return output


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tiny_run.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def one(place) -> Path:
    """The run of a single process with 8 devices."""
    finished(start(place, 1, 8, "one"))
    return place / "one"


def assert_close(found: Path, expected: Path, rtol: float) -> None:
    """The metrics, and the parameters of the last step, which are read without their devices."""
    for row, other in zip(tiny_run.lines(found), tiny_run.lines(expected), strict=True):
        assert row == pytest.approx(other, rel=rtol, abs=rtol)
    arrays, others = (
        flat(restore_params(run / "checkpoints", STEPS)[1]) for run in (found, expected)
    )
    for name, array in arrays.items():
        np.testing.assert_allclose(array, others[name], rtol=10 * rtol, atol=rtol)


@pytest.mark.parametrize(
    ("count", "flags"),
    [(2, []), pytest.param(4, ["--config.parallel.fsdp=2"], marks=pytest.mark.slow)],
)
def test_processes_compute_what_one_does(place, one, count, flags):
    run = place / f"of{count}"
    output = finished(start(place, count, 8 // count, run.name, *flags))
    assert output.count("starting at step 0") == 1  # one of them speaks
    assert_close(run, one, 1e-6)
    for workdir in (run, one):
        assert {path.name for path in workdir.iterdir()} == {*tiny_run.FILES}
    facts = json.loads((run / "facts.json").read_text())
    assert facts["devices"]["processes"] == str(count)


def wait_for(run: subprocess.Popen, text: str) -> None:
    """Reads what a run prints until `text` is in it."""
    assert any(text in line for line in run.stdout), f"ended with {run.wait()} before {text!r}"


def test_stopped_processes_save_the_same_step_and_others_go_on(place, one):
    run = start(place, 2, 4, "moved", "--config.log_every_steps=1")
    wait_for(run, "step 2/")
    run.send_signal(signal.SIGTERM)
    stops = re.findall(r"stopped by SIGTERM at step (\d+),", finished(run, 42))
    assert len(stops) == 2 and len({*stops}) == 1
    assert (place / "moved" / "checkpoints" / stops[0]).is_dir()
    flags = "--config.parallel.fsdp=2", "--config.log_every_steps=1"
    assert f"resuming at step {stops[0]}" in finished(start(place, 1, 4, "moved", *flags))
    assert_close(place / "moved", one, 1e-5)


@pytest.mark.slow
def test_processes_pass_over_a_damaged_checkpoint_together(place, one):
    shutil.copytree(one, place / "damaged")
    shutil.rmtree(place / "damaged" / "checkpoints" / str(STEPS) / "state" / "d")
    output = finished(start(place, 2, 4, "damaged"))
    assert output.count(f"{STEPS} is now {STEPS}.damaged.1, and of no further use\n") == 1
    assert output.count("resuming at step 3\n") == 1
    assert_close(place / "damaged", one, 1e-6)


@pytest.mark.slow
def test_no_process_waits_for_a_dead_one(place):
    run = start(place, 2, 1, "dead", "--config.num_train_steps=100000")
    wait_for(run, "compiled in")
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    killed = time.monotonic()
    run.communicate(timeout=90)
    assert run.returncode not in (0, 42)
    assert time.monotonic() - killed < processes.HEARTBEAT_SECONDS + 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, None), "--process_id is missing"),
        ((None, 2, 0), "--coordinator is missing"),
        (("host:1", 2, 2), "--process_id is 2; allowed: 0 to 1, as --num_processes is 2"),
        (("host", 2, 1), "--coordinator is 'host'; allowed: HOST:PORT"),
    ],
)
def test_flags_belong_together(arguments, message):
    with pytest.raises(UserError, match=message):
        processes.join(*arguments)


CLUSTERS = {
    "Slurm": lambda i, number: {
        **{"SLURM_JOB_ID": str(number), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"},
        **{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
    },
    "Open MPI": lambda i, number: {
        "OMPI_MCA_orte_hnp_uri": f"{number * 2**12}.0;tcp://127.0.0.1:1",
        **{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(i)},
        "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
    },
}


def greet(environment: dict[str, str]) -> subprocess.Popen:
    """A process that joins the others as `main` does, and says which one of how many it is."""
    code = (
        "import jax; from electra_jax.run import processes; processes.join(None, None, None);"
        "processes.check_equal('all of them', 'this');"
        "print(jax.process_index(), jax.process_count(), len(jax.local_devices()))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={
            **{name: x for name, x in os.environ.items() if not name.startswith("SLURM_")},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            **{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""},
            **environment,
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def is_free(number: int) -> bool:
    """Whether the port is that JAX derives from the number of a job."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("localhost", 2**16 - 2**12 + number)) != 0


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_processes_find_each_other_by_what_a_cluster_sets(cluster):
    """The variables are those that srun and mpirun give to each process of two on one host."""
    number = next(number for number in itertools.count(os.getpid() % 2**11) if is_free(number))
    group = [greet(CLUSTERS[cluster](i, number)) for i in range(2)]
    said = [process.communicate(timeout=60)[0].splitlines() for process in group]
    assert "0 2 2" in said[0] and "1 2 2" in said[1]


def test_a_launcher_that_jax_does_not_know_is_an_error_with_advice(monkeypatch):
    """Such as Open MPI 5, which no longer says where the first process is."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("OMPI_MCA_orte_hnp_uri", raising=False)
    with pytest.raises(UserError, match=r"did not find each other: .* --coordinator, --num_proc"):
        processes.join(None, None, None)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "8"}, False),  # inside a job, but not started by srun
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "node[1-2]"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "node1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
    ],
)
def test_clusters_are_recognized(monkeypatch, environment, expected):
    for name in ("SLURM_NTASKS", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes._started_by_a_cluster() is expected
