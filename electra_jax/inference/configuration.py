"""The configuration of a finished run."""

import json
from pathlib import Path

from ml_collections import ConfigDict

from electra_jax import config as pretraining
from electra_jax.errors import UserError
from electra_jax.finetune import config as finetuning
from electra_jax.run.workdir import config_file


def load_config(workdir: Path) -> ConfigDict:
    """The configuration of the run in `workdir`; fields that are newer than it have their default.

    Raises:
      UserError: there is no run, or its configuration cannot be read.
    """
    path = config_file(workdir)
    try:
        content = json.loads(path.read_bytes())
        defaults = {"finetune": finetuning, "pretrain": pretraining}[content["task"]]
        config = defaults.get_config()
        config.update(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition(" Other fields")[0].strip("'\"")  # which would be listed
        raise UserError(f"{path}: not readable as the configuration of a run ({reason})") from error
    return config
