"""The run directory: who may write there, and what lies beside checkpoints and metrics."""

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import read_json, write_text
from electra_jax.settings import flatten

RESULTS = "results.json"  # scores of a fine-tuned run


RUN_FILES = ("config.json", "facts.json", "metrics.jsonl", "samples.json", RESULTS, "report.html")


# Fields that may change when a run is resumed: no number that training computes depends on them.
FREE_FIELDS = (
    "log_every_steps",
    "eval_every_steps",
    "max_skipped_updates",
    "profile_steps",
    "histograms",
    "wandb",
    "resume",
    "checkpoint.",
    "parallel.",
    "data.dir",
    "data.num_",
    "data.prefetch",
    "model.remat",
    "model.scan_unroll",
)


# Fields that decide which parameters there are, and of what size: a checkpoint fits no others.
SHAPING_FIELDS = (
    "objective",
    "algorithm",
    "model.hidden_size",
    "model.num_layers",
    "model.embedding_size",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_positions",
    "generator.kind",
    "generator.width",
    "generator.depth",
    "generator.sharing",
)


def check(config: ConfigDict, workdir: Path) -> list[str]:
    """Refuses what cannot be written to, and a run of another configuration.

    Returns:
      The fields that differ from those of the run so far, where `config.resume` allows it.

    Raises:
      UserError: `workdir` is no directory to write to, or its run does not go with `config`.
    """
    existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--workdir is {workdir}, but {existing} is not a directory to write to")
    if not has_checkpoint(workdir):
        return []
    before = _read_config(workdir / "config.json")
    now = flatten(ConfigDict(json.loads(json.dumps(config.to_dict()))))
    differing = {
        name: f"config.{name} (was {before.get(name)!r}, is {now.get(name)!r})"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not name.startswith(FREE_FIELDS)
    }
    shaping = [text for name, text in differing.items() if name in SHAPING_FIELDS]
    switch = "generator.mle_steps"
    if now.get("algorithm") == "two_stage" and switch in differing:
        newest = steps_in(workdir / "checkpoints")[-1]
        begun = min(before[switch], now[switch]) <= newest  # then its copy is made, or missing
        shaping += [differing[switch]] * begun
    if config.resume == "changed" and shaping:
        raise UserError(
            f"the parameters in {workdir} do not fit {', '.join(shaping)}; use another --workdir"
        )
    if config.resume == "same" and differing:
        raise UserError(
            f"{workdir} holds a run with another configuration: {', '.join(differing.values())}; "
            "use another --workdir, or go on all the same with --config.resume=changed"
        )
    return list(differing.values())


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints there are, in order; none where there is no such directory."""
    return sorted(int(path.name) for path in directory.glob("[0-9]*") if path.name.isdecimal())


def chosen_step(workdir: Path) -> int | None:
    """The checkpoint that a fine-tuned run's own predictions are from; None: the newest there is.

    Raises:
      UserError: `results.json` is damaged.
    """
    if not (workdir / RESULTS).is_file():
        return None
    step = read_json(workdir / RESULTS).get("step")
    return step if step in steps_in(workdir / "checkpoints") else None


def has_checkpoint(workdir: Path) -> bool:
    """Whether there is a run in `workdir` to go on with."""
    return bool(steps_in(workdir / "checkpoints"))


def config_file(workdir: Path) -> Path:
    """The file with the configuration of the run in `workdir`; UserError where there is none."""
    path = workdir / "config.json"
    if not path.exists():
        trials = sorted(parent.name for parent in workdir.glob("trial_*") if parent.is_dir())
        choose = f"; it holds trials, give one: {workdir / trials[0]}" if trials else ""
        raise UserError(f"{path} not found: {workdir} is not the directory of a run{choose}")
    return path


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        content = error
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: not readable as the configuration of the run there ({content}); put back "
            "what was in it, or use another --workdir"
        )
    return flatten(ConfigDict(content))


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of `workdir`, which is made. The end of the process ends its hold.

    Raises:
      UserError: another run is in there.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "run.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{workdir} is in use: {file.read() or 'another process'} holds {file.name}; wait "
                "for it, or use another --workdir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def write_run_files(config: ConfigDict, workdir: Path, tokenizer: Tokenizer, facts: dict) -> None:
    """What makes the run directory self-contained, beside checkpoints and metrics."""
    for name, content in {"config.json": config.to_dict(), "facts.json": facts}.items():
        write_text(workdir / name, json.dumps(content, indent=1))
    tokenizer.save(workdir / "tokenizer")
