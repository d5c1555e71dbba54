"""ELECTRA-Base as in the paper: 12 layers of 768, a generator of a third of the width.

    python -m electra_jax.main --config=configs/base.py --workdir=runs/base \
        --config.data.source='corpus/*.txt'

119,386,427 parameters while pre-training, of which the discriminator keeps 109,483,009.

The numbers are from the paper's appendix through a third party's copy; the published base
checkpoint is another one, trained for longer on more data. Where the batch does not fit the
devices' memory, `--config.num_microbatches` splits it.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.num_train_steps = 766_000
    config.batch_size = 256
    config.data.sequence_length = 512
    config.model.update(hidden_size=768, embedding_size=768)
    config.generator.width = 1 / 3
    config.optimizer.learning_rate = 2e-4
    return config
