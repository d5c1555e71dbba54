"""What version 0.1.0 has left on disk is resumed, opened and used as it was then.

`fixtures/formats_0_1/README.md` says what is there, and has the commands that made it; the tests
execute them again on a copy. Commands run in this process, on its eight devices, save for resumed
runs: those have a process of their own with one device, as when the expectation was computed.
"""

import hashlib
import importlib
import json
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file

from electra_jax import cli

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
FIXTURE = Path(__file__).parent / "fixtures" / "formats_0_1"
VECTOR_UNITS = ("fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile")

# XLA rounds otherwise on other processors and with other options. Measured without AVX, with all
# optimizations and on eight devices: losses then differ by 3e-7 of their size, probabilities by
# 1e-6, scores and odds, which are sums of larger numbers, by 1e-5. Moments that are lost, or
# another batch, change losses by more than a thousandth.
LOSS_TOLERANCE = 1e-5
TOLERANCE = 1e-5
COARSE_TOLERANCE = 1.1e-4
TITLES = {  # of figures, by what they were called then
    "Masked language modelling loss (nats)": "Masked language modeling loss (nats)",
    "Loss (nats; of a regression, squared error)": "Loss (nats)",
}
ROUNDED = ("detect", "fill", "pieces")  # to four digits, of which the last may be another one
SUMS = ("score", "null_odds")

Call = Callable[..., str]


