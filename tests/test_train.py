"""Whole runs: what they leave behind, how they go on, and when they refuse to."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
import tiny_tfds

from electra_jax import cli
from electra_jax.data import layout
from electra_jax.data.store import open_store
from electra_jax.jobs import pretraining
from electra_jax.jobs.exporting import export
from electra_jax.monitoring.writer import read_metrics
from electra_jax.objectives import make_objective
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training import program
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import make_program

pytestmark = pytest.mark.process

MLM = ["--config.objective=mlm"]
SPEED = ("learning_rate", "grad_norm", "tokens_per_second", "input_wait")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where runs are started: holds the corpus, the recipe and, after the first run, the store."""
    path = tmp_path_factory.mktemp("runs")
    tiny_run.make(path)
    return path


@pytest.fixture(scope="module")
def straight(place) -> subprocess.CompletedProcess:
    """20 steps without interruption; leaves `straight` in `place`."""
    return tiny_run.run(place, "straight")


def test_run_leaves_what_the_contract_says(place, straight):
    assert straight.returncode == 0, straight.stderr
    run = place / "straight"
    assert {path.name for path in run.iterdir()} == {*tiny_run.FILES}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"7", "14", "20"}
    assert {path.name for path in (run / "tokenizer").iterdir()} == {
        "vocab.txt",
        "tokenizer_config.json",
    }
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert json.loads((run / "config.json").read_text())["data"]["vocab_size"] == 700
    assert json.loads((run / "facts.json").read_text())["devices"]["number"] == "1"
    assert "Replaced token detection AUC" in (run / "report.html").read_text()


def test_run_shows_held_out_texts(place, straight):
    samples = json.loads((place / "straight" / "samples.json").read_text())
    assert samples["step"] == 20
    tokens = [token for text in samples["texts"] for token in text]
    assert any("original" in token and token["original"] != token["token"] for token in tokens)
    assert len({token["probability"] for token in tokens}) > 10
    assert (place / "straight" / "report.html").read_text().count("tabindex") == len(tokens)


def test_output_to_a_pipe_is_plain_lines_and_has_what_looks_wrong(straight):
    """After so few steps, the discriminator knows nothing yet."""
    assert not set(straight.stdout) & set(map(chr, {*range(32), 127} - {ord("\n")}))
    for part in ("mesh data 1 x fsdp 1 x tensor 1", "GFLOP per token", "all 20 steps take"):
        assert part in straight.stdout
    assert re.search(
        r"warning: step 8: the discriminator still finds no replaced token ", straight.stdout
    )
    assert "next checkpoint at 14" in straight.stdout


def test_metrics_are_those_documented(place, straight):
    """Names with the prefixes they have in docs/running.md; finite numbers, steps in order."""
    page = (Path(cli.__file__).parents[1] / "docs" / "running.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+) \|(.*?)\|", page, re.MULTILINE)
    documented = {
        f"{prefix}{name}"
        for names, prefixes in rows
        for name in re.findall(r"`(\w+)`", names)
        for prefix in re.findall(r"`(\w+/)`", prefixes) or [""]
    }
    lines = (place / "straight" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=lambda name: 1 / 0) for line in lines]
    names = {name for row in found for name in row}
    assert names - documented == {"step"}
    assert {"eval/rtd_auc", "train/rtd_recall", "mfu", "skipped_updates"} <= documented
    measures = {
        f"{split}/{name}" for split in ("train", "eval") for name in ReplacedTokenDetection.metrics
    }
    sometimes = {"train/rtd_precision", "eval/rtd_precision"}  # where some are called replaced
    assert names | sometimes == {"step", *measures, *SPEED} - {"train/rtd_auc"}
    assert all(type(row["step"]) is int for row in found)
    assert all(type(x) is float for row in found for name, x in row.items() if name != "step")
    steps = [row["step"] for row in found]
    assert steps == sorted(steps) and len(steps) == 20 + 3


