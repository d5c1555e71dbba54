"""Objectives, one file each: frozen dataclasses that keep the promise of `base.Objective`.

A new one is a class and a line here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from electra_jax.errors import UserError
from electra_jax.objectives.adversarial import AdversarialTokenDetection
from electra_jax.objectives.base import Objective as Objective
from electra_jax.objectives.corruption import CorruptedText
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.masking import Vocabulary
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.reconstruction import AllTokensMLM, ReplaceMLM
from electra_jax.settings import Config

OBJECTIVES: dict[str, type] = {
    "electra": ReplacedTokenDetection,
    "electra_15": ReplacedTokenDetection,
    "replace_mlm": ReplaceMLM,
    "all_tokens_mlm": AllTokensMLM,
    "mlm": MaskedLanguageModel,
}
ADVERSARIAL: dict[str, type] = {  # where config.algorithm = "adversarial"
    "electra": AdversarialTokenDetection,
    "electra_15": AdversarialTokenDetection,
}


def metrics_of(config: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics of runs with this configuration; none where its objective is not known."""
    tables = (OBJECTIVES, ADVERSARIAL)
    kinds = [table[name] for table in tables for name in table if name == config.get("objective")]
    return {name: metric for kind in kinds for name, metric in kind.metrics.items()}


def make_objective(
    config: Config, tokenizer: Vocabulary, token_counts: Int[np.ndarray, "V"] | None = None
) -> Objective:
    """The pre-training objective that `config` describes, for the vocabulary of `tokenizer`.

    Args:
      token_counts: how often each token is in the text; read where `config.generator.kind` is
        `unigram`.

    Raises:
      UserError: settings do not go together; names them.
    """
    kind, name = OBJECTIVES[config.objective], config.objective
    has_policy = issubclass(kind, CorruptedText) and config.generator.kind == "learned"
    if has_policy and config.algorithm == "adversarial":
        if name not in ADVERSARIAL:
            raise UserError(
                f"config.objective is {name!r}, but config.algorithm = 'adversarial' "
                "rewards the generator for what a discriminator says; allowed: "
                f"{', '.join(map(repr, ADVERSARIAL))}"
            )
        kind = ADVERSARIAL[name]
    return kind.from_config(config, tokenizer, token_counts)
