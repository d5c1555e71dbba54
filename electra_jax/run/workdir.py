"""The run directory: who may write there, and what lies beside checkpoints and metrics."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from ml_collections import ConfigDict

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import locked, read_json, write_text
from electra_jax.settings import Setting, flatten, restored

RESULTS = "results.json"  # scores of a fine-tuned run
RUN_FILES = ("config.json", "facts.json", "metrics.jsonl", "samples.json", RESULTS, "report.html")

# (configuration of the run so far, configuration to go on with, step) to whether the second can go
# on with the parameters that the first has at that step.
Fits = Callable[[ConfigDict, ConfigDict, int], bool]


def check(
    config: ConfigDict, workdir: Path, settings: Mapping[str, Setting], fits: Fits
) -> list[str]:
    """Raises UserError where `workdir` cannot be written to, or its run does not go with `config`.

    Returns the fields that differ from those of the run so far, where `config.resume` allows it.
    Settings that are free may always change.
    """
    existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--workdir is {workdir}, but {existing} is not a directory to write to")
    steps = steps_in(workdir / "checkpoints")
    if not steps:
        return []
    try:
        before = read_config(workdir, settings)
    except UserError as error:
        raise UserError(f"{error}; put back what was in it, or use another --workdir") from error
    was, now = flatten(before), flatten(config)
    # A setting that is newer than the run and has no default follows from what the run has.
    newer = settings.keys() - flatten(ConfigDict(read_json(workdir / "config.json"))).keys()
    differing = [
        f"config.{name} (was {was[name]!r}, is {now[name]!r})"
        for name in sorted(settings)
        if was[name] != now[name]
        and not settings[name].is_free
        and not (name in newer and settings[name].default is None)
    ]
    if config.resume == "same" and differing:
        raise UserError(
            f"{workdir} holds a run with another configuration: {', '.join(differing)}; use "
            "another --workdir, or go on all the same with --config.resume=changed"
        )
    if differing and not fits(before, config, steps[-1]):
        raise UserError(
            f"the parameters in {workdir} do not fit {', '.join(differing)}; use another --workdir"
        )
    return differing


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints there are, in order; none where there is no such directory."""
    return sorted(int(path.name) for path in directory.glob("[0-9]*") if path.name.isdecimal())


def chosen_step(workdir: Path) -> int | None:
    """The checkpoint that a fine-tuned run's own predictions are from; None: the newest there is.

    Raises UserError where `results.json` is damaged.
    """
    if not (workdir / RESULTS).is_file():
        return None
    step = read_json(workdir / RESULTS).get("step")
    return step if step in steps_in(workdir / "checkpoints") else None


def config_file(workdir: Path) -> Path:
    """The file with the configuration of the run in `workdir`; UserError where there is none."""
    path = workdir / "config.json"
    if not path.exists():
        trials = sorted(parent.name for parent in workdir.glob("trial_*") if parent.is_dir())
        choose = f"; it holds trials, give one: {workdir / trials[0]}" if trials else ""
        raise UserError(f"{path} not found: {workdir} is not the directory of a run{choose}")
    return path


def read_config(workdir: Path, settings: Mapping[str, Setting]) -> ConfigDict:
    """The configuration of the run in `workdir`, see `settings.restored`; UserError without one."""
    path = config_file(workdir)
    try:
        return restored(read_json(path), settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: not readable as the configuration of a run: {error}") from error


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of `workdir`, which is made. The end of the process ends its hold.

    Of several processes, the first one alone holds it. Raises UserError if another run is in there.
    """

    def refuse(holder: str) -> None:
        raise UserError(
            f"{workdir} is in use: {holder} holds {workdir / 'run.lock'}; wait for it, or use "
            "another --workdir"
        )

    with contextlib.ExitStack() as hold:
        if jax.process_index() == 0:
            hold.enter_context(locked(workdir / "run.lock", refuse))
        yield


def write_run_files(config: ConfigDict, workdir: Path, tokenizer: Tokenizer, facts: dict) -> None:
    """What makes the run directory self-contained, beside checkpoints and metrics."""
    write_text(workdir / "config.json", json.dumps(config.to_dict(), indent=1))
    write_text(workdir / "facts.json", json.dumps(facts, indent=1))
    tokenizer.save(workdir / "tokenizer")
