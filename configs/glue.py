"""Fine-tuning on a GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.

    python -m electra_jax.main --config=configs/glue.py:rte --config.init_from=runs/base \
        --config.data.source=glue --workdir=runs/rte --config.num_trials=10

`config.data.source` is the directory that holds the folders of the official files (CoLA and so on),
or `tfds:glue`. The settings are the paper's: 3 epochs, 10 for RTE and STS-B; learning rate and
layer-wise decay by the size of the encoder.
"""

from ml_collections import ConfigDict

from electra_jax.finetune.config import get_config as default_config


def get_config(task: str = "cola") -> ConfigDict:
    config = default_config()
    config.data.name = task
    config.num_train_epochs = 10.0 if task in ("rte", "stsb") else 3.0
    return config
