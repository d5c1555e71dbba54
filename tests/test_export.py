"""What an exported directory holds, and what is not exported. See also test_transformers.py."""

import json
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import weights
from safetensors.numpy import load_file

from electra_jax import cli
from electra_jax import export as command
from electra_jax.errors import UserError
from electra_jax.finetune import config as finetuning
from electra_jax.interop import directory
from electra_jax.interop.directory import file_tensors
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.pretrained import load_encoder
from electra_jax.interop.source import WEIGHTS
from electra_jax.jobs.exporting import export
from electra_jax.modeling.encoders.bert import NAMING
from electra_jax.modeling.params import Params
from electra_jax.run.workdir import write_run_files
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.step import TrainState

ROW = {"step": 3, "eval/loss": 1.5, "eval/rtd_auc": 0.875, "eval/a|b\n\n# c": 1.0}
HOSTILE = "a&b.txt\n```\n# {{ step }} <b>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory after 3 steps, and its parameters."""
    place = tmp_path_factory.mktemp("run")
    config = weights.recipe()
    config.data.source = HOSTILE
    _, params = weights.random_params(config)
    weights.save_run(place, config, params)
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 1, "eval/loss": 9.0}, ROW, {"step": 5}]
    rows.append({"step": 5, "eval/loss": 7.0})
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "facts.json").write_text(json.dumps({"data": {"tokens": "1,234,567"}}))
    return place, params


def call(monkeypatch, *flags: str) -> int:
    monkeypatch.setattr("sys.argv", ["export", *flags])
    with pytest.raises(SystemExit) as exit:
        cli.run(command.main)
    return exit.value.code


@pytest.mark.parametrize("part", [None, "discriminator", "generator", "encoder"])
def test_the_files_of_every_part(part, run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "made" / "here"
    flags = [f"--part={part}"] if part else []
    assert call(monkeypatch, f"--workdir={run[0]}", f"--out={out}", *flags) == 0
    assert capsys.readouterr().out == f"written: {out}\n"
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
    assert [path.name for path in out.parent.iterdir()] == ["here"]
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in out.iterdir()}
    assert len(modes) == 1
    name = NAMING.parts[part or "discriminator"].architecture
    content = json.loads((out / "config.json").read_text())
    assert content["architectures"] == [name]
    assert content["hidden_size"] == (32 if part == "generator" else 64)
    assert content["pad_token_id"] == 0
    readme = (out / "README.md").read_text()
    for text in (name, "step 3", "| eval/rtd_auc | 0.8750 |", '"tokens": "1,234,567"'):
        assert text in readme
    assert "9.0" not in readme and "7.0" not in readme
    lines = readme.splitlines()
    assert r"| eval/a\|b # c | 1.0000 |" in lines
    headings = [line for line in lines if line.startswith("#")]
    assert headings == [f"# {name}", "## Provenance"]
    assert [line for line in lines if line.startswith("```")] == ["```json", "```"] * 2
    config = readme.split("Its configuration:\n\n```json\n")[1].removesuffix("\n```\n")
    assert json.loads(config)["data"]["source"] == HOSTILE
    prefix = "" if part == "encoder" else "electra."
    assert f"{prefix}encoder.layer.1.output.dense.bias" in load_file(out / "model.safetensors")


def test_an_export_is_a_source(run, tmp_path):
    export(run[0], tmp_path / "out", "encoder")
    found = load_encoder(str(tmp_path / "out"))
    weights.assert_equal(tiny.flat(found.params), weights.main_network(run[1]))
    assert found.encoder_config.sizes() == load_encoder(str(run[0])).encoder_config.sizes()
    assert found.tokenizer.hash == weights.vocabulary().hash


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_request_only(dtype, run, tmp_path):
    export(run[0], tmp_path / "whole")
    export(run[0], tmp_path / "half", dtype=dtype)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    half = load_file(tmp_path / "half" / "model.safetensors")
    expected = jnp.dtype(dtype)
    assert {x.dtype for x in whole.values()} == {np.dtype(np.float32)}
    assert {x.dtype for x in half.values()} == {expected}
    for name, x in whole.items():
        np.testing.assert_array_equal(half[name], x.astype(expected))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == dtype
    load_encoder(str(tmp_path / "half"))


def test_numbers_too_large_for_float16_are_refused(tmp_path):
    params = {"output": {"kernel": np.full((2, 2), 1e6, np.float32), "bias": np.zeros(2, "f4")}}
    with pytest.raises(
        UserError, match=r"qa_outputs.weight holds numbers .* not finite in float16"
    ):
        file_tensors({"head": params}, HuggingFaceLayout(NAMING, "qa"), "float16")


