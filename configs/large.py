"""ELECTRA-Large, the paper's 400K steps: 24 layers of 1024, a quarter of the tokens predicted.

    python -m electra_jax.main --config=configs/large.py --workdir=runs/large \
        --config.data.source='corpus/*.txt'

354,655,291 parameters while pre-training, of which the discriminator keeps 335,142,913.

Batch and steps stand in the paper, the other numbers are from its appendix through a third party's
copy. Where the batch does not fit the devices' memory, `--config.num_microbatches` splits it.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.num_train_steps = 400_000
    config.batch_size = 2048
    config.data.sequence_length = 512
    config.model.update(hidden_size=1024, num_layers=24, embedding_size=1024)
    config.masking.rate = 0.25
    config.optimizer.learning_rate = 2e-4
    return config