def test_a_run_starts_from_exported_weights(place, straight, monkeypatch, capsys):
    """The first update has the rate 0, so the parameters after it are those of the source."""
    for part in ("discriminator", "generator"):
        export(place / "straight", place / part, part)
    flags = [
        "--config.num_train_steps=1",
        "--config.data.vocab=generator/vocab.txt",
        "--config.init_from=discriminator,generator",
    ]
    assert tiny_run.run_here(monkeypatch, place, "from_weights", *flags) == 0
    out = capsys.readouterr().out
    assert "  electra.embeddings.word_embeddings.weight -> embeddings/word\n" in out
    assert "initialized: nothing\n" in out
    assert "from_weights: starting at step 0\n" in out
    found, expected = (read_metrics(place / run)[-1] for run in ("from_weights", "straight"))
    assert (found.pop("step"), expected.pop("step")) == (1, 20)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([*found.values()], [expected[name] for name in found], rtol=1e-5)
    # Going on needs no weights to start from.
    for part in ("discriminator", "generator"):
        shutil.rmtree(place / part)
    shutil.copytree(place / "straight" / "tokenizer", place / "generator")
    assert tiny_run.run_here(monkeypatch, place, "from_weights", *flags) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_weights_that_do_not_fit_leave_nothing_behind(place, straight, monkeypatch, capsys):
    flags = ["--config.init_from=straight", "--config.data.vocab=straight/tokenizer/vocab.txt"]
    flags.append("--config.model.hidden_size=64")
    assert tiny_run.run_here(monkeypatch, place, "bad", *flags) == 2
    assert "hidden_size is 32 there and 64 here" in capsys.readouterr().err
    assert not (place / "bad").exists()


def test_loss_falls_and_every_step_is_logged_once(place, straight):
    rows = read_metrics(place / "straight")
    train_rows = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in train_rows] == list(range(1, 21))
    assert [row["step"] for row in rows if "eval/loss" in row] == [7, 14, 20]
    losses = [row["train/mlm_loss"] for row in train_rows]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.2
    evaluations = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert evaluations == sorted(evaluations, reverse=True)


def test_first_step_has_no_speed_and_nothing_compiles_after_it(place, straight):
    rows = [row for row in read_metrics(place / "straight") if "train/loss" in row]
    assert ["tokens_per_second" in row for row in rows] == [False] + [True] * 19
    assert "compiled in" in straight.stdout
    assert "compilations since" not in straight.stdout
    assert straight.stderr == ""


