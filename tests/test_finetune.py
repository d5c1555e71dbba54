"""Fine-tuning as a whole: from a pre-training run to scores and predictions."""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import tiny_run
from ml_collections import ConfigDict

from electra_jax.data.features import FeatureRows
from electra_jax.data.loader import train_batch
from electra_jax.errors import UserError
from electra_jax.finetune.buckets import choose_widths, make_buckets, trimmed
from electra_jax.finetune.config import get_config, make_objective, make_task, validate
from electra_jax.finetune.heads.sentence import Classification
from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.objective import FineTuning
from electra_jax.interop.pretrained import load_encoder
from electra_jax.jobs.finetuning import complete, finetune
from electra_jax.objectives.base import Inputs
from electra_jax.run.workdir import chosen_step
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import restore_params
from electra_jax.training.prediction import make_predict, predict_rows
from electra_jax.training.program import make_program, make_trials_program

ROOT = Path(__file__).parents[1]
ENCODER = tiny.encoder(init_stddev=0.2)
QA = Spans()
THREE = Classification(labels=("a", "b", "c"))


def mesh(data: int) -> jax.sharding.Mesh:
    sizes = ConfigDict({"data": data, "fsdp": 1, "tensor": 1})
    return make_mesh(sizes, jax.devices()[:data])


def features(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    shape = number, 8
    return {
        "input_ids": rng.integers(5, 50, shape).astype(np.int32),
        "piece_ids": np.ones(shape, np.int32),
        "position_ids": np.broadcast_to(np.arange(8, dtype=np.int32), shape),
        "token_type_ids": np.zeros(shape, np.int32),
        "example": np.arange(number, dtype=np.int32),
        "label": rng.integers(0, 3, number).astype(np.int32),
    }


@pytest.mark.parametrize("devices", [1, 8])
def test_every_example_is_predicted_once_and_in_order(devices):
    """17 of them in batches of 8: the last batch is filled up, and no number depends on that."""
    objective = FineTuning(ENCODER, THREE)
    params = objective.init(jax.random.key(0))
    arrays = features(17)
    predict = make_predict(mesh(devices), objective.outputs)
    found = predict_rows(predict, params, FeatureRows(arrays), batch_size=8)
    batch = {name: jax.numpy.asarray(x) for name, x in arrays.items()}
    expected = jax.jit(objective.outputs)(params, batch)["logits"]
    assert found["logits"].shape == (17, 3)
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5)


