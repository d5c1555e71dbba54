"""The report of a run and the comparison of several, from their directories alone."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from electra_jax import cli
from electra_jax.errors import UserError
from electra_jax.objectives import ADVERSARIAL, OBJECTIVES
from electra_jax.objectives.metrics import Metric
from electra_jax.report import main as report_command
from electra_jax.reporting import page
from electra_jax.reporting.figures import AXES
from electra_jax.reporting.run import Run

MLM = {"mlm_loss": 3.0, "mlm_accuracy": 0.5}
RTD = {"sampled_mlm_accuracy": 0.3, "rtd_loss": 0.2, "rtd_accuracy": 0.9, "rtd_auc": 0.95}
RTD |= {"rtd_precision": 0.8, "rtd_recall": 0.6, "replaced_fraction": 0.1}
OTHERS = {"reconstruction_loss": 1.5, "reconstruction_accuracy": 0.7, "copy_rate": 0.8}
OTHERS |= {"reward": 0.4, "baseline_loss": 0.6, "policy_loss": 0.1}
SPEED = {"learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_second": 1234.0, "mfu": 0.4}
SPEED |= {"input_wait": 0.1, "skipped_updates": 0.0}
SPEED_TILES = {"tokens per second", "steps"}
LISTED = {
    name: metric
    for kind in (*OBJECTIVES.values(), *ADVERSARIAL.values())
    for name, metric in kind.metrics.items()
}
HOSTILE = """<script>alert("x")</script>'&\x1b\u202e"""
SHOWN = """<script>alert("x")</script>'&\\u001b\\u202e"""


def listed(config: dict) -> dict[str, Metric]:
    return LISTED


class Page:
    """What the tests look at of a page, which must be well-formed.

    Attributes:
      texts: by tag and class, such as `p text`, all that stands in such elements.
      rows: the cells of each row of a table.
    """

    def __init__(self, path: Path):
        text = path.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))  # noqa: S314 - is ours
        elements = [*root.iter()]
        for x in elements:
            x.tag = x.tag.rpartition("}")[2]
        self.tags = {x.tag for x in elements}
        names = ("src", "href", "{http://www.w3.org/1999/xlink}href")
        self.links = [x.attrib[name] for x in elements for name in names if name in x.attrib]
        self.ids = [x.attrib["id"] for x in elements if "id" in x.attrib]
        self.styles = [
            x.attrib["style"] for x in elements if x.tag == "span" and "style" in x.attrib
        ]
        self.texts: dict[str, list[str]] = {}
        for x in elements:
            name = f"{x.tag} {x.attrib.get('class', '')}".strip()
            self.texts.setdefault(name, []).append("".join(x.itertext()))
        self.captions, self.header = self.texts.get("figcaption", []), self.texts["header"][0]
        rows = [["".join(cell.itertext()) for cell in x] for x in elements if x.tag == "tr"]
        self.table = {head: cells for head, *cells in rows}


def tiles(path: Path) -> dict[str, str]:
    pairs = re.findall(r"<b>(.*?)</b><span>(.*?)</span>", path.read_text())
    return {label: number for number, label in pairs}


def rows(metrics: dict, splits=("train/", "eval/")) -> list[dict]:
    values = {
        "train/": {f"train/{x}": v for x, v in metrics.items() if x != "rtd_auc"} | SPEED,
        "eval/": {f"eval/{x}": v for x, v in metrics.items()},
    }
    return [{"step": step} | values[split] for step in (100, 200) for split in splits]


def run_of(workdir: Path, metrics=None, config=None, facts=None, samples=None) -> Path:
    """A run directory with these files; contents that are text are written as they are."""
    workdir.mkdir(exist_ok=True)
    content = {"config.json": config or {"seed": 1}, "facts.json": facts, "samples.json": samples}
    for name, value in content.items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (workdir / name).write_text(text, encoding="latin-1")
    if metrics is not None:
        text = "".join(json.dumps(row) + "\n" for row in metrics)
        (workdir / "metrics.jsonl").write_text(text)
    return workdir


