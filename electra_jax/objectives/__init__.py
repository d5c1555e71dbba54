"""Objectives, one file each: frozen dataclasses that keep the interface of `base.py`."""

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from electra_jax.config import model_config
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.objectives.adversarial import AdversarialTokenDetection
from electra_jax.objectives.base import Objective as Objective
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.masking import MaskingConfig
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.reconstruction import AllTokensMLM, ReplaceMLM
from electra_jax.objectives.schedules import Ramp, Schedule


def make_objective(
    config: ConfigDict, tokenizer: Tokenizer, token_counts: Int[np.ndarray, "V"] | None = None
) -> MaskedLanguageModel:
    """The pre-training objective that `config` describes, for the vocabulary of `tokenizer`.

    All are masked language models, if only in their generator.

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
