"""A head and a task from outside: listed in HEADS and TASKS, they need no other line anywhere."""

import dataclasses
import json
import sys
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from flax import nnx

from electra_jax import predict
from electra_jax.data.opening import read_lines
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.config import get_config, validate
from electra_jax.finetune.encoding import encode_texts
from electra_jax.finetune.heads import HEADS
from electra_jax.finetune.heads.base import LOSS, Head
from electra_jax.finetune.tasks import TASKS
from electra_jax.finetune.tasks.base import Files, FileTask
from electra_jax.inference.configuration import load_config
from electra_jax.jobs.finetuning import finetune
from electra_jax.modeling.layers import dense, glorot_uniform
from electra_jax.objectives.base import pair
from electra_jax.objectives.metrics import Metric
from electra_jax.settings import POSITIVE, setting


class Rate(nnx.Module):
    def __init__(self, encoder, rngs):
        self.output = dense(encoder.hidden_size, 1, glorot_uniform, encoder.dtype, rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Head):
    """How many there are of something, with the loss of Poisson's distribution."""

    scale: float = 1.0

    metrics: ClassVar = {
        "loss": LOSS,
        "mean_count": Metric("mean count", console="count", figure="Counts"),
    }
    from_data: ClassVar = ("scale",)

    def layers(self, encoder, rngs):
        return Rate(encoder, rngs)

    def sums(self, layers, hidden, batch, key):
        log_rate, weights = self.outputs(layers, hidden, batch)["log_rate"], self.weights(batch)
        loss = jnp.exp(log_rate) - batch["count"] * log_rate
        return {"loss": pair(loss, weights), "mean_count": pair(jnp.exp(log_rate), weights)}

    def outputs(self, layers, hidden, batch):
        return {"log_rate": layers.output(hidden[:, 0])[:, 0].astype(jnp.float32)}


class CountTask(FileTask):
    """Lines such as `3|some text`; the number is to be found."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Files):
        separator: str = setting("|", "between number and text")
        scale: float = setting(1.0, "of the numbers", POSITIVE)

    metrics: ClassVar = {"error": Metric("error of counts", better="lower", figure="Counts")}

    @property
    def head(self):
        return HEADS["counting"](scale=self.settings.scale)

    def is_labelled(self, example):
        return bool(example[0])

    def read_file(self, split, path):
        return [tuple(line.split(self.settings.separator)) for line in read_lines(path)]

    def features(self, examples, tokenizer, max_length, training):
        arrays = encode_texts(tokenizer, [(text, None) for _, text in examples], max_length)
        arrays["example"] = np.arange(len(examples), dtype=np.int32)
        if all(map(self.is_labelled, examples)):
            counts = [int(number) for number, _ in examples]
            arrays["count"] = np.array(counts, np.float32) / self.settings.scale
        return arrays

    def predict(self, examples, features, outputs):
        return (self.settings.scale * np.exp(outputs["log_rate"])).tolist()

    def compare(self, examples, predictions):
        errors = [
            abs(int(number) - x) for (number, _), x in zip(examples, predictions, strict=True)
        ]
        return {"error": float(np.mean(errors))}

    def floor(self, examples):
        return -1.0

    def write(self, predictions, directory, split):
        return [write_text(directory / f"{split}.txt", "\n".join(map(str, predictions)))]

    def example(self, number, values, where):
        if "text" not in values:
            raise UserError(f"{where}: there is no text")
        return "", values["text"]

    def answer(self, prediction):
        return {"count": prediction}


@pytest.fixture(autouse=True)
def listed(monkeypatch):
    monkeypatch.setitem(HEADS, "counting", Counting)
    monkeypatch.setitem(TASKS, "counts", CountTask)


def test_a_task_and_a_head_from_outside_are_trained_resumed_and_used(
    encoder_run, tmp_path, capsys, monkeypatch
):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 6, 32)
    lines = [f"{n}/{' '.join(['value'] * n + ['list'] * (8 - n))}" for n in numbers]
    config = get_config()
    config.init_from = str(encoder_run)
    config.update(batch_size=8, num_train_epochs=2.0, log_every_steps=1)
    config.data.update(kind="counts", name="values", max_length=16, separator="/", scale=2.0)
    for split in ("train", "dev"):
        config.data[split] = str(tmp_path / f"{split}.txt")
        (tmp_path / f"{split}.txt").write_text("\n".join(lines))
    run = tmp_path / "run"
    finetune(config, run)
    out = capsys.readouterr().out
    assert "count" in out.split("step 1/8")[1].splitlines()[0]
    config.update(num_train_epochs=4.0, resume="changed")
    finetune(config, run)
    assert "resuming at step 8" in capsys.readouterr().out
    rows = tiny_run.lines(run)
    assert {"train/mean_count", "train/loss"} <= {*rows[0]} and "eval/error" in rows[-1]
    assert json.loads((run / "results.json").read_text())["scores"]["dev"].keys() == {"error"}
    assert len((run / "predictions" / "dev.txt").read_text().splitlines()) == len(lines)
    assert "values" in (run / "report.html").read_text()
    assert load_config(run).data.separator == "/"
    (tmp_path / "new.jsonl").write_text('{"text": "value value"}\n{"text": "list"}\n')
    answers = tmp_path / "answers.jsonl"
    flags = (f"--workdir={run}", f"--input={tmp_path / 'new.jsonl'}", f"--output={answers}")
    monkeypatch.setattr(sys, "argv", ["predict", *flags])
    predict.main()
    counts = [json.loads(line)["count"] for line in answers.read_text().splitlines()]
    assert len(counts) == 2 and all(count > 0 for count in counts)


def test_settings_of_other_tasks_have_no_effect_here(tmp_path):
    config = get_config()
    config.data.separator = "/"
    assert config.data.kind == "glue"
    config.init_from, config.data.source = "encoder", "glue"
    with pytest.raises(UserError, match=r"config.data.separator is '/'.*no effect.*'glue'"):
        validate(config, 1)
