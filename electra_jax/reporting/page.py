"""The report of a run, and the comparison of several: one HTML file that needs no network."""

import dataclasses
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.monitoring.writer import read_whole_rows
from electra_jax.reporting import gallery
from electra_jax.reporting.gallery import escape

METRICS = "metrics.jsonl"


# Title and unit of each figure of pre-training; what it draws: metric name without prefix ->
# label.
FIGURES = {
    "Masked language modelling loss (nats)": {"mlm_loss": ""},
    "Replaced token detection loss (nats)": {"rtd_loss": ""},
    "Replaced token detection AUC": {"rtd_auc": ""},
    "Reconstruction loss (nats)": {"reconstruction_loss": ""},
    "Accuracy": {
        "mlm_accuracy": "MLM",
        "sampled_mlm_accuracy": "MLM, sampled",
        "rtd_accuracy": "RTD",
    },
    "Detection of replaced tokens": {
        "rtd_precision": "precision",
        "rtd_recall": "recall",
        "replaced_fraction": "replaced",
    },
    "Reconstruction": {"reconstruction_accuracy": "accuracy", "copy_rate": "copied"},
    "Policy gradient (nats)": {"reward": "reward", "baseline_loss": "baseline's loss"},
    "Learning rate": {"learning_rate": ""},
    "Gradient norm": {"grad_norm": ""},
    "Tokens per second": {"tokens_per_second": ""},
    "Model FLOPs utilisation": {"mfu": ""},
}


# Of fine-tuning: the losses of all tasks. Scores are drawn as they are found in the metrics.
LOSSES = {
    "Loss (nats; of a regression, squared error)": {"loss": ""},
    "Losses of question answering (nats)": {
        "start_loss": "start",
        "end_loss": "end",
        "answerable_loss": "answerable",
    },
}


SCORES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "matthews": "Matthews' correlation",
    "spearman": "Spearman's correlation",
    "pearson": "Pearson's correlation",
    "exact": "exact match",
    "exact_match": "exact match",
}


# Metric name, label and format of the final numbers.
TILES = (
    ("eval/mlm_loss", "MLM loss", "{:.3f}"),
    ("eval/mlm_accuracy", "MLM accuracy", "{:.1%}"),
    ("eval/rtd_auc", "RTD AUC", "{:.3f}"),
    ("eval/rtd_loss", "RTD loss", "{:.4f}"),
    ("eval/reconstruction_loss", "reconstruction loss", "{:.3f}"),
    ("eval/reconstruction_accuracy", "reconstruction accuracy", "{:.1%}"),
    ("tokens_per_second", "tokens per second", "{:,.0f}"),
    ("step", "steps", "{:,}"),
)


SAMPLES = "samples.json"


GALLERY_TOKENS = 1000  # at most


# How the two kinds of curve are drawn. Metrics without a prefix are measured in training.
TRAIN_STYLE = {"linewidth": 1, "alpha": 0.7}


HELD_OUT_STYLE = {"linewidth": 1.5, "marker": "o", "markersize": 3}


CURVES = (
    ("train/", "training", TRAIN_STYLE),
    ("", "training", TRAIN_STYLE),
    ("eval/", "held-out", HELD_OUT_STYLE),
)


# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow and black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")


TICK_STEPS = (1, 2, 2.5, 5, 10)


PLOT_SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 7,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.0,
    "legend.frameon": False,
    "text.parse_math": False,  # names of runs are text
}


STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --line: #dcdfe4; --ink: #1b1f24;
        --muted: #5b6470; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14161a; --card: #1f1f1f; --line: #383c42; --ink: #e6e8eb; --muted: #a0a7b1; }
  /* Turns white paper into the colour of a card and leaves the hues of the curves alone. */
  svg { filter: invert(0.88) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 80rem; background: var(--page);
       color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
p { margin: 0.25rem 0; color: var(--muted); }
h2 { margin: 0; font-size: 1.1rem; font-weight: 600; }
section, details { margin-top: 1.5rem; }
.gallery { margin-top: 0.5rem; padding: 0.75rem 0.9rem 0; background: var(--card);
           border: 1px solid var(--line); border-radius: 0.5rem; }
summary { cursor: pointer; margin-bottom: 0.5rem; font-size: 1.1rem; font-weight: 600; }
.tiles, .figures { display: grid; gap: 0.75rem; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.figures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.tile, figure, table { background: var(--card); border: 1px solid var(--line);
                       border-radius: 0.5rem; }
.tile { padding: 0.6rem 0.9rem; }
.tile b { display: block; font-size: 1.5rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 0.875rem; }
figure { margin: 0; padding: 0.75rem; }
figcaption { font-weight: 600; font-size: 0.95rem; }
svg { display: block; width: 100%; height: auto; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 0.875rem; }
th, td { padding: 0.3rem 0.9rem; text-align: left; font-weight: normal; vertical-align: top; }
tr + tr > * { border-top: 1px solid var(--line); }
th { width: 40%; color: var(--muted); overflow-wrap: break-word; }
.wide { overflow-x: auto; }
.numbers th, .numbers td { width: auto; white-space: nowrap; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.4rem;
       border-radius: 0.2rem; }
input[name="axis"] { position: absolute; opacity: 0; }
input[name="axis"] + label { display: inline-block; margin: 0 0.5rem 0.75rem 0; cursor: pointer;
       padding: 0.3rem 0.9rem; border: 1px solid var(--line); border-radius: 0.5rem; }
input[name="axis"]:checked + label { background: var(--ink); color: var(--page); }
input[name="axis"]:focus-visible + label { outline: 2px solid #0072b2; }
.by { display: none; }
#steps:checked ~ .steps, #tokens:checked ~ .tokens, #flops:checked ~ .flops { display: block; }
.by > section { margin-top: 0; }
@media print { body { max-width: none; padding: 0; font-size: 0.8rem; }
               figure, .tile, tr { break-inside: avoid; } input + label { display: none; }
               :root { --page: #fff; --card: #fff; --line: #ccc; --ink: #000; --muted: #444; }
               svg { filter: none; } }
td { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
"""


# The policy has the browser refuse whatever is not in the file itself.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
{notes}
</header>
{body}
</body>
</html>
"""


def write_report(workdir: Path, output: Path | None = None) -> Path:
    """Writes a report of what the run in `workdir` has logged so far and returns its path.

    Reads `config.json` and, where there are some, `metrics.jsonl`, `samples.json` and `facts.json`
    (devices, parameter and data counts, versions). What is missing is left out of the page.

    Args:
      output: default: `workdir/report.html`.

    Raises:
      UserError: There is no `config.json`, or it or `facts.json` is malformed.
    """
    run = read_run(workdir)
    body = [
        _tiles(run),
        _figures(figures_of([run]), [run], AXES[0]),
        run.gallery,
        _table("Facts", run.facts, "open"),
        _table("Config", run.config),
    ]
    content = page(run.name, _notes(run), "\n".join(body))
    return write_text(output or workdir / "report.html", content)


def write_comparison(workdirs: Sequence[Path], output: Path) -> Path:
    """Writes the curves of several runs over each other, by steps, tokens and FLOPs.

    Raises:
      UserError: as `write_report`.
    """
    runs = [read_run(workdir) for workdir in workdirs]
    if len({run.name for run in runs}) < len(runs):
        runs = [
            dataclasses.replace(run, name=str(path))
            for run, path in zip(runs, workdirs, strict=True)
        ]
    metrics = {
        f"{title}{label and ': '}{label}": {metric: ""}
        for title, metrics in figures_of(runs).items()
        for metric, label in metrics.items()
    }
    choices = "".join(
        f'<input type="radio" name="axis" id="{axis.key}"{" checked" * (axis is AXES[0])}>'
        f'<label for="{axis.key}">by {axis.name}</label>'
        for axis in AXES
    )
    figures = "".join(
        f'<div class="by {axis.key}">{_lacking(runs, axis)}{_figures(metrics, runs, axis)}</div>'
        for axis in AXES
    )
    notes = [f"<b>{escape(run.name)}</b>: {note}" for run in runs for note in _missing(run)]
    body = f"{_final_table(runs)}<section>{choices}{figures}</section>{_differences(runs)}"
    return write_text(output, page(f"{len(runs)} runs", notes, body))


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
      rows: of `metrics.jsonl`.
      unreadable: how many of its lines are not.
      gallery: the texts of `samples.json`, as HTML.
      problem: with that file; or "".
    """

    name: str
    config: dict
    facts: dict
    rows: list[dict]
    unreadable: int
    gallery: str
    problem: str

    def per_step(self, name: str) -> float | None:
        """A number of the facts about a step; None where it is not there."""
        try:
            return float(self.facts["step"][name].replace(",", ""))
        except (KeyError, TypeError, AttributeError, ValueError):
            return None


@dataclasses.dataclass(frozen=True)
class Axis:
    """What curves are drawn against: a fact about a step times the number of steps."""

    key: str
    name: str
    fact: str = ""
    factor: float = 1.0

    def scale(self, run: Run) -> float | None:
        """Of a step, or None where the run does not say."""
        found = run.per_step(self.fact) if self.fact else 1.0
        return None if found is None else found * self.factor


AXES = (
    Axis("steps", "step"),
    Axis("tokens", "tokens", "tokens"),
    Axis("flops", "FLOPs", "GFLOP", 1e9),
)


def read_run(workdir: Path) -> Run:
    """What there is of a run.

    Raises:
      UserError: as `write_report`.
    """
    config = _read_json(workdir / "config.json")
    facts, _ = _read_part(workdir / "facts.json", dict)
    gallery, is_damaged = _read_part(workdir / SAMPLES, _gallery)
    problem = f"{SAMPLES} cannot be read; there are no held-out texts." if is_damaged else ""
    rows, unreadable = read_whole_rows(workdir)
    name = workdir.resolve().name
    return Run(name, config, facts or {}, rows, unreadable, gallery or "", problem)


def _read_part(path: Path, make: Callable[[Any], Any]) -> tuple[Any, bool]:
    """What `make` makes of a JSON file, or None; and whether there is one that cannot be read."""
    if not path.exists():
        return None, False
    try:
        return make(_read_json(path)), False
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return None, True


def figures_of(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Titles of figures, and what they draw: metric name without its prefix -> label."""
    if all(run.config.get("task") != "finetune" for run in runs):
        return FIGURES
    scores = {}
    for name in dict.fromkeys(name for run in runs for row in run.rows for name in row):
        split, _, score = name.removeprefix("eval/").rpartition("/")
        if name.startswith("eval/") and score in SCORES:
            scores[name.removeprefix("eval/")] = f"{SCORES[score]}{split and ', '}{split}"
    return {"Scores": scores} | LOSSES | FIGURES


def page(title: str, notes: Iterable[str], body: str) -> str:
    """A page that needs nothing but itself.

    Args:
      title: text.
      notes, body: HTML.
    """
    return PAGE.format(
        title=escape(title),
        style=STYLE + gallery.STYLE,
        notes="\n".join(f"<p>{note}</p>" for note in notes),
        body=body,
    )


def write_samples(workdir: Path, step: int, texts: Sequence[Sequence[gallery.Token]]) -> None:
    """Writes held-out texts with the networks' verdicts for the gallery, see `shading`."""
    write_text(workdir / SAMPLES, json.dumps({"step": step, "texts": texts}) + "\n")


def _gallery(samples: dict) -> str:
    """Held-out texts, each token shaded."""
    shown, room = [], GALLERY_TOKENS
    for text in samples["texts"]:
        shown.append(gallery.as_html(text[: max(0, room)]))
        room -= len(text)
    return (
        "<section><h2>Held-out texts</h2><p>As the discriminator reads them at step "
        f"{samples['step']:,}: the darker a token, the more likely it calls it replaced. "
        "Underlined are the tokens that the generator was asked for; a solid line marks those that "
        "it has replaced. Point at a token, or tap it, for details.</p>"
        f'<div class="gallery">{"".join(filter(None, shown))}</div></section>'
    )


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} not found: {path.parent} is not the directory of a run") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


def _series(rows: list[dict], name: str) -> tuple[list[int], list[float | int]]:
    """The steps at which a metric was logged and its values."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def _notes(run: Run) -> Iterator[str]:
    yield from _missing(run)
    evaluated = [row["step"] for row in run.rows if any(name.startswith("eval/") for name in row)]
    is_finetuned = run.config.get("task") == "finetune"
    if evaluated:
        what = "Scores" if is_finetuned else "Losses, accuracies and AUC"
        yield f"{what} are on held-out data at step {evaluated[-1]:,}."
    elif run.rows:
        yield "No evaluation has been logged yet: there are no held-out numbers."
    if not is_finetuned:
        yield (
            "MLM is masked language modelling, by the generator if there is one; RTD is replaced "
            "token detection, by the discriminator."
        )


def _missing(run: Run) -> Iterator[str]:
    if not run.rows:
        yield "No metrics have been logged yet."
    if run.unreadable:
        yield f"Left out: lines of {METRICS} that cannot be read, {run.unreadable:,} in number."
    if run.problem:
        yield run.problem
    if not run.facts:
        yield "There is no readable facts.json: machine, data and parameter counts are not known."


def _tiles(run: Run) -> str:
    tiles = []
    for name, label, number_format in tiles_of(run):
        _, values = _series(run.rows, name)
        if values:
            number = number_format.format(values[-1])
            tiles.append(f'<div class="tile"><b>{number}</b><span>{escape(label)}</span></div>')
    return f'<section class="tiles">{"".join(tiles)}</section>'


def tiles_of(run: Run) -> list[tuple[str, str, str]]:
    """Metric name, label and format of the final numbers of a run."""
    scores = figures_of([run]).get("Scores", {})
    return [(f"eval/{name}", label, "{:.4g}") for name, label in scores.items()] + [*TILES]


def _final_table(runs: Sequence[Run]) -> str:
    """The newest numbers, a row for each run."""
    tiles = dict.fromkeys(tile for run in runs for tile in tiles_of(run))
    columns = [tile for tile in tiles if any(_series(run.rows, tile[0])[1] for run in runs)]
    head = "".join(f'<th scope="col">{escape(label)}</th>' for _, label, _ in columns)
    lines = []
    for run, color in zip(runs, itertools.cycle(COLORS)):
        cells = []
        for name, _, number_format in columns:
            _, values = _series(run.rows, name)
            cells.append(f"<td>{number_format.format(values[-1]) if values else ''}</td>")
        mark = f'<span class="key" style="background:{color}"></span>'
        lines.append(f'<tr><th scope="row">{mark}{escape(run.name)}</th>{"".join(cells)}</tr>')
    return (
        '<section class="wide"><table class="numbers">'
        f"<tr><th></th>{head}</tr>{''.join(lines)}</table></section>"
    )


def _differences(runs: Sequence[Run]) -> str:
    """The fields that are not the same in all configurations."""
    configs = [dict(_flatten(run.config)) for run in runs]
    names = sorted(name for name in {name for config in configs for name in config})
    differing = [name for name in names if len({config.get(name) for config in configs}) > 1]
    if not differing:
        return ""
    head = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(config.get(name, ''))}</td>" for config in configs)
        + "</tr>"
        for name in differing
    )
    return (
        "<details open><summary>Differences of the configurations</summary>"
        f'<div class="wide"><table class="numbers"><tr><th></th>{head}</tr>{lines}</table></div>'
        "</details>"
    )


def _lacking(runs: Sequence[Run], axis: Axis) -> str:
    """A note about runs that cannot be drawn against an axis."""
    names = [escape(run.name) for run in runs if axis.scale(run) is None]
    return f"<p>Not drawn, as facts.json does not say: {', '.join(names)}.</p>" if names else ""


def _figures(figures: dict[str, dict[str, str]], runs: Sequence[Run], axis: Axis) -> str:
    plots = {title: _plot(runs, title, metrics, axis) for title, metrics in figures.items()}
    shown = (
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in plots.items()
        if svg
    )
    return f'<section class="figures">{"".join(shown)}</section>'


def _plot(runs: Sequence[Run], title: str, metrics: dict[str, str], axis: Axis) -> str:
    """One figure as an SVG element; empty when none of its metrics was logged.

    Colours tell the metrics of one run apart, or else the runs.
    """
    # Element ids are hashes of this salt and a running number, and the page holds all figures.
    with matplotlib.rc_context(PLOT_SETTINGS | {"svg.hashsalt": f"{title} {axis.key}"}):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for run, run_color in zip(runs, itertools.cycle(COLORS)):
            scale = axis.scale(run)
            for color, (metric, label) in zip(itertools.cycle(COLORS), metrics.items()):
                for prefix, split, style in CURVES:
                    steps, values = _series(run.rows, prefix + metric)
                    if not steps or scale is None:
                        continue
                    if len(runs) > 1:
                        color, label = run_color, run.name
                    name = f"{label}, {split}" if label else split
                    places = [step * scale for step in steps]
                    axes.plot(places, values, color=color, label=f" {name}", **style)
        if not axes.lines:
            return ""
        axes.set_xlabel(axis.name)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS, integer=not axis.fact))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS))
        axes.xaxis.set_major_formatter(_tick_label)
        axes.yaxis.set_major_formatter(_tick_label)
        if len(axes.lines) > 1 and len(runs) == 1:
            # A row for one metric, a column each for several.
            num_metrics = len({line.get_color() for line in axes.lines})
            figure.legend(loc="outside upper left", ncols=min(3, max(2, num_metrics)))
        return _svg(figure)


def _tick_label(value: float, _: int | None) -> str:
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:g}"


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=unsigned)
    svg = buffer.getvalue()
    # Leaves the XML prologue out, and the names of groups, which are the same in all figures.
    return re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])


def _flatten(values: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and printed values of a nested dict."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _table(title: str, values: dict, state: str = "") -> str:
    """A collapsible table, shown at first if `state` is "open"; empty when there are no values."""
    if not values:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in _flatten(values)
    )
    return f"<details {state}><summary>{title}</summary><table>{lines}</table></details>"
