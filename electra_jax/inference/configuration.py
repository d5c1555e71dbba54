"""The settings of each task, and the configuration of a run that is there already."""

from pathlib import Path

from ml_collections import ConfigDict

from electra_jax.config import settings
from electra_jax.errors import UserError
from electra_jax.files import read_json
from electra_jax.finetune import config as finetuning
from electra_jax.run.workdir import config_file, read_config

SETTINGS = {"pretrain": settings, "finetune": finetuning.settings}  # by config.task


def load_config(workdir: Path) -> ConfigDict:
    """The configuration of the run in `workdir`; UserError where there is none to be read.

    Settings that are newer than the run have their default; those that are no more are passed over.
    """
    path = config_file(workdir)
    task = read_json(path).get("task")
    if task not in SETTINGS:
        raise UserError(f"{path}: task is {task!r}; allowed: {', '.join(map(repr, SETTINGS))}")
    return read_config(workdir, SETTINGS[task]())
