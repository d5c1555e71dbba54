"""What a run directory holds, whole or damaged, old or new, for those who look at it."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from markupsafe import Markup

from electra_jax.errors import UserError
from electra_jax.files import read_json, write_text
from electra_jax.monitoring import rates
from electra_jax.monitoring.writer import read_whole_rows
from electra_jax.objectives.metrics import Metric
from electra_jax.reporting.gallery import Token, as_html
from electra_jax.run.workdir import config_file

SAMPLES = "samples.json"
GALLERY_TOKENS = 1000  # at most

# The configuration of a run, as in its config.json, to the metrics that its parts list.
MetricsOf = Callable[[dict[str, Any]], Mapping[str, Metric]]


class Run:
    """What a run directory holds; UserError where there is no `config.json`, or a malformed one.

    Attributes:
      facts: empty where there are none that can be read.
      rows: of `metrics.jsonl`.
      unreadable: how many of its lines are not.
      texts: what the networks make of held-out texts, as HTML, or ""; None where it is damaged.
      metrics: how those in `rows` are shown, by name without the prefix `train/` or `eval/`.
      settings: the configuration, printed, by dotted names.
      tiles: final numbers by their labels.
    """

    def __init__(self, workdir: Path, metrics_of: MetricsOf):
        self.name = workdir.resolve().name
        self.config = read_json(config_file(workdir))
        self.facts = {}
        with contextlib.suppress(UserError):
            self.facts = read_json(workdir / "facts.json")
        self.rows, self.unreadable = read_whole_rows(workdir)
        self.texts = _read_texts(workdir / SAMPLES)
        self.metrics = described(self.rows, metrics_of(self.config) | rates.METRICS)
        self.settings = dict(flat(self.config))
        self.tiles = {
            metric.label: metric.tile.format(value)
            for name, metric in self.metrics.items()
            if metric.tile and (value := self.newest(name)) is not None
        }
        if self.rows:
            self.tiles["steps"] = f"{self.rows[-1]['step']:,}"

    @property
    def is_finetuned(self) -> bool:
        """Whether it is a fine-tuned run."""
        return self.config.get("task") == "finetune"

    def series(self, name: str) -> tuple[list[int], list[float | int]]:
        """The steps at which a metric was logged, by its full name, and its values."""
        points = [(row["step"], row[name]) for row in self.rows if name in row]
        return [step for step, _ in points], [value for _, value in points]

    def newest(self, name: str) -> float | int | None:
        """The newest value of a metric, held out where it is measured there."""
        values = self.series(f"eval/{name}")[1] or self.series(name)[1]
        return values[-1] if values else None

    def per_step(self, name: str) -> float | None:
        """A number of the facts about a step; None where it is not there."""
        try:
            return float(self.facts["step"][name].replace(",", ""))
        except (KeyError, TypeError, AttributeError, ValueError):
            return None

    def missing(self) -> list[str]:
        """Sentences about what is not there, or cannot be read."""
        notes = {
            "No metrics have been logged yet.": not self.rows,
            "Left out: lines of metrics.jsonl that cannot be read, "
            f"{self.unreadable:,} in number.": self.unreadable,
            f"{SAMPLES} cannot be read; there are no held-out texts.": self.texts is None,
            "There is no readable facts.json: machine, data and parameter counts are not "
            "known.": not self.facts,
        }
        return [note for note, applies in notes.items() if applies]


def _read_texts(path: Path) -> Markup | None:
    """The first texts of `samples.json`, see `Run.texts`."""
    if not path.exists():
        return Markup()
    try:
        samples, texts, room = read_json(path), [], GALLERY_TOKENS
        for text in samples["texts"]:
            texts.append(text[: max(0, room)])
            room -= len(text)
        return as_html(texts, int(samples["step"]))
    except (UserError, LookupError, TypeError, ValueError, AttributeError, TemplateError):
        return None


def described(rows: Sequence[dict], listed: Mapping[str, Metric]) -> dict[str, Metric]:
    """How the metrics in `rows` are shown, in the order of `listed`, and then those not in there.

    The metric `accuracy` of the split `dev` is `dev/accuracy`.
    """
    order = [*listed]
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        full = name.removeprefix("train/").removeprefix("eval/")
        split, _, bare = full.rpartition("/")
        metric = listed.get(bare, Metric(bare.replace("_", " ")))
        label = f"{metric.label}, {split}" if split else metric.label
        place = order.index(bare) if bare in listed else len(order)
        found[full] = place, dataclasses.replace(metric, label=label)
    return {name: metric for name, (_, metric) in sorted(found.items(), key=lambda x: x[1][0])}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and printed values of a nested dict."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_samples(workdir: Path, step: int, texts: Sequence[Sequence[Token]]) -> None:
    """Writes what the networks make of held-out texts, for the report."""
    write_text(workdir / SAMPLES, json.dumps({"step": step, "texts": texts}) + "\n")
