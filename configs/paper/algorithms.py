"""How generator and discriminator are trained (the paper's figure 3, right).

    python -m electra_jax.main --config=configs/paper/algorithms.py:ROW --workdir=runs/ROW \
        --config.data.source='corpus/*.txt'

* `joint`: both at once; the best of the three.
* `two_stage`: first the generator, then, from its weights, the discriminator. Better than BERT.
* `adversarial`: the generator is rewarded for misleading the discriminator. Better than BERT, worse
  than `joint`; its generator gets 58 % of the tokens right, one trained by likelihood 65 %.

ROW,tiny is the row at a size for two cores.

Base size in 500,000 steps, as in the paper's other comparisons of this kind. In `two_stage` the two
networks must have one size, so its generator is as wide as the discriminator; half of the steps are
either's, and warm-up and decay of the learning rate begin anew with the second stage. That the
paper does not say. The other two have a generator 256 wide, of which the numbers above are.
`adversarial` starts without a warm-up by likelihood, as nothing is said of one:
--config.generator.mle_steps=10000 adds it.
"""

from ml_collections import ConfigDict

from electra_jax.config import get_config as default_config
from electra_jax.recipes import read_argument, shrink

ROWS = ("joint", "two_stage", "adversarial")


def get_config(argument: str = "") -> ConfigDict:
    row, is_tiny = read_argument(argument, ROWS)
    config = default_config()
    config.algorithm = row
    config.num_train_steps = 500_000
    config.batch_size = 256
    config.data.sequence_length = 512
    config.model.update(hidden_size=768, embedding_size=768)
    config.optimizer.learning_rate = 2e-4
    if row == "two_stage":
        config.generator.update(width=1.0, sharing="none", mle_steps=250_000)
    else:
        config.generator.width = 0.375 if is_tiny else 1 / 3
    if is_tiny:
        shrink(config)
    return config