@pytest.mark.slow
def test_killed_run_goes_on_as_if_nothing_had_happened(place, straight):
    killed = tiny_run.run(place, "killed", signals="12:SIGKILL")
    assert killed.returncode == -9, killed.stderr
    steps_before = (place / "killed.batches").read_text().splitlines()
    assert len(steps_before) == 11
    resumed = tiny_run.run(place, "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "killed: resuming at step 7" in resumed.stdout

    batches = (place / "straight.batches").read_text().splitlines()
    assert len(set(batches)) == 20
    assert steps_before == batches[:11]
    assert (place / "killed.batches").read_text().splitlines()[11:] == batches[7:]
    tiny_run.assert_same_run(place / "killed", place / "straight", 20)


@pytest.mark.slow
@pytest.mark.parametrize("signals", ["12:SIGKILL", "15:SIGTERM"])  # in the second stage
def test_interrupted_run_begins_its_second_stage_at_the_same_step(place, signals):
    """Killed, it goes on from step 7, of the first stage; stopped, from where it is."""
    flags = [
        "--config.algorithm=two_stage",
        "--config.generator.sharing=gdes",
        "--config.generator.mle_steps=10",
    ]
    if not (place / "stages").exists():
        straight = tiny_run.run(place, "stages", *flags)
        assert straight.returncode == 0, straight.stderr
        assert "compilations since" not in straight.stdout
    rows = [row for row in read_metrics(place / "stages") if "train/loss" in row]
    assert [row["step"] for row in rows if "train/rtd_loss" not in row] == list(range(1, 11))
    workdir = signals.replace(":", "")
    interrupted = tiny_run.run(place, workdir, *flags, signals=signals)
    assert interrupted.returncode == (-9 if "KILL" in signals else 42), interrupted.stderr
    resumed = tiny_run.run(place, workdir, *flags)
    assert resumed.returncode == 0, resumed.stderr
    place_of_start = r"resuming at step 7\n" if "KILL" in signals else r"resuming at step 1[4-6]\n"
    assert re.search(place_of_start, resumed.stdout)
    tiny_run.assert_same_run(place / workdir, place / "stages", 20)


STAGES = ["--config.generator.mle_steps=4"]
VARIANTS = {
    "mlm": MLM,
    "electra_15": ["--config.objective=electra_15"],
    "replace_mlm": ["--config.objective=replace_mlm", "--config.loss.discriminator_weight=1"],
    "all_tokens_mlm": ["--config.objective=all_tokens_mlm"],
    "own_tables": ["--config.generator.sharing=none"],
    "one_network": ["--config.generator.sharing=all"],
    "gdes": ["--config.generator.sharing=gdes"],
    "frozen": ["--config.generator.kind=frozen", "--config.generator.sharing=gdes"],
    "unigram": ["--config.generator.kind=unigram", "--config.generator.width=0.25"],
    "two_stage": ["--config.algorithm=two_stage", "--config.generator.sharing=gdes", *STAGES],
    "adversarial": ["--config.algorithm=adversarial", *STAGES],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_objective_and_algorithm_passes_the_tests_of_the_main_job(name, place):
    """Killed and resumed it is the same run to the bit; on other meshes to rounding."""
    flags = [*VARIANTS[name], "--config.num_train_steps=10", "--config.eval_every_steps=10"]
    flags += ["--config.model.dropout=0", "--config.model.attention_dropout=0"]
    run = f"every_{name}"
    straight = tiny_run.run(place, run, *flags)
    assert straight.returncode == 0, straight.stderr
    assert "compiled in" in straight.stdout and "compilations since" not in straight.stdout
    killed = f"{run}_killed"
    assert tiny_run.run(place, killed, *flags, signals="9:SIGKILL").returncode == -9
    resumed = tiny_run.run(place, killed, *flags)
    assert "resuming at step 7\n" in resumed.stdout, resumed.stderr
    network = "generator" if name == "mlm" else "discriminator"
    tiny_run.assert_same_run(place / killed, place / run, 10, network)
    losses = losses_of(place / run)
    assert len(losses) == 11
    for mesh, options in {
        "sharded": ["--config.parallel.fsdp=2", "--config.parallel.tensor=2"],
        "pmapped": ["--config.parallel.api=pmap"],
    }.items():
        other = tiny_run.run(place, f"{run}_{mesh}", *flags, *options, devices=8)
        assert other.returncode == 0, other.stderr
        assert "compilations since" not in other.stdout
        found = losses_of(place / f"{run}_{mesh}")
        assert found == [pytest.approx(row, rel=1e-4) for row in losses]


def losses_of(workdir: Path) -> list[dict]:
    """Of each step, and of the evaluation."""
    return [
        {key: value for key, value in row.items() if key.endswith("loss")}
        for row in read_metrics(workdir)
    ]


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("loss.discriminator_weight", "the discriminator tells replaced tokens from others no bet"),
        ("loss.generator_weight", "the generator predicts tokens no better than by guessing"),
    ],
)
@pytest.mark.slow
def test_a_run_without_a_loss_is_warned_of_in_words(
    flag, sentence, place, straight, monkeypatch, capfd
):
    flags = [f"--config.{flag}=0", "--config.num_train_steps=7"]
    assert tiny_run.run_here(monkeypatch, place, flag, *flags) == 0
    assert re.search(f"warning: step 7: {sentence}", capfd.readouterr().out)


@pytest.mark.slow
def test_frozen_generator_of_another_run_stays_what_it_was(place, straight, monkeypatch, capfd):
    """All of it, weight decay or not."""
    flags = {
        "objective": "all_tokens_mlm",
        "loss.discriminator_weight": "1",
        "optimizer.weight_decay": "0.5",
        "generator.kind": "frozen",
        "generator.sharing": "gdes",
        "generator.init_from": "straight",
    }
    given = [f"--config.{name}={value}" for name, value in flags.items()]
    assert tiny_run.run_here(monkeypatch, place, "frozen", *given) == 0, capfd.readouterr().err
    source, made = tiny_run.arrays(place / "straight", 20), tiny_run.arrays(place / "frozen", 20)
    kept = [name for name in made if name.startswith(("params/generator/", "params/embeddings/"))]
    assert len(kept) > 10
    for name in kept:
        np.testing.assert_array_equal(made[name], source[name], err_msg=name)
    moments = [name for name in made if "opt_state" in name and "/generator/" in name]
    assert moments and not any(made[name].any() for name in moments)


