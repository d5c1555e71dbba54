"""ELECTRA-Large, the paper's 1.75M steps: `large.py` for longer, the published large checkpoint.

    python -m electra_jax.main --config=configs/large_plus.py --workdir=runs/large_plus \
        --config.data.source='corpus/*.txt'

354,655,291 parameters while pre-training, of which the discriminator keeps 335,142,913.

Sources of the numbers and memory: as for `large.py`.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.num_train_steps = 1_750_000
    config.batch_size = 2048
    config.data.sequence_length = 512
    config.model.update(hidden_size=1024, num_layers=24, embedding_size=1024)
    config.masking.rate = 0.25
    config.optimizer.learning_rate = 2e-4
    return config
