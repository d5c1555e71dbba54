"""BERT-Large, the counterpart of ELECTRA-Large: the same encoder, masked language modeling.

    python -m electra_jax.main --config=configs/bert_large.py --workdir=runs/bert_large \
        --config.data.source='corpus/*.txt'

335,174,458 parameters, 1,082,170 of them in the MLM head.

As in the released code the masks are drawn anew in every step, 85 % of the predicted tokens are
shown as [MASK] and the others as they are; the paper describes 80 % [MASK], 10 % random, 10 % as
they are: `--config.masking.mask_token_share=0.8 --config.masking.random_token_share=0.1`.

The steps are from the paper's appendix through a third party's copy; batch, length and rates are
taken to be ELECTRA-Large's, but 15 % of the tokens are predicted, as in BERT. Where the batch does
not fit the devices' memory, `--config.num_microbatches` splits it.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.objective = "mlm"
    config.num_train_steps = 464_000
    config.batch_size = 2048
    config.data.sequence_length = 512
    config.model.update(hidden_size=1024, num_layers=24, embedding_size=1024)
    config.optimizer.learning_rate = 2e-4
    config.generator.width = 1.0
    return config
