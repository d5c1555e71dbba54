"""Where the gain comes from: ELECTRA, BERT, and what lies between them (the paper's table 5).

    python -m electra_jax.main --config=configs/paper/objectives.py:ROW --workdir=runs/ROW \
        --config.data.source='corpus/*.txt'

| row | predicts | where | reads | GLUE |
| --- | --- | --- | --- | --- |
| electra | replaced or not | everywhere | samples | 85.0 |
| all_tokens_mlm | the token, or copies | everywhere | samples | 84.3 |
| replace_mlm | the token | at 15 % | samples | 82.4 |
| electra_15 | replaced or not | at 15 % | samples | 82.4 |
| bert | the token | at 15 % | masks | 82.2 |

GLUE is the paper's. ROW,tiny is the row at a size for two cores, on the docstrings of this machine.

Base size, as in the paper. It does not say for how many steps; these are those of its ELECTRA-Base
and BERT-Base, of about the same FLOPs. Nor does it say how the losses are weighted where the main
network predicts tokens; here both have weight 1. `bert` is what the paper describes, 80 % [MASK],
10 % random, 10 % as they are; the released code masks 85 % and has no random tokens.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config
from electra_jax.recipes import read_argument, shrink

ROWS = ("electra", "all_tokens_mlm", "replace_mlm", "electra_15", "bert")


def get_config(argument: str = "") -> ConfigDict:
    row, is_tiny = read_argument(argument, ROWS)
    config = default_config()
    config.objective = "mlm" if row == "bert" else row
    config.num_train_steps = 1_000_000 if row == "bert" else 766_000
    config.batch_size = 256
    config.data.sequence_length = 512
    config.model.update(hidden_size=768, embedding_size=768)
    config.optimizer.learning_rate = 2e-4
    if is_tiny:
        shrink(config)
    config.generator.width = 0.375 if is_tiny else 1 / 3
    if row in ("all_tokens_mlm", "replace_mlm"):
        config.loss.discriminator_weight = 1.0
    if row == "bert":
        config.generator.width = 1.0
        config.masking.update(mask_token_share=0.8, random_token_share=0.1)
    return config
