"""Train, evaluate and resume: one command for every recipe and every machine.

    python -m electra_jax.main --config=configs/tiny.py
    python -m electra_jax.main --config=configs/large.py --workdir=DIR --config.data.source='text/*.txt'

Run the same command again and it goes on where it stopped.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from electra_jax import cli
from electra_jax.train import train_and_evaluate

CONFIG = config_flags.DEFINE_config_file("config", None, "recipe, e.g. configs/tiny.py")
WORKDIR = flags.DEFINE_string("workdir", None, "run directory; default: runs/NAME_OF_THE_RECIPE")


def main() -> None:
    """Dispatch on `config.task`."""
    config = cli.recipe(CONFIG)
    name = Path(config_flags.get_config_filename(flags.FLAGS[CONFIG.name])).stem
    workdir = Path(WORKDIR.value or f"runs/{name}")
    if config.task == "pretrain":
        train_and_evaluate(config, workdir)


if __name__ == "__main__":
    cli.run(main)
