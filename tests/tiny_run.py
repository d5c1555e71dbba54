"""Whole runs that take seconds: a corpus, a recipe, and the command that records its batches.

As a script, `tiny_run.py RECORD SIGNALS WORKDIR FLAGS...` is `electra_jax.main`, save that it
appends the step and the hash of every batch consumed to the file RECORD, and that it sends itself
SIGNALS: `12:SIGKILL` just before step 12, `12:SIGTERM,14:SIGINT` two of them; empty for none. In
place of a step, `evaluation` and `save` stand for the middle of the first of these. All processes
in its group get them. It does not kill itself before there is a checkpoint.
"""

import collections
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from stdlib_text import stdlib_documents
from tiny import flat

from electra_jax import cli, main
from electra_jax.data import loader
from electra_jax.jobs import pretraining
from electra_jax.monitoring.writer import read_metrics
from electra_jax.run.workdir import steps_in
from electra_jax.training.checkpoint import Checkpoints

RECIPE = """
from electra_jax.config import get_config as default

def get_config():
    config = default()
    config.num_train_steps = 20
    config.batch_size = 8
    config.log_every_steps = 1
    config.eval_every_steps = 7
    config.data.update(source="corpus.txt", vocab_size=700, held_out=0.1, sequence_length=32)
    config.model.update(hidden_size=32, num_layers=2, embedding_size=32, max_positions=32)
    config.generator.update(width=1.0, depth=1.0)
    config.optimizer.update(learning_rate=2e-3, warmup_steps=2)
    config.checkpoint.every_steps = 7
    return config
"""

FILES = ("checkpoints", "config.json", "facts.json", "metrics.jsonl", "report.html", "run.lock")
FILES += ("samples.json", "tensorboard", "tokenizer")


def make(directory: Path) -> Path:
    """Write `corpus.txt` and `recipe.py`; runs are started in `directory`, which is returned."""
    text = "\n\n".join("\n".join(document) for document in stdlib_documents())
    (directory / "corpus.txt").write_text(text)
    (directory / "recipe.py").write_text(RECIPE)
    return directory


def make_and_run(directory: Path) -> Path:
    """`make`, and a run of 20 steps without interruption in `straight`; returns `directory`."""
    result = run(make(directory), "straight")
    assert result.returncode == 0, result.stderr
    return directory


def snapshot(directory: Path) -> dict[str, str]:
    """Everything below `directory`, with a hash of what is in it."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in directory.rglob("*")
    }


def environment(place: Path, devices: int = 1) -> dict[str, str]:
    """That of a run in a process of its own, in `place`."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled"),  # for all modules
        "PYTHONPATH": str(Path(cli.__file__).parents[1]),
    }


def start(
    place: Path, workdir: str, *flags: str, signals: str = "", devices: int = 1
) -> subprocess.Popen:
    """A run in a process of its own; batches are recorded in `WORKDIR.batches`."""
    own = sys.executable, __file__, f"{workdir}.batches", signals, workdir
    return subprocess.Popen(
        [*own, "--config=recipe.py", *flags],
        cwd=place,
        env=environment(place, devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, for the signals that it sends itself
    )


def run(place: Path, workdir: str, *flags: str, **options) -> subprocess.CompletedProcess:
    """`start`, and wait for the end."""
    process = start(place, workdir, *flags, **options)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_here(monkeypatch, place: Path, workdir: Path | str, *flags: str) -> int:
    """The same command within this process, on eight devices; returns its exit code."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["main", "--config=recipe.py", f"--workdir={workdir}", *flags])
    try:
        cli.run(main.main)
    except SystemExit as exit:
        return exit.code


def arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, read without regard to the run that made them."""
    path = workdir / "checkpoints" / str(step) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        return flat(checkpointer.restore(path.absolute()))


def lines(workdir: Path) -> list[dict]:
    """What a run has logged, but for how fast it was."""
    speed = {"tokens_per_second", "input_wait", "mfu"}
    return [
        {name: value for name, value in row.items() if name not in speed}
        for row in read_metrics(workdir)
    ]


def newest(workdir: Path) -> int:
    """The step of the newest checkpoint, or 0."""
    return max(steps_in(workdir / "checkpoints"), default=0)


def batches(workdir: Path) -> dict[int, set[str]]:
    """By step, the hashes of all batches that the run was ever given."""
    found = collections.defaultdict(set)
    for line in workdir.with_name(f"{workdir.name}.batches").read_text().splitlines():
        step, content = line.split()
        found[int(step)].add(content)
    return found


def assert_same_run(found: Path, expected: Path, step: int, network: str = "discriminator") -> None:
    """The same parameters and moments to the bit, the same metrics in the same order."""
    assert lines(found) == lines(expected)
    expected_arrays, found_arrays = arrays(expected, step), arrays(found, step)
    assert expected_arrays.keys() == found_arrays.keys()
    assert any(network in name for name in expected_arrays)
    for name, value in expected_arrays.items():
        np.testing.assert_array_equal(found_arrays[name], value, strict=True, err_msg=name)


def recorded(
    record: Path, signals: dict[str, str], workdir: Path, start_step: int, batches: Iterator[dict]
) -> Iterator[dict]:
    for step, batch in enumerate(batches, start_step + 1):
        if name := signals.get(str(step)):
            while name == "SIGKILL" and not newest(workdir):
                time.sleep(0.05)
            send(name, workdir)
        content = b"".join(batch[name].tobytes() for name in sorted(batch))
        with record.open("a") as file:
            file.write(f"{step} {hashlib.sha256(content).hexdigest()}\n")
        yield batch


def send(name: str, workdir: Path) -> None:
    """To all processes of the group; when that was is the time of the file `WORKDIR.sent`."""
    workdir.with_name(f"{workdir.name}.sent").touch()
    os.killpg(0, signal.Signals[name])


def sent_after_the_first(function: Callable, name: str | None, workdir: Path) -> Callable:
    """`function`, whose first call is followed by the signal `name`, if any."""
    left = [name] if name else []

    def called(*args):
        result = function(*args)
        if left:
            send(left.pop(), workdir)
            time.sleep(0.2)  # it is here before anything else happens
        return result

    return called


if __name__ == "__main__":
    record, signals, workdir, *flags = sys.argv[1:]
    sys.argv[1:] = [f"--workdir={workdir}", *flags]
    at = dict(pair.split(":") for pair in signals.split(",") if pair)
    run_path, train_batches = Path(workdir), loader.train_batches
    loader.train_batches = lambda rows, start, *args, **kwargs: recorded(
        Path(record), at, run_path, start, train_batches(rows, start, *args, **kwargs)
    )
    pretraining.add_up = sent_after_the_first(pretraining.add_up, at.get("evaluation"), run_path)
    Checkpoints.save = sent_after_the_first(Checkpoints.save, at.get("save"), run_path)
    cli.run(main.main)
