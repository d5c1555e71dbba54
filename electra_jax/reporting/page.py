"""Pages that need no network: the report of a run, the comparison of several, shaded texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from electra_jax.files import write_text
from electra_jax.reporting import gallery
from electra_jax.reporting.figures import AXES, COLORS, compared, figures_of
from electra_jax.reporting.gallery import Token
from electra_jax.reporting.run import MetricsOf, Run, flat
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
        figures=figures_of(run),
        tables={"Facts": dict(flat(run.facts)), "Config": run.settings},
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
    names = sorted({name for run in runs for name in run.settings})
    page = render(
        "comparison.html",
        title=f"{len(runs)} runs",
        runs=runs,
        colors=COLORS,
        labels=[*dict.fromkeys(label for run in runs for label in run.tiles)],
        axes=AXES,
        figures={axis.key: compared(runs, axis) for axis in AXES},
        lacking={a.key: [run.name for run in runs if a.scale(run) is None] for a in AXES},
        differing=[name for name in names if len({run.settings.get(name) for run in runs}) > 1],
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
