"""Which weights generator and discriminator share (the paper's section 3.2, and DeBERTaV3's).

    python -m electra_jax.main --config=configs/paper/sharing.py:ROW --workdir=runs/sharing_ROW \
        --config.data.source='corpus/*.txt'

| row | shared | GLUE |
| --- | --- | --- |
| embeddings | the embeddings | 84.3 |
| none | nothing | 83.6 |
| all | all but the heads | 84.4 |
| gdes | the embeddings, but the discriminator learns differences to them only | |

GLUE is the paper's, where the generator has the discriminator's size, as here, in 500,000 steps.
`gdes` is of DeBERTaV3 (He et al., ICLR 2023), which has no number of it for this setting. ROW,tiny
is the row at a size for two cores.

Batch and rate are those of ELECTRA-Base; the paper names none for this table.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config
from electra_jax.recipes import read_argument, shrink

ROWS = ("embeddings", "none", "all", "gdes")


def get_config(argument: str = "") -> ConfigDict:
    row, is_tiny = read_argument(argument, ROWS)
    config = default_config()
    config.num_train_steps = 500_000
    config.batch_size = 256
    config.data.sequence_length = 512
    config.model.update(hidden_size=768, embedding_size=768)
    config.optimizer.learning_rate = 2e-4
    config.generator.update(width=1.0, sharing=row)
    if is_tiny:
        shrink(config)
    return config
