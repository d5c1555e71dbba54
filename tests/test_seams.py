"""An encoder, an objective, heads and a task from outside, each added to its dictionary alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import toys

from electra_jax import cli, main, predict, report
from electra_jax.finetune.heads import HEADS
from electra_jax.finetune.tasks import TASKS
from electra_jax.modeling.encoders import ENCODERS
from electra_jax.objectives import OBJECTIVES

pytestmark = pytest.mark.process

PRETRAINING = (
    *("--config=recipe.py", "--config.objective=parity", "--config.model.encoder=local"),
    *("--config.loss.sharpness=2.0", "--config.model.reach=2", "--config.num_train_steps=4"),
    *("--config.eval_every_steps=2", "--config.checkpoint.every_steps=2"),
    *("--config.checkpoint.keep_best=eval/parity_share", "--config.model.embedding_size=16"),
    *("--config.parallel.fsdp=2", "--config.parallel.tensor=2", "--config.model.num_heads=2"),
)
FINETUNING = (
    *("--config=counts.py", "--config.init_from=run", "--config.data.max_length=16"),
    *("--config.data.train=train.txt", "--config.data.dev=train.txt", "--config.batch_size=8"),
    *("--config.num_train_epochs=2.0", "--config.eval_every_steps=4", "--config.log_every_steps=1"),
    *("--config.checkpoint.keep=2", "--config.parallel.fsdp=2", "--config.parallel.tensor=2"),
)
RECIPE = """
from electra_jax.finetune.config import get_config as default

def get_config():
    config = default()
    config.data.update(kind="counts", name="values", separator="/", scale=2.0)
    return config
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """Holds the corpus and the recipes; the parts are in their dictionaries meanwhile."""
    directory = tmp_path_factory.mktemp("seams")
    tiny_run.make(directory)
    (directory / "counts.py").write_text(RECIPE)
    numbers = np.random.default_rng(0).integers(0, 6, 32)
    lines = [f"{n}/{' '.join(['value'] * n + ['list'] * (8 - n))}" for n in numbers]
    (directory / "train.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENCODERS, "local", toys.Local)
        patch.setitem(OBJECTIVES, "parity", toys.Parity)
        patch.setitem(HEADS, "counting", toys.Counting)
        patch.setitem(TASKS, "counts", toys.CountTask)
        patch.chdir(directory)
        yield directory


def run(command, *flags: str) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr("sys.argv", ["command", *flags])
        cli.run(command.main)
    return exit.value.code


@pytest.fixture(scope="module")
def pretrained(place) -> Path:
    assert run(main, *PRETRAINING, "--workdir=run") == 0
    return place / "run"


def assert_resumed(flags: tuple[str, ...], workdir: str, middle: int, end: int) -> None:
    """The same to the bit if it goes on from a checkpoint."""
    shutil.copytree(workdir, "resumed", dirs_exist_ok=True)
    shutil.rmtree(f"resumed/checkpoints/{end}")
    Path("resumed/results.json").unlink(missing_ok=True)
    assert run(main, *flags, "--workdir=resumed") == 0
    whole, resumed = (tiny_run.arrays(Path(name), end) for name in (workdir, "resumed"))
    assert f"{middle}" in {path.name for path in Path("resumed/checkpoints").iterdir()}
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    shutil.rmtree("resumed")


def test_pretraining(pretrained, capfd):
    facts = json.loads((pretrained / "facts.json").read_text())
    assert facts["devices"]["mesh"] == "data 2 x fsdp 2 x tensor 2"
    assert run(report, "run") == 0
    page = (pretrained / "report.html").read_text()
    assert "Share of odd tokens" in page and "Parity loss (nats)" in page
    assert_resumed(PRETRAINING, "run", 2, 4)
    out = capfd.readouterr().out
    assert "resuming at step 2" in out and "parity 0." in out


def test_finetuning(pretrained, capfd):
    assert run(main, *FINETUNING, "--workdir=tuned") == 0, capfd.readouterr().err
    assert "count" in capfd.readouterr().out.split("step 1/8")[1].splitlines()[0]
    results = json.loads(Path("tuned/results.json").read_text())
    assert results["scores"]["dev"].keys() == {"error"}
    assert len(Path("tuned/predictions/dev.txt").read_text().splitlines()) == 32
    assert "Counts" in Path("tuned/report.html").read_text()
    assert_resumed(FINETUNING, "tuned", 4, 8)

    Path("new.jsonl").write_text('{"text": "value value"}\n{"text": "list"}\n')
    assert run(predict, "--workdir=tuned", "--input=new.jsonl", "--output=answers.jsonl") == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(answers) == 2 and all(answer["count"] > 0 for answer in answers)


def test_settings_from_outside_are_checked_like_others(place, capfd):
    for flags, message in (
        (["--config.loss.sharpness=0.0"], "config.loss.sharpness is 0.0; allowed: a number above"),
        (["--config.model.reach=0"], "config.model.reach is 0; allowed: at least 1"),
        (
            ["--config.objective=electra", "--config.checkpoint.keep_best="],
            "config.loss.sharpness is 2.0, which has no effect with config.objective = 'electra'",
        ),
        (
            ["--config.model.encoder=bert"],
            "config.model.reach is 2, which has no effect with config.model.encoder = 'bert'",
        ),
        (["--config.checkpoint.keep_best=eval/rtd_auc"], "eval/parity_loss, eval/parity_share"),
    ):
        assert run(main, *PRETRAINING, *flags, "--workdir=none") == 2
        assert message in capfd.readouterr().err
    flags = ["--config.data.kind=glue", "--config.data.name=cola", "--config.data.source=glue"]
    assert run(main, *FINETUNING, *flags, "--workdir=none") == 2
    assert "no effect" in capfd.readouterr().err
    assert not Path("none").exists()