def report(workdir: Path, *parts, **files) -> Page:
    path = page.write_report(run_of(workdir, *parts, **files), listed)
    assert path == workdir / "report.html"
    return Page(path)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("full_run")
    report(workdir, [*rows(MLM | RTD | OTHERS), {"step": 300, "eval/mlm_loss": 2.25}])
    return workdir


def test_a_full_run_shows_every_figure_and_the_last_evaluation(full_run):
    text = (full_run / "report.html").read_text()
    assert Page(full_run / "report.html").captions == [
        "Masked language modeling loss (nats)",
        "Accuracy",
        "Replaced token detection loss (nats)",
        "Replaced token detection AUC",
        "Detection of replaced tokens",
        "Reconstruction loss (nats)",
        "Reconstruction",
        "Policy gradient (nats)",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Model FLOPs utilization",
    ]
    assert tiles(full_run / "report.html") == {
        "MLM loss": "2.250",
        "MLM accuracy": "50.0%",
        "RTD AUC": "0.950",
        "RTD loss": "0.2000",
        "reconstruction loss": "1.500",
        "reconstruction accuracy": "70.0%",
        "tokens per second": "1,234",
        "steps": "300",
    }
    assert "held-out data at step 300" in text
    for curve in ("MLM accuracy, sampled, training", "RTD accuracy, held-out", "held-out"):
        assert f"> {curve}<" in text


def test_metrics_are_drawn_as_they_describe_themselves_or_under_their_names(tmp_path):
    surprise = Metric("surprise", "bits", tile="{:.2f}", figure="How surprising")
    workdir = run_of(tmp_path, rows({"surprise": 1.25, "new_thing": 1}))
    path = page.write_report(workdir, lambda config: {"surprise": surprise})
    captions = Page(path).captions
    assert "How surprising (bits)" in captions and captions[-1] == "New thing"
    assert tiles(path)["surprise"] == "1.25"


def test_config_facts_and_the_name_of_the_run_are_escaped_and_dotted(tmp_path):
    config = {"data": {"source": HOSTILE, HOSTILE: 1, "mixture": [HOSTILE], "options": {}}}
    facts = {"devices": {"kind": HOSTILE}, "tokens": 17}
    found = report(tmp_path / "<img src=x>", rows(MLM), config=config, facts=facts)
    assert not {"script", "img"} & found.tags
    assert found.table["data.source"] == found.table["devices.kind"] == [SHOWN]
    assert found.table[f"data.{SHOWN}"] == ["1"]
    assert found.table["tokens"] == ["17"]
    assert found.table["data.options"] == ["{}"]


def test_the_page_is_always_the_same_loads_nothing_and_figures_share_no_element_ids(full_run):
    found, text = Page(full_run / "report.html"), (full_run / "report.html").read_text()
    assert "default-src 'none'" in text
    assert not {"script", "link", "img", "iframe"} & found.tags and "@import" not in text
    references = found.links + re.findall(r"url\((.*?)\)", text)
    assert references and all(target.startswith("#") for target in references)
    assert {target[1:] for target in references} <= {*found.ids}
    assert len({*found.ids}) == len(found.ids)
    addresses = {*re.findall(r"https?://[^\"]*", text)}
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert page.write_report(full_run, listed).read_text() == text


@pytest.mark.parametrize(
    "metrics, splits, expected, captions",
    [
        (MLM, ("train/", "eval/"), {"MLM loss", "MLM accuracy", *SPEED_TILES}, 6),
        (MLM | RTD | OTHERS, ("train/",), SPEED_TILES, 11),  # all but that of the AUC
        (MLM, ("eval/",), {"MLM loss", "MLM accuracy", "steps"}, 2),
        ({}, (), set(), 0),
    ],
)
def test_a_run_shows_what_it_has(metrics, splits, expected, captions, tmp_path):
    found = report(tmp_path, rows(metrics, splits))
    assert tiles(tmp_path / "report.html").keys() == expected
    assert len(found.captions) == captions
    assert found.table["seed"] == ["1"]
    assert ("No metrics" in found.header) == (not splits)
    assert ("No evaluation" in found.header) == (splits == ("train/",))


