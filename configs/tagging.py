"""Fine-tuning on words with tags, in CoNLL's columns: named entities, chunks, parts of speech.

    python -m electra_jax.main --config=configs/tagging.py --config.init_from=runs/base \
        --config.data.train=train.txt --config.data.dev=dev.txt --workdir=runs/tags

The first column is the word, the last its tag; an empty line ends a sentence.
"""

from ml_collections import ConfigDict

from electra_jax.finetune.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.update(kind="tagging", name="tagging", max_length=256)
    return config
