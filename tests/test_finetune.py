"""Fine-tuning as a whole: from a pre-training run to scores and predictions."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import tiny_run
from ml_collections import ConfigDict
from tiny_tasks import CASES, random_features, squad

from electra_jax.data.features import FeatureRows
from electra_jax.data.loader import train_batch
from electra_jax.errors import UserError
from electra_jax.finetune.config import get_config, validate
from electra_jax.finetune.heads.sentence import Classification
from electra_jax.finetune.objective import FineTuning
from electra_jax.interop.pretrained import load_encoder
from electra_jax.jobs.finetuning import finetune
from electra_jax.run.workdir import chosen_step
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import restore_params
from electra_jax.training.prediction import Predict, predict_rows
from electra_jax.training.program import make_program, make_trials_program

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
ENCODER = tiny.encoder(init_stddev=0.2)
THREE = Classification(labels=("a", "b", "c"))


def mesh(data: int) -> jax.sharding.Mesh:
    sizes = ConfigDict({"data": data, "fsdp": 1, "tensor": 1})
    return make_mesh(sizes, jax.devices()[:data])


@pytest.mark.parametrize("devices", [1, 8])
def test_every_example_is_predicted_once_and_in_order(devices):
    """17 of them in batches of 8: the last batch is filled up, and no number depends on that."""
    objective = FineTuning(ENCODER, THREE)
    params = objective.init(jax.random.key(0))
    arrays = random_features(17)
    predict = Predict(mesh(devices), objective.outputs)
    found = predict_rows(predict, params, FeatureRows(arrays), batch_size=8)
    batch = {name: jax.numpy.asarray(x) for name, x in arrays.items()}
    expected = jax.jit(objective.outputs)(params, batch)["logits"]
    assert found["logits"].shape == (17, 3)
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5)


def test_trials_at_once_are_what_each_is_alone():
    """With dropout, and each with its own order of the data."""
    objective = FineTuning(ENCODER, THREE)
    optimizer = tiny.optimizer(layerwise_decay=0.8)
    rows = FeatureRows({name: x for name, x in random_features(40).items() if name != "example"})
    seeds = (3, 4, 2**32 - 1)
    one = mesh(1)

    def batch(seed: int, step: int) -> dict[str, np.ndarray]:
        return train_batch(rows, step, batch_size=8, seed=seed)

    together = make_trials_program(one, objective, optimizer, seeds)
    states = together.init()
    totals = []
    for step in range(4):
        batches = [batch(seed, step) for seed in seeds]
        stacked = {name: np.stack([x[name] for x in batches]) for name in batches[0]}
        states, sums = together.train_step(states, together.place(stacked))
        totals.append(sums["loss"])
    alone = []
    for place, seed in enumerate(seeds):
        program = make_program(one, objective, optimizer, seed)
        state = program.init()
        losses = []
        for step in range(4):
            state, sums = program.train_step(state, program.place(batch(seed, step)))
            losses.append(sums["loss"])
        alone.append(losses)
        of_this = tiny.flat(jax.tree.map(lambda x, i=place: x[i], states.params))
        for name, value in tiny.flat(state.params).items():
            np.testing.assert_allclose(of_this[name], value, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(totals, np.sum(alone, axis=0), rtol=1e-5)
    assert len({float(losses[-1][0]) for losses in alone}) == 3


# Whole runs


@pytest.fixture(scope="module")
def place(tmp_path_factory, encoder_run) -> Path:
    """A pre-training run, and data to fine-tune on."""
    place = tmp_path_factory.mktemp("finetune")
    (place / "encoder").symlink_to(encoder_run)
    rng = np.random.default_rng(0)
    others = ["return", "the", "value", "of", "string", "and", "list", "in"]
    for split, number in (("train", 96), ("dev", 17), ("test", 5)):
        lines = ["text,label"] if split != "test" else ["text"]
        for _ in range(number):
            label = rng.choice(("file", "number"))
            words = rng.choice(others, 8).tolist()
            words[rng.integers(8)] = label
            lines.append(" ".join(words) + (f",{label}" if split != "test" else ""))
        (place / f"{split}.csv").write_text("\n".join(lines) + "\n")
    questions = [
        (f"q{i}", "What is the name?", f"Item {i} has the name {x} and the value {i * i}.", [x])
        for i, x in enumerate(["alpha", "beta", "gamma", "delta"] * 4)
    ]
    (place / "squad.json").write_text(squad(*questions).replace("v2.0", "1.1"))
    return place


def table_config(place: Path, **changes) -> ConfigDict:
    config = get_config()
    config.init_from = str(place / "encoder")
    config.data.update(kind="table", name="words", max_length=16)
    for split in ("train", "dev", "test"):
        config.data[split] = str(place / f"{split}.csv")
    config.model.update(dropout=0.0, attention_dropout=0.0)
    config.optimizer.update(learning_rate=3e-3, layerwise_decay=1.0)
    config.batch_size = 16
    config.num_train_epochs = 4.0
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    return config


def assert_same(found: Path, expected: Path, step: int, atol: float) -> None:
    """The newest checkpoints in these directories are of this step and have these parameters."""
    (found_step, params), (expected_step, others) = map(restore_params, (found, expected))
    assert found_step == expected_step == step
    for path, value in tiny.flat(others).items():
        np.testing.assert_allclose(tiny.flat(params)[path], value, 0, atol, err_msg=path)


def test_run_scores_predicts_and_leaves_what_is_needed(place):
    config = table_config(place, num_train_epochs=12.0)
    finetune(config, place / "table")
    files = {path.name for path in (place / "table").iterdir()}
    assert files >= {"config.json", "tokenizer", "checkpoints", "metrics.jsonl", "report.html"}
    results = json.loads((place / "table" / "results.json").read_text())
    assert results["task"] == "words" and results["scores"]["dev"]["accuracy"] > 0.8
    lines = (place / "table" / "predictions" / "dev.jsonl").read_text().splitlines()
    predictions = [json.loads(line) for line in lines]
    assert [line["id"] for line in predictions] == [str(i) for i in range(17)]
    gold = [line.split(",")[1] for line in (place / "dev.csv").read_text().split("\n")[1:-1]]
    right = np.mean([x["label"] == label for x, label in zip(predictions, gold, strict=True)])
    assert results["scores"]["dev"]["accuracy"] == pytest.approx(right)
    test = (place / "table" / "predictions" / "test.jsonl").read_text().splitlines()
    assert len(test) == 5 and "test" not in results["scores"]
    saved = json.loads((place / "table" / "config.json").read_text())
    assert saved["data"]["labels"] == ["file", "number"]
    assert (saved["model"]["hidden_size"], saved["eval_every_steps"]) == (32, 6)
    rows = tiny_run.lines(place / "table")
    assert any("eval/accuracy" in row for row in rows)


def test_trials_have_a_median_and_those_at_once_are_the_same(place, capsys):
    one = table_config(place, num_trials=2, num_train_epochs=1.0)
    finetune(one, place / "apart")
    out = capsys.readouterr().out
    shapes = re.findall(r"compiled in \S+ s (for batches of .*)", out)
    assert shapes and len(shapes) == len(set(shapes)), "the second trial compiles anew"
    together = table_config(place, num_trials=2, num_train_epochs=1.0, trials_at_once=2)
    finetune(together, place / "together")
    for number in range(2):
        names = [f"{run}/trial_{number}" for run in ("together", "apart")]
        assert_same(*(place / name / "checkpoints" for name in names), step=6, atol=1e-5)
    summary = json.loads((place / "apart" / "results.json").read_text())
    scores = [trial["scores"]["dev"]["accuracy"] for trial in summary["trials"]]
    assert [trial["seed"] for trial in summary["trials"]] == [0, 1]
    assert summary["scores"]["dev"]["accuracy"]["median"] == pytest.approx(np.median(scores))
    gold = (place / "dev.csv").read_text()
    chance = max(gold.count(",file"), gold.count(",number")) / 17
    flagged = ["failed" in trial for trial in summary["trials"]]
    assert flagged == [score <= chance for score in scores]
    capsys.readouterr()
    finetune(one, place / "apart")
    assert capsys.readouterr().out.count("nothing to do, there is a results.json") == 2


def test_trials_without_labels_to_score_by_have_predictions(place, capsys):
    config = table_config(place, num_trials=2, num_train_epochs=0.2, **{"data.dev": ""})
    finetune(config, place / "unscored")
    assert json.loads((place / "unscored" / "results.json").read_text())["scores"] == {}
    assert (place / "unscored" / "trial_1" / "predictions" / "test.jsonl").exists()


OTHERS = [name for name in CASES if name not in ("classification", "squad 1")]  # tested elsewhere


@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_task_is_trained_scored_and_predicted(name, place, tmp_path, capsys):
    """No network learns much in a step; that it is said where it has learned nothing."""
    case = CASES[name]
    task = case.make(tmp_path)
    config = table_config(place, num_train_epochs=1.0)
    config.data.update(get_config().data.to_dict() | vars(task.settings), max_length=32)
    config.data.update(kind=case.key, name=case.name)
    finetune(config, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    score, floor = results["scores"]["dev"][task.main_metric], task.floor(task.read("dev"))
    assert results.get("failed", []) == ["dev"] * (score <= floor)
    assert ("is no better than that of always" in capsys.readouterr().out) == (score <= floor)
    assert {*case.written} < {x.name for x in (tmp_path / "run" / "predictions").iterdir()}


def test_best_checkpoint_predicts_and_patience_ends_the_training(place):
    config = table_config(place, patience=2, num_train_epochs=50.0)
    config.checkpoint.keep_best = True
    finetune(config, place / "patient")
    rows = [row for row in tiny_run.lines(place / "patient") if "eval/accuracy" in row]
    scores = [row["eval/accuracy"] for row in rows]
    assert len(rows) == scores.index(max(scores)) + 3 < 50
    results = json.loads((place / "patient" / "results.json").read_text())
    assert results["scores"]["dev"]["accuracy"] == pytest.approx(max(scores))
    best = rows[scores.index(max(scores))]["step"]
    assert chosen_step(place / "patient") == results["step"] == best < rows[-1]["step"]
    newest, newest_params = restore_params(place / "patient" / "checkpoints")
    assert newest == rows[-1]["step"]
    tables = [
        load_encoder(str(place / "patient")).params["embeddings"]["word"],
        restore_params(place / "patient" / "checkpoints", best)[1]["embeddings"]["word"],
    ]
    np.testing.assert_array_equal(*tables)
    assert not np.array_equal(tables[0], newest_params["embeddings"]["word"])


def main(place: Path, devices: int, *flags: str) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "electra_jax.main", *flags],
        cwd=place,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(place.parent / "compiled"),
            "XLA_FLAGS": "",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_from_eight_devices_to_one_and_back(place):
    """The encoder was trained on 8; questions are learned on 1, and then again on 8."""
    flags = [
        f"--config={ROOT}/configs/squad.py:v1.1",
        *("--config.init_from=encoder", "--workdir=squad", "--config.data.max_length=32"),
        *("--config.data.train=squad.json", "--config.data.dev=squad.json"),
        *("--config.data.doc_stride=8", "--config.batch_size=8"),
        "--config.optimizer.learning_rate=1e-2",
    ]
    found = main(place, 1, *flags)
    assert found.returncode == 0, found.stderr
    first = json.loads((place / "squad" / "results.json").read_text())["scores"]["dev"]
    answers = json.loads((place / "squad" / "predictions" / "dev.predictions.json").read_text())
    assert list(answers) == [f"q{i}" for i in range(16)]
    again = main(place, 8, *flags, "--config.num_train_epochs=20", "--config.resume=changed")
    assert again.returncode == 0, again.stderr
    assert "resuming at step" in again.stdout
    second = json.loads((place / "squad" / "results.json").read_text())["scores"]["dev"]
    assert second["f1"] == 100 >= first["f1"] > 0


def test_stopped_and_resumed_is_the_same(place):
    """To the bit, predictions too."""
    config = table_config(place, num_train_epochs=2.0, **{"checkpoint.every_steps": 5})
    finetune(config, place / "straight")

    class StopError(Exception):
        pass

    real = FeatureRows.batch
    seen = []

    def batch(self, indices):
        seen.append(1)
        if "label" in self.arrays and len(seen) > 7:
            raise StopError
        return real(self, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureRows, "batch", batch)
        with pytest.raises(StopError):
            finetune(config, place / "stopped")
    assert not (place / "stopped" / "results.json").exists()
    finetune(config, place / "stopped")
    runs = [place / run for run in ("stopped", "straight")]
    assert_same(*(run / "checkpoints" for run in runs), step=12, atol=0)
    for split in ("dev", "test"):
        one, other = ((run / "predictions" / f"{split}.jsonl").read_bytes() for run in runs)
        assert one == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": ""}, "config.init_from is ''; allowed: a run, an export"),
        ({"data.kind": "glue", "data.name": "rt"}, "config.data.name is 'rt'; allowed: cola, "),
        ({"data.kind": "squad"}, "config.data.text is .*no effect with config.data.kind = 'squad'"),
        ({"data.train": ""}, "config.data.train is ''; allowed: the file to train on"),
        ({"patience": 2}, "config.patience needs config.checkpoint.keep_best = True"),
        (
            {"trials_at_once": 2, "parallel.fsdp": 8},
            "config.parallel.fsdp is 8; with config.trials_at_once = 2 it must be 1",
        ),
        (
            {"trials_at_once": 2, "histograms": True},
            "config.histograms is True; with config.trials_at_once = 2 it must be False",
        ),
        ({"batch_size": 12}, "config.batch_size is 12; allowed: a multiple of 8"),
        ({"data.labels": (0, 1)}, r"config.data.labels is \(0, 1\); allowed: text, each once"),
        ({"data.labels": ("a", "a")}, "config.data.labels is .* allowed: text, each once"),
        *(
            ({"data.value_range": x}, "config.data.value_range is .* allowed: two numbers, the sm")
            for x in ((1.0,), (1.0, 2.0, 3.0), ("a", "b"), (float("nan"), 1.0), (2.0, 1.0))
        ),
        ({"data.answerability": "both"}, "config.data.answerability is 'both'; allowed: one of"),
        (
            {"seed": 2**32 - 1, "num_trials": 2},
            "config.seed is 4294967295; with config.num_trials = 2 it must be at most 4294967294",
        ),
    ],
)
def test_values_that_make_no_sense(place, changes, message):
    config = table_config(place, **{"data.text": ("text",)})
    if changes.get("data.kind") == "squad":
        config.data.text = ("question", "text")
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        validate(config, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.max_length": 64}, "max_length is 64, but .* has 32 positions"),
        ({"model.hidden_size": 64}, "config.model.hidden_size is 64, but .* has 32"),
        ({"init_from": "nowhere"}, "nowhere: there are no weights"),
        ({"data.dev": "none.csv"}, "none.csv"),
        ({"data.dev": "empty.csv"}, "empty.csv: dev has no examples"),
        ({"data.test": "empty.csv"}, "empty.csv: test has no examples"),
        (
            {"data.train": "empty.csv", "data.labels": ("a", "b")},
            "empty.csv: train has no examples",
        ),
    ],
)
def test_mistakes_leave_nothing_behind(place, changes, message, monkeypatch):
    monkeypatch.chdir(place)
    Path("empty.csv").write_text("text,label\n")
    config = table_config(place, **changes)
    with pytest.raises(UserError, match=message):
        finetune(config, place / "mistaken")
    assert not (place / "mistaken").exists()


@pytest.mark.parametrize(
    ("recipe", "argument"),
    [
        *(("glue", task) for task in ("cola", "stsb", "mnli")),
        ("squad", "v2.0"),
        ("tagging", None),
        ("classify", "multilabel"),
    ],
)
def test_recipes_are_complete(recipe, argument):
    make = runpy.run_path(str(ROOT / "configs" / f"{recipe}.py"))["get_config"]
    config = make(argument) if argument else make()
    config.init_from = "encoder"
    config.data.update({"source": "glue"} if recipe == "glue" else {"train": "train"})
    validate(config, 1)
    assert config.num_train_epochs == {"stsb": 10, "v2.0": 2}.get(argument, 3)