def test_what_is_there_is_not_overwritten(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").write_text("")
    assert call(monkeypatch, f"--workdir={run[0]}", f"--out={tmp_path}") == 2
    assert "which exists; allowed: a new or empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--part=classifier"],
            "--part is 'classifier'; allowed: discriminator, generator, encoder",
        ),
        (["--step=4"], "there is no checkpoint of step 4; there are 3"),
        (["--dtype=int8"], "dtype"),
    ],
)
def test_what_is_not_there_is_not_exported(flags, message, run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert call(monkeypatch, f"--workdir={run[0]}", f"--out={out}", *flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not any(tmp_path.iterdir())


def test_missing_flags_and_runs(tmp_path, monkeypatch, capsys):
    out, workdir = f"--out={tmp_path / 'out'}", f"--workdir={tmp_path}"
    assert call(monkeypatch, out) == 2
    assert "--workdir is missing" in capsys.readouterr().err
    assert call(monkeypatch, workdir, out) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert call(monkeypatch, workdir, out) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_failure_leaves_nothing(run, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr(directory, "write_tokenizer", fail)
    with pytest.raises(OSError, match="full"):
        export(run[0], tmp_path / "out")
    assert not any(tmp_path.iterdir())


def fine_tuned(workdir, kind: str, head: Params, labels: list[str] | None) -> Params:
    """A fine-tuning run, as small as can be."""
    _, params = weights.random_params(weights.recipe())
    params = weights.main_network(params) | {"head": head}
    config = finetuning.get_config()
    config.model.update(tiny.encoder_of(params).sizes())
    config.data.update(kind={"qa": "squad", "tagging": "tagging"}.get(kind, "table"))
    if kind in ("classification", "multilabel", "tagging"):
        config.data.labels = tuple(labels or map(str, range(head["output"]["bias"].size)))
    if kind == "tagging":
        config.data.scheme = "plain"
    if config.data.kind == "table":
        config.data.target = kind
    if kind == "regression":
        config.data.value_range = (0.0, 5.0)
    # Small, so that sums differ little between libraries.
    params = jax.tree.map(lambda x: np.float32(0.1) * x, params)
    state = TrainState(np.int32(2), params, {})
    with Checkpoints(workdir / "checkpoints", "hash", keep=1) as checkpoints:
        checkpoints.save(2, jax.tree.map(jax.numpy.asarray, state), {}, {})
    write_run_files(config, workdir, weights.vocabulary(), {})
    return params


def linear(inputs: int, outputs: int) -> Params:
    rng = np.random.default_rng(1)
    return {
        "kernel": rng.normal(size=(inputs, outputs)).astype(np.float32),
        "bias": rng.normal(size=outputs).astype(np.float32),
    }


@pytest.mark.parametrize(
    "kind, layers, labels, part, problem",
    [
        ("classification", {"dense": 64, "output": 3}, ["no", "maybe", "yes"], "classifier",
         "single_label_classification"),
        ("multilabel", {"dense": 64, "output": 2}, ["a", "b"], "classifier",
         "multi_label_classification"),
        ("regression", {"dense": 64, "output": 1}, None, "classifier", "regression"),
        ("tagging", {"output": 3}, ["ADJ", "ADV", "NOUN"], "tagger", None),
        ("qa", {"output": 2}, None, "qa", None),
    ],
)  # fmt: skip
def test_fine_tuned_heads(kind, layers, labels, part, problem, tmp_path):
    head = {name: linear(64, outputs) for name, outputs in layers.items()}
    head = fine_tuned(tmp_path / "run", kind, head, labels)["head"]
    export(tmp_path / "run", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["architectures"] == [NAMING.parts[part].architecture]
    assert content.get("problem_type") == problem
    if labels:
        assert content["id2label"] == {str(i): label for i, label in enumerate(labels)}
        assert content["label2id"] == {label: i for i, label in enumerate(labels)}
    if kind == "regression":
        assert content["num_labels"] == 1
        card = (tmp_path / "out" / "README.md").read_text()
        assert "It gives a number: 0 stands for 0.0, 1 for 5.0." in card
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, theirs in NAMING.parts[part].head.items():
        layer = head[name.removeprefix("head/")]
        np.testing.assert_array_equal(tensors[f"{theirs}.weight"], layer["kernel"].T)
        np.testing.assert_array_equal(tensors[f"{theirs}.bias"], layer["bias"])
    export(tmp_path / "run", tmp_path / "encoder", "encoder")
    assert not any("classifier" in name for name in load_file(tmp_path / "encoder" / WEIGHTS))


@pytest.mark.parametrize(
    "kind, layers",
    [
        ("classification", {"output": 3}),
        ("qa", {"start": 1, "end": 1, "answerable": 1}),
        ("tagging", {"dense": 64, "output": 3}),
    ],
)
def test_heads_that_hugging_face_does_not_have_are_refused_with_advice(kind, layers, tmp_path):
    fine_tuned(tmp_path / "run", kind, {name: linear(64, n) for name, n in layers.items()}, None)
    with pytest.raises(UserError, match=r"--config.head=huggingface .*--part=encoder"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "run", tmp_path / "out", "encoder")


def test_labels_that_do_not_fit_are_refused(tmp_path):
    fine_tuned(tmp_path / "run", "tagging", {"output": linear(64, 3)}, ["a"])
    with pytest.raises(UserError, match=r"labels has 1 names, but the head has 3 outputs"):
        export(tmp_path / "run", tmp_path / "out")
