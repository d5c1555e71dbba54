"""BERT-Small, the counterpart of ELECTRA-Small: the same encoder, masked language modeling.

    python -m electra_jax.main --config=configs/bert_small.py --workdir=runs/bert_small \
        --config.data.source='corpus/*.txt'

13,546,682 parameters, 63,674 of them in the MLM head.

As in the released code the masks are drawn anew in every step, 85 % of the predicted tokens are
shown as [MASK] and the others as they are; the paper describes 80 % [MASK], 10 % random, 10 % as
they are: `--config.masking.mask_token_share=0.8 --config.masking.random_token_share=0.1`.

The steps are from the paper's appendix through a third party's copy (its text says 1.5M); batch,
length and rates are taken to be ELECTRA-Small's.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.objective = "mlm"
    config.num_train_steps = 1_450_000
    config.generator.width = 1.0
    return config
