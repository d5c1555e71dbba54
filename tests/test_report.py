import json
import re
import sys
from html.parser import HTMLParser

import pytest

from electra_jax import cli
from electra_jax.errors import UserError
from electra_jax.report import main as report_command
from electra_jax.reporting.page import AXES, FIGURES, read_run, write_report

MLM = {"mlm_loss": 3.0, "mlm_accuracy": 0.5}
RTD = {
    "sampled_mlm_accuracy": 0.3,
    "rtd_loss": 0.2,
    "rtd_accuracy": 0.9,
    "rtd_auc": 0.95,
    "rtd_precision": 0.8,
    "rtd_recall": 0.6,
    "replaced_fraction": 0.1,
}
OTHERS = {
    "reconstruction_loss": 1.5,
    "reconstruction_accuracy": 0.7,
    "copy_rate": 0.8,
    "reward": 0.4,
    "baseline_loss": 0.6,
}
SPEED = {"learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_second": 1234.0, "mfu": 0.4}


class Page(HTMLParser):
    """Gathers what the tests look at, and fails on elements that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.ids, self.captions, self.open = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)


def rows(metrics, splits=("train/", "eval/")):
    result = []
    for step in (100, 200):
        if "train/" in splits:
            values = {f"train/{name}": value for name, value in metrics.items()}
            result.append({"step": step} | values | SPEED)
        if "eval/" in splits:
            result.append({"step": step} | {f"eval/{name}": v for name, v in metrics.items()})
    return result


def report(workdir, metrics, config=None, facts=None):
    (workdir / "config.json").write_text(json.dumps(config or {"seed": 1}))
    if facts is not None:
        (workdir / "facts.json").write_text(json.dumps(facts))
    if metrics is not None:
        lines = "".join(json.dumps(row) + "\n" for row in metrics)
        (workdir / "metrics.jsonl").write_text(lines)
    path = write_report(workdir)
    assert path == workdir / "report.html"
    return path.read_text(encoding="utf-8")


def tiles(text):
    return {
        label: number
        for number, label in re.findall(r'"tile"><b>(.*?)</b><span>(.*?)</span>', text)
    }


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("full_run")
    report(workdir, [*rows(MLM | RTD | OTHERS), {"step": 300, "eval/mlm_loss": 2.25}])
    return workdir


@pytest.fixture(scope="module")
def full_page(full_run):
    return (full_run / "report.html").read_text(encoding="utf-8")


def test_a_full_run_shows_every_figure_and_the_last_evaluation(full_page):
    assert Page(full_page).captions == list(FIGURES)
    assert tiles(full_page) == {
        "MLM loss": "2.250",
        "MLM accuracy": "50.0%",
        "RTD AUC": "0.950",
        "RTD loss": "0.2000",
        "reconstruction loss": "1.500",
        "reconstruction accuracy": "70.0%",
        "tokens per second": "1,234",
        "steps": "300",
    }
    assert "held-out data at step 300" in full_page


def test_config_and_facts_are_escaped_and_dotted(tmp_path):
    hostile = """<script>alert("x")</script>'&"""
    text = report(
        tmp_path,
        rows(MLM),
        config={"data": {"source": hostile, hostile: 1, "mixture": [hostile], "options": {}}},
        facts={"devices": {"kind": hostile}, "tokens": 17},
    )
    page = Page(text)
    assert "script" not in page.tags
    escaped = "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&#x27;&amp;"
    assert f'<th scope="row">data.source</th><td>{escaped}</td>' in text
    assert f'<th scope="row">data.{escaped}</th><td>1</td>' in text
    assert f'<th scope="row">devices.kind</th><td>{escaped}</td>' in text
    assert '<th scope="row">tokens</th><td>17</td>' in text
    assert '<th scope="row">data.options</th><td>{}</td>' in text


def test_the_name_of_the_run_is_escaped(tmp_path):
    workdir = tmp_path / "<img src=x>"
    workdir.mkdir()
    assert "img" not in Page(report(workdir, rows(MLM))).tags


