"""Pre-training objectives: pure functions of parameters, batch and keys, one file each.

An objective is a frozen dataclass with

* `loss_terms`: the weight of every mean in the total loss, e.g. `{"mlm_loss": 1, "rtd_loss": 50}`,
  at the end of training; `loss_weights(step)`: at any step;
* `init(key)`, `structure()`: parameters, as values or as shapes;
* `mask(batch, key)`: what is drawn before the networks run, for the rows of `batch`;
* `totals(batch, masked)`: for each loss term the weight that its sum is divided by;
* `sums(params, batch, masked, key, dropout_key, evaluation, step)`: metrics as `[sum, weight]`
  pairs, loss terms among them. Sums over rows only: parts of a batch can be added up;
* `is_trained(name, step)`: whether a parameter moves; `switch_step` and `second_stage(params)`: at
  which step a second stage begins, and with which parameters.

What changes during training is a function of the step counter, inside the one compiled step: so
resuming is exact and nothing is compiled again. Evaluation has no step: it is always that of the
end.

The step divides by totals of the *global* batch, so no number depends on how the batch was split.
"""

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from electra_jax.config import model_config
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.masking import MaskingConfig
from electra_jax.objectives.adversarial import AdversarialTokenDetection
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.reconstruction import AllTokensMLM, ReplaceMLM
from electra_jax.schedules import Ramp, Schedule

Objective = MaskedLanguageModel  # the others are subclasses of it


def make_objective(
    config: ConfigDict, tokenizer: Tokenizer, token_counts: Int[np.ndarray, "V"] | None = None
) -> Objective:
    """The objective that `config` describes, for the vocabulary of `tokenizer`.

    Args:
      token_counts: how often each token is in the text; read where `config.generator.kind` is
        `unigram`.
    """
    masking = MaskingConfig(
        **config.masking,
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        unmaskable_ids=(tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id),
        starts_word=() if config.masking.unit == "token" else tuple(tokenizer.starts_word.tolist()),
    )
    model = model_config(config, tokenizer.vocab_size)
    loss, generator = config.loss, config.generator

    def schedule(start: float | None, end: float) -> Schedule:
        return end if start is None else Ramp(start, end, config.ramp_steps)

    generator_weight = schedule(loss.generator_weight_start, loss.generator_weight)
    if config.objective == "mlm":
        return MaskedLanguageModel(model, masking, generator_weight)
    common = {
        "model": model,
        "masking": masking,
        "generator_weight": generator_weight,
        "discriminator_weight": schedule(
            loss.discriminator_weight_start, loss.discriminator_weight
        ),
        "temperature": schedule(generator.temperature_start, generator.temperature),
        "disallow_correct": generator.disallow_correct,
    }
    if generator.kind == "uniform":
        common["frequencies"] = (1.0,) * tokenizer.vocab_size
    elif generator.kind == "unigram":
        common["frequencies"] = tuple(map(float, token_counts))
    elif generator.kind == "frozen":
        common["generator_steps"] = 0
    elif config.algorithm == "two_stage":
        common["generator_steps"] = generator.mle_steps
    if config.objective == "replace_mlm":
        return ReplaceMLM(**common)
    if config.objective == "all_tokens_mlm":
        return AllTokensMLM(**common)
    common["selected_only"] = config.objective == "electra_15"
    if config.algorithm == "adversarial":
        return AdversarialTokenDetection(**common, warmup_steps=generator.mle_steps)
    return ReplacedTokenDetection(**common)
