"""ELECTRA in minutes on a CPU: real text, a network of two layers.

    python -m electra_jax.main --config=configs/tiny.py

The text is what every machine has, the docstrings of Python and of the installed packages: about
40,000 documents and 5 M tokens, gone through once. 1.5 M parameters.

So small a model needs a strong signal from the start, or the discriminator stays at calling every
token original: hence short rows, large initial weights, no dropout, faster second moments, and a
generator that is narrow enough to be caught.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as get_default_config


def get_config() -> ConfigDict:
    """What differs from the defaults."""
    config = get_default_config()
    config.num_train_steps = 2400
    config.batch_size = 64

    config.data.vocab_size = 8192
    config.data.held_out = 0.02
    config.data.sequence_length = 32

    config.model.hidden_size = 128
    config.model.num_layers = 2
    config.model.max_positions = 32
    config.model.dropout = 0.0
    config.model.attention_dropout = 0.0
    config.model.init_stddev = 0.08
    config.model.remat = "none"  # memory is no concern
    config.model.scan_unroll = 2
    config.generator.width = 0.375

    config.optimizer.learning_rate = 1.5e-3
    config.optimizer.warmup_steps = 300
    config.optimizer.b2 = 0.98

    config.eval_every_steps = 400
    config.checkpoint.every_steps = 400
    return config
