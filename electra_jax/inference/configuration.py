"""The settings of each task, and the configuration of a run that is there already."""

import json
from pathlib import Path

from ml_collections import ConfigDict

from electra_jax import config as pretraining
from electra_jax.errors import UserError
from electra_jax.finetune import config as finetuning
from electra_jax.run.workdir import config_file
from electra_jax.settings import flatten, to_config

SETTINGS = {"pretrain": pretraining.settings, "finetune": finetuning.settings}  # by config.task


def load_config(workdir: Path) -> ConfigDict:
    """The configuration of the run in `workdir`.

    Settings that are newer than the run have their default; those that are no more are passed over.

    Raises:
      UserError: there is no run, or its configuration cannot be read.
    """
    path = config_file(workdir)
    try:
        content = json.loads(path.read_bytes())
        known = SETTINGS[content["task"]]()
        config = to_config(known)
        values = flatten(ConfigDict(content))
        config.update_from_flattened_dict({x: values[x] for x in values if x in known})
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip("'\"")
        raise UserError(f"{path}: not readable as the configuration of a run ({reason})") from error
    return config