def test_the_page_loads_nothing(full_page):
    page = Page(full_page)
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in full_page
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", full_page))
    addresses = set(re.findall(r"https?://[^\"]*", full_page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_figures_do_not_share_element_ids(full_page):
    page = Page(full_page)
    assert len(set(page.ids)) == len(page.ids)
    references = {link[1:] for link in page.links} | set(re.findall(r"url\(#(.*?)\)", full_page))
    assert references <= set(page.ids)


def test_the_same_run_gives_the_same_page(full_run, full_page):
    assert write_report(full_run).read_text(encoding="utf-8") == full_page


def test_a_run_without_discriminator_shows_no_detection(tmp_path):
    text = report(tmp_path, rows(MLM))
    assert tiles(text).keys() == {"MLM loss", "MLM accuracy", "tokens per second", "steps"}
    assert Page(text).captions == [
        "Masked language modelling loss (nats)",
        "Accuracy",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Model FLOPs utilisation",
    ]


def test_a_run_without_evaluation_says_so(tmp_path):
    text = report(tmp_path, rows(MLM | RTD | OTHERS, splits=("train/",)))
    assert "No evaluation has been logged yet" in text
    assert tiles(text).keys() == {"tokens per second", "steps"}
    assert Page(text).captions == list(FIGURES)


def test_an_evaluation_alone_is_shown(tmp_path):
    text = report(tmp_path, rows(MLM, splits=("eval/",)))
    assert tiles(text).keys() == {"MLM loss", "MLM accuracy", "steps"}


@pytest.mark.parametrize("metrics", [None, []])
def test_a_run_without_metrics_says_so(tmp_path, metrics):
    text = report(tmp_path, metrics)
    assert "No metrics have been logged yet" in text
    assert Page(text).captions == []
    assert '<th scope="row">seed</th>' in text


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"config\.json not found: .* is not the directory of a run"
    ):
        write_report(tmp_path)


def test_a_malformed_configuration_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{", '{"step": 3}', b"\xff".decode("latin-1")])
def test_malformed_facts_are_left_out_with_a_note(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "facts.json").write_text(content, encoding="latin-1")
    text = write_report(tmp_path).read_text()
    assert ("There is no readable facts.json" in text) == (content != '{"step": 3}')


def test_lines_without_finite_numbers_are_left_out_and_counted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    lines = ['{"step": 1, "eval/loss": 2.5}', '{"step": 2, "eval/loss": NaN}']
    lines += [f'{{"step": 3, "eval/loss": 1{400 * "0"}}}', '{"step": 4, "eval/loss": -Infinity}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    text = write_report(tmp_path).read_text()
    assert "cannot be read, 3 in number" in text and "<b>nan" not in text


def test_the_output_is_a_page_or_nothing_is_written(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), f"--output={path}"])
    with pytest.raises(UserError, match=r"--output is .*metrics\.jsonl; allowed: .* \.html"):
        report_command()
    assert path.read_text() == ""


HOSTILE = """<script>alert("x")</script>'&\x1b\u202e"""


def samples(**changes) -> dict:
    token = {"token": "##ing", "starts_word": False, "probability": 0.25}
    asked = {"token": HOSTILE, "starts_word": True, "probability": 0.93, "original": "a"}
    asked |= {"proposals": [["the", 0.5], [HOSTILE, 0.25]]}
    return {"step": 200, "texts": [[asked, token]], **changes}


def test_the_gallery_shades_tokens_and_shows_hostile_ones_as_text(tmp_path):
    (tmp_path / "samples.json").write_text(json.dumps(samples()))
    text = report(tmp_path, rows(MLM | RTD))
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    escaped = "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;&#x27;&amp;\\u001b\\u202e"
    assert f'class="token asked replaced" tabindex="0" style="--p:0.93">{escaped}<' in text
    assert f"<b>{escaped}</b>: replaced with probability 93%<br>replaces <b>a</b>" in text
    assert f"the generator proposes the 50%, {escaped} 25%" in text
    assert 'style="--p:0.25">ing<' in text
    assert "at step 200" in text
    assert "\x1b" not in text


def test_the_gallery_ends_somewhere(tmp_path):
    (tmp_path / "samples.json").write_text(json.dumps(samples(texts=samples()["texts"] * 900)))
    assert report(tmp_path, rows(MLM)).count('tabindex="0"') == 1000


@pytest.mark.parametrize("content", ["{", "[1]", '{"step": 3}', '{"step": 3, "texts": [[{}]]}'])
def test_damaged_samples_are_left_out_with_a_note(tmp_path, content):
    (tmp_path / "samples.json").write_text(content)
    text = report(tmp_path, rows(MLM))
    assert "samples.json cannot be read" in text
    assert "Held-out texts" not in text


def test_damaged_metrics_give_a_partial_report_with_a_note(tmp_path):
    report(tmp_path, rows(MLM))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\x00\n{"step": 300, "eval/mlm_loss": 2.25}\n{"step": 1, "a": "b"}\n{"st')
    text = write_report(tmp_path).read_text()
    assert "lines of metrics.jsonl that cannot be read, 3 in number" in text
    assert tiles(text)["MLM loss"] == "2.250"


def test_fine_tuning_has_its_scores_and_losses(tmp_path):
    metrics = [
        {"step": 10, "train/loss": 0.7, "train/accuracy": 0.5},
        {"step": 20, "eval/accuracy": 0.75, "eval/dev_mismatched/accuracy": 0.5, "eval/f1": 0.25},
        {"step": 20, "eval/HasAns_f1": 1.0},
    ]
    text = report(tmp_path, metrics, config={"task": "finetune"})
    assert Page(text).captions == [
        "Scores",
        "Loss (nats; of a regression, squared error)",
    ]
    found = {"accuracy": "0.75", "accuracy, dev_mismatched": "0.5", "F1": "0.25", "steps": "20"}
    assert tiles(text) == found
    assert "MLM" not in text


def run_at(path, name, losses, tokens="2,048", **config):
    workdir = path / name
    workdir.mkdir()
    lines = [{"step": 100 * i, "eval/mlm_loss": loss} for i, loss in enumerate(losses, 1)]
    facts = {"step": {"tokens": tokens, "GFLOP": "7.5"}} if tokens else {}
    report(workdir, lines, config=config, facts=facts)
    return workdir


def test_runs_are_compared_by_steps_tokens_and_flops(tmp_path, capfd, monkeypatch):
    runs = [
        run_at(tmp_path, "$a_<b>", [3.0, 2.0], seed=1, same=2),
        run_at(tmp_path, "other", [3.5, 2.5], tokens="4,096", seed=2, same=2),
        run_at(tmp_path, "no facts", [3.5], tokens="", seed=2, same=2),
    ]
    output = tmp_path / "comparison.html"
    monkeypatch.setattr(sys, "argv", ["report", *map(str, runs), f"--output={output}"])
    with pytest.raises(SystemExit) as exit:
        cli.run(report_command)
    assert exit.value.code == 0
    assert capfd.readouterr().out == f"{output}\n"
    text = output.read_text()
    page = Page(text)
    assert page.captions == ["Masked language modelling loss (nats)"] * 3
    by_step, by_tokens, by_flops = text.split('<div class="by ')[1:]
    for part, unit, last in ((by_step, "step", "200"), (by_tokens, "tokens", "800k")):
        assert f">{unit}</text>" in part and f">{last}</text>" in part
    assert ">FLOPs</text>" in by_flops and re.search(r">1\.\d+T</text>", by_flops)
    assert text.count("Not drawn, as facts.json does not say: no facts.") == 2
    assert len(set(page.ids)) == len(page.ids)
    assert "<b>no facts</b>: There is no readable facts.json" in text
    assert '<th scope="row">seed</th><td>1</td><td>2</td><td>2</td>' in text
    assert '<th scope="row">same</th>' not in text
    assert "$a_&lt;b&gt;" in text
    assert not {"script", "img"} & set(page.tags)


def test_axes_are_steps_times_what_a_step_has(tmp_path):
    runs = [
        read_run(run_at(tmp_path, "a", [3.0])),
        read_run(run_at(tmp_path, "b", [3.0], tokens="1,000,000")),
        read_run(run_at(tmp_path, "c", [3.0], tokens="")),
    ]
    found = {axis.name: [axis.scale(run) for run in runs] for axis in AXES}
    assert found == {
        "step": [1.0, 1.0, 1.0],
        "tokens": [2048.0, 1e6, None],
        "FLOPs": [7.5e9, 7.5e9, None],
    }


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["--outptu=x", "run"]])
def test_mistakes_of_the_command_are_one_line(arguments, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.run(report_command)
    assert exit.value.code == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
