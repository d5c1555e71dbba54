"""How good the generator should be (the paper's figure 3, left).

    python -m electra_jax.main --config=configs/paper/generators.py:ROW --workdir=runs/ROW \
        --config.data.source='corpus/*.txt'

A row is the discriminator's width, a dash, and the generator's: 768-256 is ELECTRA-Base. In place
of a width there is `unigram`, which proposes tokens as often as they are in the text, and, from the
released code, `uniform`. The paper finds a quarter to half of the width best, in 500,000 steps of
base depth; its widths are read off a figure and may have been others. ROW,tiny divides all widths
by 6 and is a size for two cores.

Batch and rate are those of ELECTRA-Base; the paper names none for this figure.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config
from electra_jax.recipes import read_argument, shrink

GENERATORS = ("unigram", "uniform", "64", "128", "256", "512", "768")
ROWS = (
    "768-256",
    *(f"768-{other}" for other in GENERATORS if other != "256"),
    *(f"512-{other}" for other in GENERATORS[:-1]),
    *(f"256-{other}" for other in GENERATORS[:-2]),
)


def get_config(argument: str = "") -> ConfigDict:
    row, is_tiny = read_argument(argument, ROWS)
    discriminator, _, generator = row.partition("-")
    config = default_config()
    config.num_train_steps = 500_000
    config.batch_size = 256
    config.data.sequence_length = 512
    config.model.update(hidden_size=int(discriminator), embedding_size=int(discriminator))
    config.optimizer.learning_rate = 2e-4
    if generator.isdecimal():
        config.generator.width = int(generator) / int(discriminator)
    else:
        config.generator.kind = generator
    if is_tiny:
        shrink(config)
        width = int(discriminator) // 6
        config.model.update(hidden_size=width, embedding_size=width)
    return config
