"""Pre-training objectives: pure functions of parameters, batch and keys, one file each.

An objective is a frozen dataclass with

* `loss_terms`: the weight of every mean in the total loss, e.g. `{"mlm_loss": 1, "rtd_loss": 50}`;
* `init(key)`, `structure()`: parameters, as values or as shapes;
* `mask(batch, key)`: what is drawn before the networks run, for the rows of `batch`;
* `totals(batch, masked)`: for each loss term the weight that its sum is divided by;
* `sums(params, batch, masked, key, dropout_key, evaluation)`: metrics as `[sum, weight]` pairs,
  loss terms among them. Sums over rows only: parts of a batch can be added up.

The step divides by totals of the *global* batch, so no number depends on how the batch was split.
"""

from ml_collections import ConfigDict

from electra_jax.config import model_config
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.masking import MaskingConfig
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.mlm import MaskedLanguageModel

Objective = ReplacedTokenDetection | MaskedLanguageModel


def make_objective(config: ConfigDict, tokenizer: Tokenizer) -> Objective:
    """The objective that `config` describes, for the vocabulary of `tokenizer`."""
    masking = MaskingConfig(
        **config.masking,
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        unmaskable_ids=(tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id),
        starts_word=() if config.masking.unit == "token" else tuple(tokenizer.starts_word.tolist()),
    )
    model = model_config(config, tokenizer.vocab_size)
    if config.objective == "mlm":
        return MaskedLanguageModel(model, masking, config.loss.generator_weight)
    return ReplacedTokenDetection(
        model,
        masking,
        config.loss.generator_weight,
        config.loss.discriminator_weight,
        config.generator.temperature,
        config.generator.disallow_correct,
    )