def commands(module: str, flag: str) -> dict[str, list[str]]:
    """Arguments of the README's commands by the last part of what `flag` names there."""
    text = (FIXTURE / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in re.findall(rf"^    python -m electra_jax\.{module} (.*)", text, re.MULTILINE):
        arguments = shlex.split(line)
        [path] = [x.partition("=")[2] for x in arguments if x.startswith(f"--{flag}=")]
        found[Path(path).stem] = arguments
    return found


RUNS = commands("main", "workdir")
EXPORTS = commands("export", "out")
ANSWERS = commands("predict", "output")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """Holds what is compiled by processes that start in directories in it."""
    return tmp_path_factory.mktemp("formats")


@pytest.fixture
def place(places, monkeypatch) -> Path:
    """A copy of everything, where commands are started."""
    place = shutil.copytree(FIXTURE, places / f"{len([*places.iterdir()])}")
    (place / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def call(monkeypatch, capsys) -> Call:
    """Executes a command in this process, which must go well; returns what it prints."""

    def call(module: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.run(importlib.import_module(f"electra_jax.{module}").main)
        out, err = capsys.readouterr()
        assert not exit.value.code, err
        return out

    return call


def expected(name: str) -> Any:
    return json.loads((FIXTURE / "expected" / name).read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without(arguments: list[str], *flags: str) -> list[str]:
    names = tuple(f"--{flag}=" for flag in flags)
    return [argument for argument in arguments if not argument.startswith(names)]


def where() -> dict[str, str]:
    """What decides how XLA rounds, beside its options."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", text.partition("\n\n")[0], re.MULTILINE))
    units = [unit for unit in VECTOR_UNITS if unit in fields.get("flags", "").split()]
    names = ("vendor_id", "cpu family", "model")
    processor = [platform.machine(), *(fields.get(name, "") for name in names), *units]
    return {"jax": jax.__version__, "processor": " ".join(processor)}


def hashes(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    """The SHA-256 of type, shape and content of each parameter."""
    return {
        name: hashlib.sha256(f"{x.dtype} {x.shape} ".encode() + x.tobytes()).hexdigest()
        for name, x in arrays.items()
        if name.startswith("params/")
    }


def parameters(workdir: Path, step: int) -> dict[str, np.ndarray]:
    arrays = tiny_run.arrays(workdir, step)
    return {name: x for name, x in arrays.items() if name.startswith("params/")}


# Stores


@pytest.mark.parametrize("run", ["electra", "mlm"])
def test_a_store_is_opened_as_it_is(run, place, call):
    """It is found under its name, verified by its hashes, and nothing in it is written anew."""
    from electra_jax.data.store import open_store

    before = tiny_run.snapshot(place / "data")
    out = call("prepare", *without(RUNS[run], "workdir"), "--verify")
    said = re.fullmatch(r"using (\S+)\nverified: all 6 files are what was written\n", out)
    assert said, out
    assert tiny_run.snapshot(place / "data") == before
    [provenance] = (place / "runs" / run).glob("checkpoints/*/provenance/metadata")
    assert open_store(said[1]).hash == json.loads(provenance.read_text())["store_hash"]


# Runs that go on


@pytest.mark.parametrize(("run", "step"), [("electra", 6), ("mlm", 5)])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(run, step, place, monkeypatch):
    """To the bit where the processor and JAX are those of then; with like losses elsewhere."""
    monkeypatch.setenv("NPROC", "1")  # XLA divides sums among its threads
    result = tiny_run.run(place, f"runs/{run}", *without(RUNS[run], "config", "workdir"))
    assert result.returncode == 0, result.stderr
    assert f"runs/{run}: resuming at step {step}\n" in result.stdout
    assert re.search(r"^using data/", result.stdout, re.MULTILINE)
    assert_goes_on(place / "runs" / run, step, expected("resumed.json"), run)


def assert_goes_on(workdir: Path, step: int, record: dict, run: str) -> None:
    found, rows = tiny_run.lines(workdir), record[run]["metrics"]
    assert [row["step"] for row in found] == [row["step"] for row in rows]
    assert rows[-1]["step"] == 12
    assert found[: len(before(rows, step))] == before(rows, step)
    for row, then in zip(found, rows, strict=True):
        losses = {name: x for name, x in then.items() if name.endswith(("loss", "learning_rate"))}
        assert losses
        assert {name: row[name] for name in losses} == pytest.approx(losses, rel=LOSS_TOLERANCE)
    arrays = parameters(workdir, 12)
    assert arrays.keys() == record[run]["parameters"].keys()
    if where() == record["where"]:
        assert found == rows
        assert hashes(arrays) == record[run]["parameters"]


def before(rows: list[dict], step: int) -> list[dict]:
    return [row for row in rows if row["step"] <= step]


@pytest.mark.parametrize("source", ["runs/electra", "exported/discriminator,exported/generator"])
def test_a_run_starts_from_weights(source, place):
    """The first update has the rate 0: the parameters after it are those of the source."""
    flags = without(RUNS["electra"], "config", "workdir")
    more = (f"--config.init_from={source}", "--config.num_train_steps=1")
    result = tiny_run.run(place, "runs/more", *flags, *more)
    assert result.returncode == 0, result.stderr
    assert "initialized: nothing\n" in result.stdout
    then, found = parameters(place / "runs/electra", 6), parameters(place / "runs/more", 1)
    assert hashes(found) == hashes(then)


@pytest.mark.parametrize("run", ["topics", "answers", "tags"])
def test_a_finished_run_has_nothing_to_do(run, place, call):
    """Its weights, files and configuration are read and compared before that is said."""
    before = tiny_run.snapshot(place / "runs")
    out = call("main", *RUNS[run])
    assert f"runs/{run}: nothing to do, there is a results.json\n" in out
    assert tiny_run.snapshot(place / "runs") == before


# Runs that are used


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_the_same(name, place, call):
    call("predict", *without(ANSWERS[name], "output"), f"--output=found/{name}.jsonl")
    found = read_lines(place / "found" / f"{name}.jsonl")
    then = read_lines(FIXTURE / "expected" / f"{name}.jsonl")
    assert_like(found, then, COARSE_TOLERANCE if name in ROUNDED else TOLERANCE, name)


def assert_like(found: Any, then: Any, tolerance: float, where: str) -> None:
    """What there was is there; numbers are near to those of then, all else is the same."""
    if isinstance(then, dict):
        assert then.keys() <= found.keys(), where
        for name, value in then.items():
            of_this = COARSE_TOLERANCE if name in SUMS else tolerance
            assert_like(found[name], value, of_this, f"{where}.{name}")
    elif isinstance(then, list):
        assert len(found) == len(then), where
        for number, value in enumerate(then):
            assert_like(found[number], value, tolerance, f"{where}[{number}]")
    elif isinstance(then, float):
        assert found == pytest.approx(then, rel=0, abs=tolerance), where
    else:
        assert found == then, where


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_the_same(name, place, call):
    call("export", *without(EXPORTS[name], "out"), f"--out=found/{name}")
    found, then = place / "found" / name, FIXTURE / "exported" / name
    tensors, expected_tensors = (load_file(path / "model.safetensors") for path in (found, then))
    assert tensors.keys() == expected_tensors.keys()
    for tensor, value in expected_tensors.items():
        np.testing.assert_array_equal(tensors[tensor], value, strict=True, err_msg=tensor)
    configs = [json.loads((path / "config.json").read_text()) for path in (found, then)]
    assert configs[0] == configs[0] | configs[1]
    assert {path.name for path in then.iterdir()} <= {path.name for path in found.iterdir()}
    for vocabulary in (*then.glob("vocab.txt"), *then.glob("spm.model")):
        assert (found / vocabulary.name).read_bytes() == vocabulary.read_bytes()


@pytest.mark.parametrize("run", ["electra", "topics"])
def test_a_report_shows_what_is_known(run, place, call):
    """Final numbers, titles of figures, held-out texts, facts and configuration."""
    call("report", f"runs/{run}")
    shown = [*texts((place / "runs" / run / "report.html").read_text(encoding="utf-8"))]
    then = expected("report.json")[run]
    titles = {TITLES.get(text, text) for text in then["texts"]}
    missing = titles - {*shown} | {*map(tuple, then["pairs"])} - {*pairwise(shown)}
    assert not missing


def texts(page: str) -> Iterator[str]:
    """What is written on a page, but for the ticks and legends of figures."""
    found: list[str] = []
    hidden: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list) -> None:
            if tag in ("svg", "style"):
                hidden.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in hidden:
                hidden.remove(tag)

        def handle_data(self, data: str) -> None:
            if not hidden and data.strip():
                found.append(" ".join(data.split()))

    Parser().feed(page)
    yield from found
