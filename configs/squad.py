"""Fine-tuning on SQuAD 1.1 or 2.0, or anything in their format.

    python -m electra_jax.main --config=configs/squad.py:v1.1 --config.init_from=runs/base \
        --config.data.train=train-v1.1.json --config.data.dev=dev-v1.1.json --workdir=runs/squad

Files may be compressed, and `tfds:squad/v1.1` works, too. The settings are the paper's: 2 epochs,
rows of 512 tokens, the joint head of start, end and answerability.
"""

from ml_collections import ConfigDict

from electra_jax.finetune.config import get_config as default_config


def get_config(version: str = "v1.1") -> ConfigDict:
    config = default_config()
    if version not in ("v1.1", "v2.0"):
        raise ValueError(f"the version is {version!r}; allowed: v1.1, v2.0")
    config.num_train_epochs = 2.0
    config.data.update(kind="squad", name=f"squad-{version}", max_length=512)
    config.data.unanswerable = version == "v2.0"
    return config
