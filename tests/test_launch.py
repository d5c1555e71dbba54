"""Scripts and manifests of `launch/`, run against stand-ins for the programs that they call."""

import math
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from electra_jax.config import get_config
from electra_jax.settings import flatten

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
FLAGS = ["--config=recipe.py", "--config.data.source=a b/*.txt"]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a program first on the PATH that notes its arguments, a line a call."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, body: str = "") -> Path:
        calls = tmp_path / f"{name}.calls"
        program = tmp_path / "bin" / name
        program.write_text(
            f'#!/usr/bin/env bash\nprintf "%q " "$@" >> {calls}\necho >> {calls}\n{body}\n'
        )
        program.chmod(0o755)
        return calls

    return make


def calls(path: Path) -> list[list[str]]:
    return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(*command, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("code", [0, 1, 2])
@pytest.mark.parametrize("interrupted", [42, 143])
def test_restart_goes_on_while_interrupted(stand_in, code, interrupted):
    stand_in("sleep")
    python = stand_in(
        "python",
        f'[ "$(wc -l < "$(dirname "$0")/../python.calls")" -ge 3 ] && exit {code}\n'
        f"exit {interrupted}",
    )
    result = run(LAUNCH / "restart.sh", *FLAGS, PYTHON="python")
    assert result.returncode == code
    assert calls(python) == [["-m", "electra_jax.main", *FLAGS]] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_restart_ends_with_the_run_when_it_is_told_to(stand_in, number):
    python = stand_in("python", "trap 'exit 42' TERM\necho started\nwhile true; do sleep 0.1; done")
    restart = subprocess.Popen(
        [LAUNCH / "restart.sh", *FLAGS],
        env={**os.environ, "PYTHON": "python"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert restart.stdout.readline() == "started\n"
    restart.send_signal(number)
    restart.communicate(timeout=20)
    assert restart.returncode == 42
    assert len(calls(python)) == 1


TPU = {"TPU": "my-tpu", "ZONE": "my-zone", "PROJECT": "my-project"}


def test_tpu_run_quotes_flags_for_the_other_shell(stand_in):
    gcloud = stand_in("gcloud")
    assert run(LAUNCH / "tpu_vm.sh", "run", *FLAGS, **TPU).returncode == 0
    [call] = calls(gcloud)
    assert call[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
    assert {"--zone=my-zone", "--project=my-project", "--worker=all"} <= {*call}
    [command] = [part.removeprefix("--command=") for part in call if part.startswith("--command=")]
    words = shlex.split(command)
    assert words[words.index("launch/restart.sh") + 1 :][: len(FLAGS)] == FLAGS


def test_tpu_setup_copies_what_is_committed_to_all_hosts(stand_in):
    gcloud, git = stand_in("gcloud"), stand_in("git")
    assert run(LAUNCH / "tpu_vm.sh", "setup", **TPU).returncode == 0
    copy, install = calls(gcloud)
    assert copy[3] == "scp"
    assert "--worker=all" in copy
    assert any("requirements.lock" in part for part in install)
    assert calls(git)[0][0] == "archive"


@pytest.mark.parametrize(
    ("action", "environment", "message"),
    [
        ([], TPU, "launch/tpu_vm.sh setup"),
        (["dance"], TPU, "launch/tpu_vm.sh setup"),
        (["run"], {**TPU, "ZONE": ""}, "ZONE: its zone"),
    ],
)
def test_tpu_mistakes_are_said(stand_in, action, environment, message):
    gcloud = stand_in("gcloud")
    result = run(LAUNCH / "tpu_vm.sh", *action, **environment)
    assert result.returncode != 0
    assert message in result.stderr
    assert calls(gcloud) == []


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (2, False), (42, True), (143, True)])
def test_slurm_job_is_queued_again_when_interrupted(stand_in, code, requeued):
    srun, scontrol = stand_in("srun", f"exit {code}"), stand_in("scontrol")
    result = run("bash", LAUNCH / "slurm.sbatch", *FLAGS, SLURM_JOB_ID="7")
    assert result.returncode == code
    assert calls(srun)[0][-3:] == ["electra_jax.main", *FLAGS]
    assert calls(scontrol) == ([["requeue", "7"]] if requeued else [])


def test_slurm_job_asks_for_a_signal_to_its_processes():
    # With "B:" in front it would go to the shell alone.
    assert "#SBATCH --signal=TERM@120\n" in (LAUNCH / "slurm.sbatch").read_text()


def test_jobset_names_a_recipe_and_fields_that_exist():
    manifest = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [job] = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    pod = spec["template"]["spec"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    [container] = pod["containers"]
    chips = spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert chips == math.prod(map(int, topology.split("x")))
    words = shlex.split(container["args"][0])
    assert words[:4] == ["exec", "python3", "-m", "electra_jax.main"]
    names = flatten(get_config())
    for flag in words[4:]:
        name, _, value = flag.removeprefix("--").partition("=")
        if name == "config":
            assert (ROOT / value).exists()
        elif name != "workdir":
            assert name.removeprefix("config.") in names
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/shared"}