def test_a_directory_without_a_configuration_or_with_a_malformed_one_is_refused(tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}/config\.json not found"):
        page.write_report(tmp_path, listed)
    with pytest.raises(UserError, match=r"config\.json"):
        report(tmp_path, config="{")


@pytest.mark.parametrize("content", ["[1]", "{", '{"step": 3}', "\xff"])
def test_malformed_facts_are_left_out_with_a_note(tmp_path, content):
    note = report(tmp_path, facts=content).header
    assert ("no readable facts.json" in note) == (content != '{"step": 3}')


def test_lines_without_finite_numbers_are_left_out_and_counted(tmp_path):
    lines = ['{"step": 1, "eval/loss": 2.5}', '{"step": 2, "eval/loss": NaN}']
    lines += [f'{{"step": 3, "eval/loss": 1{400 * "0"}}}', '{"step": 4, "eval/loss": -Infinity}']
    lines += ["\xff\x00", '{"step": 300, "eval/mlm_loss": 2.25}', '{"step": 1, "a": "b"}', '{"st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="latin-1")
    assert "cannot be read, 6 in number" in report(tmp_path).header
    assert tiles(tmp_path / "report.html") == {"MLM loss": "2.250", "steps": "300"}


def samples(**changes) -> dict:
    token = {"token": "##ing", "starts_word": False, "probability": 0.25}
    asked = {"token": HOSTILE, "starts_word": True, "probability": 0.93, "original": "a"}
    asked |= {"proposals": [["the", 0.5], [HOSTILE, 0.25]]}
    same = {"token": "a", "starts_word": True, "probability": 0, "original": "a", "proposals": []}
    return {"step": 200, "texts": [[asked, token, same], []], **changes}


def test_the_gallery_shades_tokens_and_shows_hostile_ones_as_text(tmp_path):
    found = report(tmp_path, rows(MLM | RTD), samples=samples())
    assert not {"script", "img"} & found.tags
    (text,) = found.texts["p text"]
    replaced, plain, same = found.texts["span tip"]
    assert text.lstrip() == f"{SHOWN}{replaced}ing{plain} a{same}"
    assert replaced.startswith(f"{SHOWN}: replaced with probability 93%replaces a")
    assert replaced.endswith(f"the 50%, {SHOWN} 25%")
    assert plain == "##ing: replaced with probability 25%"
    assert "not replaced" in same
    assert found.styles == ["--p:0.93", "--p:0.25", "--p:0.00"]
    assert [
        len(found.texts[f"span token{kind}"]) for kind in (" asked replaced", "", " asked")
    ] == [1] * 3
    assert "at step 200" in "".join(found.texts["section"])
    assert "\x1b" not in (tmp_path / "report.html").read_text()


def test_the_gallery_ends_somewhere(tmp_path):
    found = report(tmp_path, rows(MLM), samples=samples(texts=samples()["texts"] * 900))
    assert len(found.styles) == 1000


@pytest.mark.parametrize(
    "content", [*("{", "[1]", '{"step": 3}', '{"step": 3, "texts": [[{}]]}'), samples(step="<b>")]
)
def test_damaged_samples_are_left_out_with_a_note(tmp_path, content):
    found = report(tmp_path, rows(MLM), samples=content)
    assert "samples.json cannot be read" in found.header
    assert "h2" not in found.tags


def run_at(path: Path, name: str, losses: list[float], tokens="2,048", **config) -> Path:
    lines = [{"step": 100 * i, "eval/mlm_loss": loss} for i, loss in enumerate(losses, 1)]
    facts = {"step": {"tokens": tokens, "GFLOP": "7.5"}} if tokens else {}
    return run_of(path / name, lines, config={"objective": "mlm", **config}, facts=facts)


def test_runs_are_compared_by_steps_tokens_and_flops(tmp_path, command):
    runs = [
        run_at(tmp_path, "$a_<b>", [3.0, 2.0], seed=1, same=2),
        run_at(tmp_path, "other", [3.5, 2.5], tokens="4,096", seed=2, same=2),
        run_at(tmp_path, "no facts", [3.5], tokens="", seed=2, same=2),
    ]
    output = tmp_path / "comparison.html"
    assert command(report_command, *runs, f"--output={output}") == (0, f"{output}\n", "")
    found, text = Page(output), output.read_text()
    assert found.captions == ["MLM loss (nats)"] * 3
    by_step, by_tokens, by_flops = text.split('<div class="by ')[1:]
    for part, unit, last in ((by_step, "step", "200"), (by_tokens, "tokens", "800k")):
        assert f">{unit}</text>" in part and f">{last}</text>" in part
    assert ">FLOPs</text>" in by_flops and re.search(r">1\.\d+T</text>", by_flops)
    assert [by.count("Not drawn") for by in (by_step, by_tokens, by_flops)] == [0, 1, 1]
    assert len(set(found.ids)) == len(found.ids)
    assert "no facts: There is no readable facts.json" in found.header
    assert found.table["seed"] == ["1", "2", "2"] and "same" not in found.table
    assert found.table["$a_<b>"] == ["2.000", "200"]
    assert not {"script", "img"} & found.tags and "b" in found.tags


def test_the_command_knows_the_metrics_of_fine_tuning(tmp_path, command):
    metrics = [
        {"step": 10, "train/loss": 0.7, "train/accuracy": 0.5},
        {"step": 20, "eval/accuracy": 0.75, "eval/dev_mismatched/accuracy": 0.5, "eval/f1": 0.25},
    ]
    config = {"task": "finetune", "data": {"kind": "glue", "name": "qqp", "source": "x"}}
    assert command(report_command, run_of(tmp_path, metrics, config=config))[0] == 0
    captions = Page(tmp_path / "report.html").captions
    assert len(captions) == 2 and "Scores" in captions and any("Loss" in x for x in captions)
    found = {"accuracy": "0.75", "accuracy, dev_mismatched": "0.5", "F1": "0.25", "steps": "20"}
    assert tiles(tmp_path / "report.html") == found
    assert "MLM" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("tokens, scales", [("2,048", (2048.0, 7.5e9)), ("", (None, None))])
def test_axes_are_steps_times_what_a_step_has(tmp_path, tokens, scales):
    run = Run(run_at(tmp_path, "run", [3.0], tokens=tokens), listed)
    assert [axis.scale(run) for axis in AXES] == [1.0, *scales]


def test_the_output_is_a_page_or_nothing_is_written(tmp_path, command):
    path = run_of(tmp_path, []) / "metrics.jsonl"
    code, _, error = command(report_command, tmp_path, f"--output={path}")
    assert code == 2 and f"--output is {path}" in error and ".html" in error
    assert path.read_text() == ""


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["--outptu=x", "run"]])
def test_mistakes_of_the_command_are_one_line(arguments, command):
    code, _, error = command(report_command, *arguments)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1


def test_a_wheel_contains_the_pages(tmp_path):
    root = Path(cli.__file__).parents[1]
    for name in ("setup.py", "README.md", "electra_jax"):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        copy(root / name, tmp_path / name)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = [path for path in Path(page.__file__).parent.iterdir() if path.is_file()]
    names = {f"electra_jax/reporting/{path.name}" for path in files}
    assert names <= {*zipfile.ZipFile(wheel).namelist()}
