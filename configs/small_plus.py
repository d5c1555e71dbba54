"""ELECTRA-Small++, the recipe of the published small checkpoint: longer, and a full-size generator.

    python -m electra_jax.main --config=configs/small_plus.py --workdir=runs/small_plus \
        --config.data.source='corpus/*.txt'

23,122,875 parameters while pre-training, of which the discriminator keeps 13,549,057.

Steps and the full-width generator are from the notes that came with the published checkpoint;
length, batch and learning rate are recalled from the paper's appendix and unverified. The original
trained it on XLNet's data (unverified).
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.num_train_steps = 4_000_000
    config.data.sequence_length = 512
    config.generator.width = 1.0
    return config