def test_unigram_generator_counts_the_store_that_it_corrupts(place, straight, monkeypatch, capfd):
    made = []
    original = pretraining.make_objective
    monkeypatch.setattr(
        pretraining, "make_objective", lambda *x: made.append(original(*x)) or made[-1]
    )
    flags = ["--config.generator.kind=unigram", "--config.generator.width=0.25"]
    flags += ["--config.num_train_steps=2"]
    assert tiny_run.run_here(monkeypatch, place, "unigram", *flags) == 0, capfd.readouterr().err
    store = open_store(next((place / "data").iterdir()))
    assert made[0].frequencies == tuple(store.token_counts("train"))
    names = {name for row in read_metrics(place / "unigram") for name in row}
    assert "eval/rtd_auc" in names and "eval/mlm_loss" not in names


@pytest.mark.slow
def test_tensorflow_data_set_word_masks_and_segments_train(place, tmp_path, monkeypatch, capfd):
    tiny_tfds.make(tmp_path / "sets")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    weighted = "tfds:tiny_text#split=train#weight=1,corpus.txt#weight=3"
    flags = {
        "data.source": weighted,
        "data.tokenizer": "unigram",
        "data.layout": "electra",
        "masking.unit": "word",
        "num_train_steps": "7",
    }
    given = [f"--config.{name}={value}" for name, value in flags.items()]
    code = tiny_run.run_here(monkeypatch, place, tmp_path / "run", *given)
    assert code == 0, capfd.readouterr().err
    lines = read_metrics(tmp_path / "run")
    assert np.isfinite(lines[-1]["eval/loss"])
    facts = json.loads((tmp_path / "run" / "facts.json").read_text())
    assert facts["data"]["cut off"] != "0.00%"


def test_skips_losses_that_are_not_finite_and_stops_at_too_many(
    place, straight, monkeypatch, capfd
):
    healthy = program.train_step

    def ill(state, batch, seed, **kwargs):
        new_state, sums = healthy(state, batch, seed, **kwargs)
        is_ill = jax.numpy.isin(state.step, jax.numpy.array([5, 8, 9]))  # steps 6, 9 and 10
        poison = jax.numpy.where(is_ill, jax.numpy.nan, 1.0)
        return new_state, sums | {"mlm_loss": sums["mlm_loss"] * poison}

    monkeypatch.setattr(program, "train_step", ill)
    flags = [*MLM, "--config.log_every_steps=3", "--config.max_skipped_updates=1"]
    assert tiny_run.run_here(monkeypatch, place, "ill", *flags) == 1
    out, err = capfd.readouterr()
    assert "step 10: mlm_loss not finite after 1 skipped" in err and err.count("\n") == 1
    assert "warning: step 6: mlm_loss not finite" in out
    run = place / "ill"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["7"]
    assert tiny_run.arrays(run, 7)["step"] == 7
    rows = read_metrics(run)
    skipped = {row["step"]: row["skipped_updates"] for row in rows if "skipped_updates" in row}
    assert skipped == {3: 0.0, 6: 1.0, 9: 1.0}
    assert "NaN" not in (run / "metrics.jsonl").read_text()


def test_evaluation_counts_each_row_once(place, straight):
    """No batch size here divides the number of rows; metrics are those of the rows all the same."""
    config = runpy.run_path(str(place / "recipe.py"))["get_config"]()
    config.objective = "mlm"
    store = open_store(next((place / "data").iterdir()))
    held_out = layout.rows(store, "held_out", 32, "packed")
    objective = make_objective(config, store.tokenizer)
    optimizer = OptimizerConfig(num_steps=1, **config.optimizer)
    mesh = make_mesh(config.parallel)
    program = make_program(mesh, objective, optimizer, config.seed)
    params = program.init().params
    by_8, by_16 = (
        pretraining.evaluate(program, objective, params, held_out, size) for size in (8, 16)
    )
    assert len(held_out) % 8
    assert by_16 == pytest.approx(by_8, rel=1e-6)
