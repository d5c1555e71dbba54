"""The HTML report of a run: final numbers, curves and config in one self-contained file."""

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from electra_jax import shading
from electra_jax.errors import UserError
from electra_jax.finetune.files import write_text
from electra_jax.shading import escape
from electra_jax.writer import read_metrics

# Title and unit of each figure, and what it draws: metric name without its prefix -> label.
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

# Blue, vermilion and green of Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73")

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
    "legend.fontsize": 8,
    "legend.frameon": False,
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


def write_report(workdir: Path) -> Path:
    """Writes `workdir/report.html` from what the run has logged so far and returns its path.

    Reads `config.json`, `metrics.jsonl` and, where there is one, `facts.json` (devices, parameter
    and data counts, versions). Metrics that are missing are left out of the page.

    Raises:
      UserError: There is no `config.json`, or one of these files is malformed.
    """
    config = _read_json(workdir / "config.json")
    facts = _read_json(workdir / "facts.json") if (workdir / "facts.json").exists() else {}
    rows = read_metrics(workdir)
    body = [
        _tiles(rows),
        _figures(rows),
        _gallery(workdir / SAMPLES),
        _table("Facts", facts, "open"),
        _table("Config", config),
    ]
    content = page(workdir.resolve().name, _notes(rows), "\n".join(body))
    return write_text(workdir / "report.html", content)


def page(title: str, notes: Iterable[str], body: str) -> str:
    """A page that needs nothing but itself.

    Args:
      title: text.
      notes, body: HTML.
    """
    return PAGE.format(
        title=escape(title),
        style=STYLE + shading.STYLE,
        notes="\n".join(f"<p>{note}</p>" for note in notes),
        body=body,
    )


def write_samples(workdir: Path, step: int, texts: Sequence[Sequence[shading.Token]]) -> None:
    """Writes held-out texts with the networks' verdicts for the gallery, see `shading`."""
    write_text(workdir / SAMPLES, json.dumps({"step": step, "texts": texts}) + "\n")


def _gallery(path: Path) -> str:
    """Held-out texts, each token shaded; empty where there are none."""
    if not path.exists():
        return ""
    samples = _read_json(path)
    shown, room = [], GALLERY_TOKENS
    for text in samples["texts"]:
        shown.append(shading.as_html(text[:room]))
        room -= len(text)
        if room <= 0:
            break
    return (
        "<section><h2>Held-out texts</h2><p>As the discriminator reads them at step "
        f"{samples['step']:,}: the darker a token, the more likely it calls it replaced. "
        "Underlined are the tokens that the generator was asked for; a solid line marks those that "
        "it has replaced. Point at a token, or tap it, for details.</p>"
        f'<div class="gallery">{"".join(shown)}</div></section>'
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


def _notes(rows: list[dict]) -> Iterator[str]:
    if not rows:
        yield "No metrics have been logged yet."
        return
    evaluated = [row["step"] for row in rows if any(name.startswith("eval/") for name in row)]
    if evaluated:
        yield f"Losses, accuracies and AUC are on held-out data at step {evaluated[-1]:,}."
    else:
        yield "No evaluation has been logged yet: there are no held-out numbers."
    yield (
        "MLM is masked language modelling, by the generator if there is one; RTD is replaced token "
        "detection, by the discriminator."
    )


def _tiles(rows: list[dict]) -> str:
    tiles = []
    for name, label, number_format in TILES:
        _, values = _series(rows, name)
        if values:
            number = number_format.format(values[-1])
            tiles.append(f'<div class="tile"><b>{number}</b><span>{label}</span></div>')
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _figures(rows: list[dict]) -> str:
    plots = {title: _plot(rows, title, metrics) for title, metrics in FIGURES.items()}
    figures = (
        f"<figure><figcaption>{title}</figcaption>{svg}</figure>"
        for title, svg in plots.items()
        if svg
    )
    return f'<section class="figures">{"".join(figures)}</section>'


def _plot(rows: list[dict], title: str, metrics: dict[str, str]) -> str:
    """One figure as an SVG element; empty when none of its metrics was logged."""
    # Element ids are hashes of this salt and a running number, and the page holds all figures.
    with matplotlib.rc_context(PLOT_SETTINGS | {"svg.hashsalt": title}):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        for color, (metric, label) in zip(COLORS, metrics.items(), strict=False):
            for prefix, split, style in CURVES:
                steps, values = _series(rows, prefix + metric)
                if steps:
                    name = f"{label}, {split}" if label else split
                    axes.plot(steps, values, color=color, label=name, **style)
        if not axes.lines:
            return ""
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS))
        axes.xaxis.set_major_formatter(_tick_label)
        axes.yaxis.set_major_formatter(_tick_label)
        if len(axes.lines) > 1:
            # A row for one metric, a column each for several.
            num_metrics = len({line.get_color() for line in axes.lines})
            figure.legend(loc="outside upper left", ncols=max(2, num_metrics))
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
