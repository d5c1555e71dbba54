"""Runs that are told to stop, or killed, and what becomes of them when they are started again."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import tiny_run
from jax.experimental import multihost_utils

from electra_jax.run import interruption
from electra_jax.run.interruption import Interruption

pytestmark = pytest.mark.process

# Windows of 4 steps, which neither evaluations nor checkpoints end with.
FLAGS = (
    "--config.log_every_steps=4",
    "--config.eval_every_steps=5",
    "--config.checkpoint.every_steps=7",
    "--config.num_train_steps=18",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tiny_run.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def straight(place) -> Path:
    result = tiny_run.run(place, "straight", *FLAGS)
    assert result.returncode == 0, result.stderr
    return place / "straight"


def assert_stopped_in_time(run: Path, result: subprocess.CompletedProcess) -> None:
    """It has just ended, with 42, at most 10 seconds after it was told to."""
    assert time.time() - run.with_name(f"{run.name}.sent").stat().st_mtime < 10
    assert result.returncode == 42, result.stderr


def test_stopped_and_killed_run_is_the_same_as_one_that_was_not(place, straight):
    stopped = tiny_run.run(place, "stopped", *FLAGS, signals="10:SIGTERM")
    assert_stopped_in_time(place / "stopped", stopped)
    step = tiny_run.newest(place / "stopped")
    assert step in (9, 10, 11)
    assert stopped.stderr == (
        f"stopped by SIGTERM at step {step}, saved; run the same command again to go on\n"
    )
    killed = tiny_run.run(place, "stopped", *FLAGS, signals="17:SIGKILL")
    assert killed.returncode == -9
    assert f"resuming at step {step}\n" in killed.stdout
    last = tiny_run.run(place, "stopped", *FLAGS, signals="18:SIGTERM")
    assert "resuming at step 14\n" in last.stdout
    assert last.returncode == 42, last.stderr
    assert "held out at step 18" not in last.stdout  # it is due, but would take its time
    after = tiny_run.run(place, "stopped", *FLAGS)
    assert after.returncode == 0, after.stderr
    tiny_run.assert_same_run(place / "stopped", straight, 18)
    assert tiny_run.batches(place / "stopped") == tiny_run.batches(straight)
    logged = [row["step"] for row in tiny_run.lines(straight) if "train/loss" in row]
    assert logged == [4, 8, 12, 16, 18]


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "stops"), [("evaluation", [5]), ("save", [7, 8])])
def test_signal_during_evaluation_or_save(place, straight, moment, stops):
    """The first evaluation is that of step 5, and is then made up for; the first save of step 7."""
    stopped = tiny_run.run(place, moment, *FLAGS, signals=f"{moment}:SIGTERM")
    assert_stopped_in_time(place / moment, stopped)
    step = tiny_run.newest(place / moment)
    assert step in stops
    assert f"stopped by SIGTERM at step {step}, saved;" in stopped.stderr
    assert ("held out at step 5" in stopped.stdout) == (moment == "save")
    after = tiny_run.run(place, moment, *FLAGS)
    assert after.returncode == 0, after.stderr
    tiny_run.assert_same_run(place / moment, straight, 18)
    assert tiny_run.batches(place / moment) == tiny_run.batches(straight)


def test_signal_while_compiling_ends_the_run_at_once(place, straight):
    process = tiny_run.start(place, "compiling", *FLAGS, "--config.model.num_layers=3")
    assert any("starting at step 0" in line for line in process.stdout)
    time.sleep(1.0)  # the main thread is in the compiler now
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (-signal.SIGTERM, "", "")
    assert time.monotonic() - started < 2
    assert list((place / "compiling" / "checkpoints").iterdir()) == []


@pytest.fixture
def exits(monkeypatch) -> Iterator[list[int]]:
    """The codes with which this process would have ended. All handlers must be put back."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    codes = []
    monkeypatch.setattr(interruption.os, "_exit", codes.append)
    yield codes
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_after_a_step_is_a_request_and_before_it_is_left_to_the_system(exits, number):
    """Python could not handle it while it compiles."""
    with Interruption() as stop:
        assert signal.getsignal(number) == signal.SIG_DFL
        assert not stop.reached(1)
        assert signal.getsignal(number) != signal.SIG_DFL
        assert not stop.reached(2)
        signal.raise_signal(number)
        assert stop.is_requested
        assert stop.reached(3)
    assert exits == []
    assert str(stop.stopped(1234)).startswith(f"stopped by {number.name} at step 1,234, saved;")


def test_second_signal_ends_the_process_but_not_one_that_was_only_passed_on(
    exits, monkeypatch, capfd
):
    monkeypatch.setattr(interruption, "SAME_SIGNAL_SECONDS", 0.4)
    with Interruption() as stop:
        stop.reached(1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert exits == []
        time.sleep(0.4)
        signal.raise_signal(signal.SIGTERM)
        assert exits == [42]
    assert "second signal, SIGTERM" in capfd.readouterr().err


def test_several_processes_stop_at_the_step_that_jax_has_them_agree_on(exits, monkeypatch):
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda step: bool(told) and step == 5
    )
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))  # as JAX does
    try:
        with Interruption() as stop:
            assert not stop.reached(3)
            signal.raise_signal(signal.SIGINT)
            assert told == [signal.SIGTERM]
            assert not stop.is_requested
            assert not stop.reached(4)
            assert stop.reached(5)
            assert stop.is_requested
    finally:
        signal.signal(signal.SIGTERM, before)
    assert exits == []