def test_rows_are_cut_to_one_of_few_widths():
    """Nothing but padding is lost, no row is, and no choice of two widths leaves less padding."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(3, 12, 60), rng.integers(30, 49, 19), [49]])
    rng.shuffle(lengths)
    shape = len(lengths), 50
    ids = np.where(np.arange(50) < lengths[:, None], rng.integers(5, 99, shape), 0)
    arrays = {
        "input_ids": ids.astype(np.int32),
        "piece_ids": (ids > 0).astype(np.int32),
        "label": rng.random((80, 7), np.float32),
    }
    buckets = make_buckets(arrays, num_widths=2, batch_size=2)
    found = []
    for (begin, end), width in zip(pairwise(buckets.groups), buckets.widths, strict=True):
        batch = buckets.batch(np.arange(begin, end))
        assert batch["input_ids"].shape == batch["piece_ids"].shape == (end - begin, width)
        assert batch["label"].shape == (end - begin, 7)
        padded = np.pad(batch["input_ids"], ((0, 0), (0, 50 - width)))
        found += np.concatenate([padded, batch["label"]], axis=1).tolist()
    assert sorted(found) == sorted(np.concatenate([ids, arrays["label"]], axis=1).tolist())
    cost = lambda width: np.where(lengths <= width, width, 50).sum()  # noqa: E731
    narrow, wide = buckets.widths
    assert wide == 50
    assert cost(narrow) == min(cost(width) for width in range(8, 50, 8))
    assert buckets.mean_width == cost(narrow) / 80


@pytest.mark.parametrize("longest, width", [(3, 32), (32, 32), (33, 64), (70, 96)])
def test_what_is_padding_in_all_rows_is_not_predicted(longest, width):
    lengths = np.array([3, longest])
    arrays = {
        "piece_ids": (np.arange(96) < lengths[:, None]).astype(np.int32),
        "label": np.zeros((2, 96), np.float32),
    }
    found = trimmed(arrays)
    assert found["piece_ids"].sum() == 3 + longest
    assert found["piece_ids"].shape == (2, width)
    assert found["label"].shape == (2, 96)


def test_widths_have_rows_enough():
    lengths = np.repeat([5, 20, 44], [100, 3, 50])
    assert choose_widths(lengths, 4, min_rows=4) == (8, 48)
    assert choose_widths(lengths, 4, min_rows=3) == (8, 24, 48)
    assert choose_widths(lengths, 1, min_rows=3) == (48,)
    assert choose_widths(lengths, 4, min_rows=999) == (48,)


def test_widths_change_no_loss():
    objective = FineTuning(ENCODER, QA)
    arrays = features(8) | {name: np.zeros(8, np.int32) for name in ("start", "end")}
    arrays |= {"is_impossible": np.ones(8, np.int32), "allowed": np.zeros((8, 8), np.int32)}
    arrays["allowed"][:, 1:4] = 1
    wide = {name: np.pad(x, ((0, 0), (0, 4))) if x.ndim == 2 else x for name, x in arrays.items()}
    del wide["example"]
    params = objective.init(jax.random.key(0))
    losses = []
    for batch in (wide, make_buckets(wide, 1, 8).batch(np.arange(8))):
        arrays = {name: jax.numpy.asarray(x) for name, x in batch.items()}
        losses.append(objective.sums(params, Inputs(arrays, (), jax.random.key(0))))
    assert batch["allowed"].shape == (8, 8)
    for name, value in losses[0].items():
        np.testing.assert_allclose(losses[1][name], value, rtol=1e-5, err_msg=name)


def test_rows_of_padding_have_no_labels():
    rows = FeatureRows({"piece_ids": np.ones((2, 3), int), "label": np.ones((2, 3), int)})
    batch = rows.batch(np.array([1, -1]))
    np.testing.assert_array_equal(batch["piece_ids"], [[1] * 3, [0] * 3])
    np.testing.assert_array_equal(batch["label"], [[1] * 3, [-1] * 3])


def test_trials_at_once_are_what_each_is_alone():
    """With dropout, and each with its own order of the data."""
    objective = FineTuning(ENCODER, THREE)
    optimizer = tiny.optimizer(layerwise_decay=0.8)
    rows = FeatureRows({name: x for name, x in features(40).items() if name != "example"})
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
    paragraphs = [
        {
            "context": f"Item {i} has the name {name} and the value {i * i}.",
            "qas": [
                {
                    "id": f"q{i}",
                    "question": "What is the name?",
                    "answers": [{"text": name, "answer_start": 11 + len(f"Item {i}")}],
                }
            ],
        }
        for i, name in enumerate(["alpha", "beta", "gamma", "delta"] * 4)
    ]
    squad = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
    (place / "squad.json").write_text(json.dumps(squad))
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
    assert saved["model"]["hidden_size"] == 32
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
        name = f"trial_{number}"
        found, expected = (
            restore_params(place / run / name / "checkpoints") for run in ("together", "apart")
        )
        assert found[0] == expected[0] == 6
        for path, value in tiny.flat(expected[1]).items():
            np.testing.assert_allclose(tiny.flat(found[1])[path], value, atol=1e-5, err_msg=path)
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


def questions() -> dict:
    """Half of them without an answer."""
    entries = [
        {
            "id": str(i),
            "question": "What is the name?",
            "is_impossible": i % 2 > 0,
            "answers": [{"text": "alpha", "answer_start": 12}] * (i % 2 == 0),
        }
        for i in range(16)
    ]
    paragraphs = [{"context": "The name is alpha.", "qas": entries}]
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}


@pytest.mark.parametrize(
    ("kind", "rows", "options", "scores"),
    [
        ("table", [{"text": f"item {i}", "label": i} for i in range(16)], "regression", "spearman"),
        (
            "table",
            [{"text": f"item {i}", "label": ["a", "b"][: i % 3]} for i in range(16)],
            "multilabel",
            "micro_f1",
        ),
        ("tagging", [["Paul B-PER", "in O", "Rome B-LOC"]] * 16, None, "f1"),
        ("tagging", [["Paul N", "in P", "Rome N"]] * 16, None, "accuracy"),
        ("squad", questions(), None, "f1"),
    ],
)
def test_every_kind_of_task_is_trained_scored_and_predicted(
    kind, rows, options, scores, place, tmp_path, capsys
):
    """No network learns much in a step; that it is said where it has learnt nothing."""
    files = {"table": "data.jsonl", "tagging": "data.txt", "squad": "data.json"}
    path = tmp_path / files[kind]
    match kind:
        case "table":
            path.write_text("\n".join(map(json.dumps, rows)))
        case "tagging":
            path.write_text("\n\n".join("\n".join(sentence) for sentence in rows))
        case "squad":
            path.write_text(json.dumps(rows))
    config = table_config(place, num_train_epochs=1.0, **{"data.kind": kind, "data.test": ""})
    config.data.update(train=str(path), dev=str(path), max_length=32)
    config.data.unanswerable = kind == "squad"
    config.data.target = options or "classification"
    if kind == "squad":
        config.data.max_length, config.data.doc_stride = 30, 8
    finetune(config, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    task = make_task(config, lambda line: None)
    floor, found = task.floor(task.read("dev")), results["scores"]["dev"][scores]
    assert task.main_metric == scores and np.isfinite(found)
    assert results.get("failed", []) == ["dev"] * (found <= floor)
    assert ("is no better than that of always" in capsys.readouterr().out) == (found <= floor)
    assert any((tmp_path / "run" / "predictions").iterdir())


def test_best_checkpoint_predicts_and_patience_ends_the_training(place):
    config = table_config(
        place,
        **{
            "checkpoint.keep_best": True,
            "patience": 2,
            "num_train_epochs": 50.0,
        },
    )
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


def test_from_eight_devices_to_one_and_back(place):
    """The encoder was trained on 8; questions are learnt on 1, and then again on 8."""
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
    found, expected = (
        restore_params(place / run / "checkpoints") for run in ("stopped", "straight")
    )
    for path, value in tiny.flat(expected[1]).items():
        np.testing.assert_array_equal(tiny.flat(found[1])[path], value, err_msg=path)
    for split in ("dev", "test"):
        one, other = (
            (place / run / "predictions" / f"{split}.jsonl").read_bytes()
            for run in ("stopped", "straight")
        )
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


def test_sizes_of_the_head_follow_the_task(place):
    config = table_config(place)
    task = make_task(config, print)
    encoder = dataclasses.replace(ENCODER, max_positions=32)
    config = complete(config, task, encoder, 96)
    assert (config.eval_every_steps, config.optimizer.learning_rate) == (6, 3e-3)
    objective = make_objective(config, task)
    shapes = tiny.flat(jax.tree.map(lambda x: np.zeros(x.shape), objective.structure()))
    assert shapes["head/output/kernel"].shape == (16, 2)
