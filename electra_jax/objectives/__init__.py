"""Objectives, one file each: frozen dataclasses that keep the promise of `base.Objective`.

A new one is a class and a line here.
"""

from collections.abc import Mapping
from typing import Any

from electra_jax.objectives.adversarial import AdversarialTokenDetection
from electra_jax.objectives.base import Objective as Objective
from electra_jax.objectives.corruption import CorruptedText
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.masking import TokenCounts, Vocabulary
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.reconstruction import AllTokensMLM, ReplaceMLM
from electra_jax.settings import Config, not_allowed

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
    name, found = config.get("objective"), {}
    for table in (OBJECTIVES, ADVERSARIAL):
        found |= table[name].metrics if name in table else {}
    return found


def make_objective(
    config: Config, tokenizer: Vocabulary, token_counts: TokenCounts = None
) -> Objective:
    """The pre-training objective that `config` describes; `unigram` generators read the counts.

    Raises:
      UserError: settings do not go together; names them.
    """
    kind = OBJECTIVES[config.objective]
    has_policy = issubclass(kind, CorruptedText) and config.generator.kind == "learned"
    if has_policy and config.algorithm == "adversarial":
        if config.objective not in ADVERSARIAL:
            names = ", ".join(map(repr, ADVERSARIAL))
            raise not_allowed(config, "objective", names, "algorithm")
        kind = ADVERSARIAL[config.objective]
    return kind(**kind.arguments(config, tokenizer, token_counts))
