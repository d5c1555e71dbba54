"""What can go wrong around a run: each fault is said, and nothing that was saved is lost."""

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import tiny
import tiny_run
from test_config import assign
from tiny_run import run_here

from electra_jax.config import get_config
from electra_jax.jobs import pretraining
from electra_jax.monitoring.writer import read_metrics
from electra_jax.run import workdir
from electra_jax.run.workdir import held

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Holds the corpus, the recipe, and `straight`, a run of 20 steps."""
    return tiny_run.make_and_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(place, tmp_path) -> Path:
    """A copy of `straight` to do harm to."""
    return Path(shutil.copytree(place / "straight", tmp_path / "run"))


@pytest.fixture
def refused(place, monkeypatch, capfd):
    """Runs with flags that are refused, in one line that is returned, and change nothing."""

    def run(workdir: Path, *flags: str) -> str:
        before = tiny_run.snapshot(workdir)
        assert run_here(monkeypatch, place, workdir, *flags) == 2
        assert tiny_run.snapshot(workdir) == before
        error = capfd.readouterr().err
        assert error.startswith("error: ") and error.splitlines()[-1].startswith("error: ")
        return error.removeprefix("error: ")

    return run


def test_damaged_checkpoint_and_cut_metrics_cost_the_steps_since_the_last_whole_one(place, run):
    for path in tiny.value_files(run / "checkpoints" / "20"):
        os.truncate(path, 1000)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 21, "train/lo')
    result = tiny_run.run(place, str(run))
    assert result.returncode == 0, result.stderr
    assert f"warning: {run}/checkpoints/20 cannot be read: " in result.stdout
    assert f"warning: {run}/checkpoints/20 is now 20.damaged.1" in result.stdout
    assert f"{run}: resuming at step 14\n" in result.stdout
    tiny_run.assert_same_run(run, place / "straight", 20)
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"7", "14", "20", "20.damaged.1"}


def test_no_whole_checkpoint_is_said_with_the_directory(run, refused):
    for step in ("7", "14", "20"):
        (run / "checkpoints" / step / "progress" / "metadata").unlink()
    assert re.match(f"{run}/checkpoints: .*steps 20, 14, 7;", refused(run))


def test_full_disk_while_saving_leaves_the_checkpoint_before(place, run):
    for step in ("14", "20"):
        shutil.rmtree(run / "checkpoints" / step)
    before = tiny_run.snapshot(run / "checkpoints" / "7")
    limit = 60_000  # less than the table of words, more than all files that hold no arrays
    process = tiny_run.start(place, str(run), "--config.eval_every_steps=20")  # no report yet
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    out, err = process.communicate()
    assert process.returncode == 2, err
    assert f"error: {run}/checkpoints: File too large" in err.splitlines()[-1]
    assert "resuming at step 7\n" in out
    assert tiny_run.snapshot(run / "checkpoints" / "7") == before


def test_damaged_token_shard_is_named(place, run, tmp_path, refused):
    shutil.copytree(place / "data", tmp_path / "data")
    shard = next((tmp_path / "data").glob("*/train-00000.tokens.npy"))
    os.truncate(shard, 100)
    assert re.match(f"{shard}: .*100 bytes", refused(run, f"--config.data.dir={tmp_path / 'data'}"))


def test_workdir_in_use_is_refused(place, run, refused, monkeypatch):
    with held(run):
        error = refused(run)
    assert f"process {os.getpid()} on {os.uname().nodename} holds {run}/run.lock" in error
    assert run_here(monkeypatch, place, run) == 0  # nothing is left of the hold


def test_closed_workdir_is_refused_before_anything_is_read(run, refused, monkeypatch):
    monkeypatch.setattr(workdir.os, "access", lambda path, mode: False)  # root may write anywhere
    assert refused(run).startswith(f"--workdir is {run}, but {run} ")


# Configurations: which go on with the run that is there, and which are refused


def test_finished_run_has_nothing_to_do(place, monkeypatch, capfd):
    before = tiny_run.snapshot(place)
    free = ["--config.log_every_steps=3", "--config.checkpoint.keep=1", "--config.data.prefetch=2"]
    assert run_here(monkeypatch, place, "straight", *free) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert tiny_run.snapshot(place) == before


def test_another_configuration_is_refused(run, refused):
    error = refused(
        run, "--config.seed=5", "--config.model.dropout=0.2", "--config.log_every_steps=3"
    )
    assert "config.model.dropout (was 0.1, is 0.2), config.seed (was 0, is 5);" in error
    assert "--config.resume=changed" in error


def test_more_rows_in_a_batch_than_there_are_is_refused(place, monkeypatch, capfd):
    assert run_here(monkeypatch, place, "big", "--config.batch_size=8000") == 2
    assert "config.batch_size is 8000, but config.data.source" in capfd.readouterr().err
    assert not (place / "big").exists()


@pytest.mark.parametrize("content", [b"", b'{"seed": ', b"[1, 2]", None])
def test_unreadable_configuration_beside_checkpoints(content, run, refused):
    path = run / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert re.match(f"{path}.*put back", refused(run))


def test_settings_that_came_or_went_since_a_run_do_not_keep_it_from_going_on(
    place, run, refused, monkeypatch, capfd
):
    path = run / "config.json"
    content = json.loads(path.read_text())
    content["data"]["of_long_ago"] = 7
    del content["masking"]["unit"], content["generator"]["temperature"]
    path.write_text(json.dumps(content))
    assert run_here(monkeypatch, place, run) == 0
    assert "nothing to do" in capfd.readouterr().out
    error = refused(run, "--config.masking.unit=word")
    assert "config.masking.unit (was 'token', is 'word')" in error


def test_run_goes_on_with_another_configuration_where_that_is_wanted(
    place, run, monkeypatch, capfd
):
    flags = ["--config.resume=changed", "--config.batch_size=16", "--config.num_train_steps=21"]
    flags += ["--config.data.sequence_length=16"]
    rows = read_metrics(run)
    assert run_here(monkeypatch, place, run, *flags) == 0
    changed = "config.batch_size (was 8, is 16), config.data.sequence_length (was 32, is 16), "
    changed += "config.num_train_steps (was 20, is 21);"
    assert changed in capfd.readouterr().out
    after = read_metrics(run)
    assert after[: len(rows)] == rows
    assert [row["step"] for row in after[len(rows) :]] == [21, 21]
    # From now on this is its own.
    assert run_here(monkeypatch, place, run, *flags[1:]) == 0
    assert run_here(monkeypatch, place, run) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ("model.num_layers=3", "the parameters in {run} do not fit config.model.num_layers (was 2"),
        ("num_train_steps=19", "config.num_train_steps is 19, but {run} is at step 20"),
        ("data.vocab_size=600", "{run}/checkpoints/20 was trained on the token store"),
    ],
)
def test_what_cannot_be_continued_is_refused_even_so(change, message, run, refused):
    error = refused(run, "--config.resume=changed", f"--config.{change}")
    assert error.startswith(message.format(run=run))


@pytest.mark.parametrize(
    ("changes", "step", "expected"),
    [
        ({"optimizer.b2": 0.9, "model.dropout": 0.3, "generator.temperature": 2.0}, 20, True),
        ({"generator.init_from": "runs/other"}, 20, True),
        ({"objective": "replace_mlm"}, 20, False),
        ({"algorithm": "adversarial"}, 20, False),
        ({"model.hidden_size": 128}, 20, False),
        ({"generator.depth": 0.5}, 20, False),
        ({"generator.sharing": "none"}, 20, False),
        ({"generator.kind": "uniform"}, 20, False),
        # A second stage that has begun does not move: its copy would be missing, or made again.
        ({"algorithm": "two_stage", "generator.mle_steps": 5}, 20, False),
        ({"algorithm": "two_stage", "generator.mle_steps": 30}, 20, False),
        ({"algorithm": "two_stage", "generator.mle_steps": 30}, 9, True),
    ],
)
def test_parameters_fit_a_configuration_that_has_the_same_ones(changes, step, expected):
    config = get_config()
    config.generator.update(width=1.0, depth=1.0, sharing="gdes")
    if "algorithm" in changes:
        config.update(algorithm="two_stage")
        config.generator.mle_steps = 10
    changed = config.copy_and_resolve_references()
    for name, value in changes.items():
        assign(changed, name, value)
    assert pretraining.fits(config, changed, step) is expected
