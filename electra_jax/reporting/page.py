"""Pages that need no network: the report of a run, the comparison of several, shaded texts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_jax.files import write_text
from electra_jax.reporting import gallery
from electra_jax.reporting.figures import AXES, COLORS, compared, figures_of
from electra_jax.reporting.gallery import Token
from electra_jax.reporting.run import MetricsOf, Run
from electra_jax.reporting.templates import render


def write_report(workdir: Path, metrics_of: MetricsOf, output: Path | None = None) -> Path:
    """Writes a report of what the run in `workdir` has logged so far and returns its path.

    What is missing, or cannot be read, is left out with a note; without a `config.json` that can be
    read it raises UserError. The default of `output` is `workdir/report.html`.
    """
    run = Run(workdir, metrics_of)
    page = render(
        "report.html",
        title=run.name,
        notes=[*run.missing(), *_notes(run)],
        run=run,
        tiles=tiles(run),
        figures=figures_of(run),
        tables={"Facts": dict(flat(run.facts)), "Config": dict(flat(run.config))},
    )
    return write_text(output or workdir / "report.html", page)


def write_comparison(workdirs: Sequence[Path], metrics_of: MetricsOf, output: Path) -> Path:
    """Writes the curves of several runs over each other, by steps, tokens and FLOPs.

    Raises UserError as `write_report` does.
    """
    runs = [Run(workdir, metrics_of) for workdir in workdirs]
    if len({run.name for run in runs}) < len(runs):
        for run, workdir in zip(runs, workdirs, strict=True):
            run.name = str(workdir)
    numbers = [tiles(run) for run in runs]
    configs = [dict(flat(run.config)) for run in runs]
    names = sorted({name for config in configs for name in config})
    page = render(
        "comparison.html",
        title=f"{len(runs)} runs",
        notes=[],
        runs=runs,
        colors=COLORS,
        numbers=numbers,
        labels=[*dict.fromkeys(label for found in numbers for label in found)],
        axes=AXES,
        figures={axis.key: compared(runs, axis) for axis in AXES},
        lacking={a.key: [run.name for run in runs if a.scale(run) is None] for a in AXES},
        configs=configs,
        differing=[name for name in names if len({c.get(name) for c in configs}) > 1],
    )
    return write_text(output, page)


def texts_page(texts: Sequence[Sequence[Token]]) -> str:
    """Shaded texts as a page."""
    return render(
        "texts.html",
        title="Replaced token detection",
        notes=["The darker a token, the more the discriminator takes it for a replacement."],
        texts=gallery.as_html(texts),
    )


def tiles(run: Run) -> dict[str, str]:
    """Labels, and the final numbers of a run."""
    found = {
        metric.label: metric.tile.format(value)
        for name, metric in run.metrics.items()
        if metric.tile and (value := run.newest(name)) is not None
    }
    return found | ({"steps": f"{run.rows[-1]['step']:,}"} if run.rows else {})


def _notes(run: Run) -> Iterator[str]:
    evaluated = [row["step"] for row in run.rows if any(name.startswith("eval/") for name in row)]
    if evaluated:
        what = "Scores" if run.is_finetuned else "Losses, accuracies and AUC"
        yield f"{what} are on held-out data at step {evaluated[-1]:,}."
    elif run.rows:
        yield "No evaluation has been logged yet: there are no held-out numbers."
    if not run.is_finetuned:
        yield (
            "MLM is masked language modeling, by the generator if there is one; RTD is replaced "
            "token detection, by the discriminator."
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and printed values of a nested dict."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
