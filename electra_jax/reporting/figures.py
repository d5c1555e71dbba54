"""Curves of one run, or of several, as SVG for a page."""

import dataclasses
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from electra_jax.objectives.metrics import Metric
from electra_jax.reporting.run import Run

# The two kinds of curve. Metrics without a prefix are measured in training.
TRAIN_STYLE = {"linewidth": 1, "alpha": 0.7}
HELD_OUT_STYLE = {"linewidth": 1.5, "marker": "o", "markersize": 3}
CURVES = (
    ("train/", "training", TRAIN_STYLE),
    ("", "training", TRAIN_STYLE),
    ("eval/", "held-out", HELD_OUT_STYLE),
)
# Okabe and Ito's palette, which color-blind readers can tell apart, without its yellow and black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
STYLE = Path(__file__).with_name("figures.mplstyle")


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


def figures_of(run: Run) -> dict[str, str]:
    """Titles, and the curves of one run against its steps."""
    groups: dict[str, dict[str, Metric]] = {}
    for name, metric in run.metrics.items():
        if metric.figure is not None:
            title = titled(metric.figure or metric.label, metric)
            groups.setdefault(title, {})[name] = metric
    return {title: _plot([run], title, group, AXES[0]) for title, group in groups.items()}


def compared(runs: Sequence[Run], axis: Axis) -> dict[str, str]:
    """Titles, and the curves of several runs over each other, a figure for each metric."""
    drawn = {name: x for run in runs for name, x in run.metrics.items() if x.figure is not None}
    return {
        titled(metric.label, metric): _plot(runs, name, {name: metric}, axis)
        for name, metric in drawn.items()
    }


def titled(text: str, metric: Metric) -> str:
    """A title that begins with a capital letter and ends with the unit."""
    return text[:1].upper() + text[1:] + (f" ({metric.unit})" if metric.unit else "")


def _plot(runs: Sequence[Run], salt: str, metrics: Mapping[str, Metric], axis: Axis) -> str:
    """One figure as an SVG element; empty when there is nothing to draw.

    Colors tell the metrics of one run apart, or else the runs.
    """
    # Element ids are hashes of this salt and a running number, and the page holds all figures.
    with matplotlib.rc_context({"svg.hashsalt": f"{salt} {axis.key}"}, STYLE):
        figure = Figure(figsize=(4.4, 2.9), layout="constrained")
        axes = figure.add_subplot()
        is_comparison = len(runs) > 1
        curves = itertools.product(CURVES, enumerate(runs), enumerate(metrics.items()))
        for (prefix, split, style), (place, run), (number, (name, metric)) in curves:
            steps, values = run.series(prefix + name)
            scale = axis.scale(run)
            if not steps or scale is None:
                continue
            label = run.name if is_comparison else metric.label if len(metrics) > 1 else ""
            axes.plot(
                [step * scale for step in steps],
                values,
                color=COLORS[(place if is_comparison else number) % len(COLORS)],
                label=f" {label}, {split}" if label else f" {split}",
                **style,
            )
        if not axes.lines:
            return ""
        axes.set_xlabel(axis.name)
        for one, is_integer in ((axes.xaxis, not axis.fact), (axes.yaxis, False)):
            one.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10), integer=is_integer))
            one.set_major_formatter(_tick_label)
        if len(axes.lines) > 1 and not is_comparison:
            figure.legend(loc="outside upper left", ncols=2)  # training, held-out
        return _svg(figure)


def _tick_label(value: float, _: int | None) -> str:
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:g}"


def _svg(figure: Figure) -> Markup:
    buffer = io.StringIO()
    unsigned = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=unsigned)
    # Leaves the XML prologue out, and the names of groups, which are the same in all figures.
    _, svg, rest = buffer.getvalue().partition("<svg")
    return Markup(svg + re.sub(r'<g id="[^"]*"', "<g", rest))  # noqa: S704 - matplotlib escapes
