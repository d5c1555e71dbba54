"""Metrics for Weights & Biases, beside the run's own files: `config.wandb` names the project."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ml_collections import ConfigDict

Track = Callable[[int, dict[str, float]], None]


@contextlib.contextmanager
def tracked(config: ConfigDict, workdir: Path) -> Iterator[Track]:
    """Yields a function that logs a step's metrics; it does nothing without a project.

    A run that goes on does so there, too: its id is kept in `workdir/wandb_id`.
    """
    if not config.wandb:
        yield lambda step, values: None
        return
    import wandb  # an extra

    path = workdir / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    with wandb.init(
        project=config.wandb,
        name=workdir.resolve().name,
        id=path.read_text(),
        resume="allow",
        dir=workdir,
        config=config.to_dict(),
    ) as run:
        yield lambda step, values: run.log(values, step=step)
