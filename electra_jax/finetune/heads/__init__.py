"""Heads of fine-tuning by name. A new kind of output is one more file and one more line here."""

from electra_jax.finetune.heads.base import Head
from electra_jax.finetune.heads.sentence import Classification, Multilabel, Regression
from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.heads.token import Tagging

HEADS: dict[str, type[Head]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "tagging": Tagging,
    "qa": Spans,
}
