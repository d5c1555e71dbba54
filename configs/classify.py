"""Fine-tuning on a table of your own: CSV, TSV, JSONL or Parquet.

    python -m electra_jax.main --config=configs/classify.py --config.init_from=runs/base \
        --config.data.train=train.csv --config.data.dev=dev.csv --workdir=runs/mine \
        --config.data.text="('title', 'body')" --config.data.label=topic

`config.data.target`, or what follows the recipe as in `configs/classify.py:multilabel`, is
classification, multilabel or regression.
"""

from ml_collections import ConfigDict

from electra_jax.finetune.config import get_config as default_config


def get_config(target: str = "classification") -> ConfigDict:
    config = default_config()
    config.data.update(kind="table", name="table", target=target)
    return config
