"""A label, several labels or a number for a text or a pair of texts, from `[CLS]` (spec 6.2)."""

import dataclasses
import json
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from scipy import special

from electra_jax.finetune import scores
from electra_jax.finetune.heads import base
from electra_jax.finetune.heads.base import Hidden, HuggingFace, Outputs
from electra_jax.finetune.scores import Score
from electra_jax.modeling import layers as parts
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.layers import PRNGKey, dropout, split_key
from electra_jax.objectives.base import Batch, Sums, binary_cross_entropy, pair
from electra_jax.objectives.metrics import Metric

Label = str | tuple[str, ...] | float
Logits = Float[Array, "B C"]


class SentenceLayers(nnx.Module):
    """Dropout and a linear layer on the state of `[CLS]`.

    With `has_dense`, dropout, a dense layer and gelu come first, as Hugging Face has it.
    """

    def __init__(self, config: EncoderConfig, num_outputs: int, has_dense: bool, rngs: nnx.Rngs):
        width, dtype = config.hidden_size, config.dtype
        init = parts.truncated_normal(config.init_stddev)
        self.dense = parts.dense(width, width, init, dtype, rngs) if has_dense else None
        self.output = parts.dense(width, num_outputs, parts.glorot_uniform, dtype, rngs)
        self.rate = config.dropout

    def __call__(self, hidden: Hidden, key: PRNGKey | None) -> Logits:
        """Float32 outputs of each text."""
        first, second = split_key(key)
        x = dropout(hidden[:, 0], self.rate, first)
        if self.dense is not None:
            x = dropout(parts.gelu(self.dense(x)), self.rate, second)
        return self.output(x).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceHead(base.Head):
    """What all heads share that read a whole text, or a pair. Outputs: `logits` [B, C].

    Rows to train on have what `targets` returns as `label`. All else that a task needs to know of
    labels, it asks its head.
    """

    scores: ClassVar[Mapping[str, Score]]  # the main one first

    def layers(self, encoder: EncoderConfig, rngs: nnx.Rngs) -> SentenceLayers:
        """See `Head.layers`."""
        return SentenceLayers(encoder, len(self.labels) or 1, self.style == "huggingface", rngs)

    def sums(
        self, layers: SentenceLayers, hidden: Hidden, batch: Batch, key: PRNGKey | None
    ) -> Sums:
        """See `Head.sums`."""
        return self.loss_sums(layers(hidden, key), batch["label"], self.weights(batch))

    def outputs(self, layers: SentenceLayers, hidden: Hidden, batch: Batch) -> Outputs:
        """See `Head.outputs`."""
        return {"logits": layers(hidden, None)}

    @abstractmethod
    def loss_sums(self, logits: Logits, targets: Array, weights: Float[Array, " B"]) -> Sums:
        """As `sums`, from the logits."""

    @classmethod
    @abstractmethod
    def fitted(cls, labels: Iterable[Label], style: str) -> "SentenceHead":
        """The head for training data with these labels; ValueError if nothing can be learned."""

    @abstractmethod
    def parse(self, value: Any) -> Label:
        """The label in a cell of a table: one of `labels`, if there are any.

        Raises:
          ValueError: says what was found and what is allowed.
        """

    @abstractmethod
    def targets(self, labels: Sequence[Label]) -> np.ndarray:
        """Labels as the network sees them."""

    def comparable(self, labels: Sequence[Label]) -> np.ndarray:
        """Labels, or predictions, as `scores` take them."""
        return self.targets(labels)

    @abstractmethod
    def decode(self, logits: np.ndarray) -> list[tuple[Label, tuple[float, ...]]]:
        """The prediction for each row of float64 logits, and the probabilities of `labels`."""

    @abstractmethod
    def constants(self, labels: Sequence[Label]) -> list[Label]:
        """Answers of which one is the best that is the same for all examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(SentenceHead):
    """One of the labels. Targets are int32 [B]: ids."""

    metrics: ClassVar[Mapping[str, Metric]] = {"loss": base.LOSS, "accuracy": scores.ACCURACY}
    scores: ClassVar[Mapping[str, Score]] = {
        "accuracy": scores.ACCURACY,
        "macro_f1": scores.MACRO_F1,
        "matthews": scores.MATTHEWS,
    }
    huggingface: ClassVar[HuggingFace] = HuggingFace("classifier", "single_label_classification")

    def loss_sums(self, logits: Logits, targets: Array, weights: Float[Array, " B"]) -> Sums:
        """Cross-entropy and accuracy."""
        return base.label_sums(logits, targets, weights)

    @classmethod
    def fitted(cls, labels: Iterable[str], style: str) -> "Classification":
        """The labels that there are, sorted; two at least."""
        return cls(labels=_sorted(labels, 2), style=style)

    def parse(self, value: Any) -> str:
        """See `SentenceHead.parse`."""
        return _name(value, self.labels)

    def targets(self, labels: Sequence[str]) -> np.ndarray:
        """See `SentenceHead.targets`."""
        ids = {label: i for i, label in enumerate(self.labels)}
        return np.array([ids[label] for label in labels], np.int32)

    def decode(self, logits: np.ndarray) -> list[tuple[str, tuple[float, ...]]]:
        """The most probable label."""
        names = [self.labels[best] for best in logits.argmax(axis=-1)]
        return [*zip(names, map(tuple, special.softmax(logits, axis=-1).tolist()), strict=True)]

    def constants(self, labels: Sequence[str]) -> list[str]:
        """The most frequent label."""
        return [max(labels, key=Counter(labels).__getitem__)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multilabel(SentenceHead):
    """Any number of the labels. Targets are float32 [B, C], ones and zeros."""

    scores: ClassVar[Mapping[str, Score]] = {
        "micro_f1": scores.MICRO_F1,
        "macro_f1": scores.LABELWISE_F1,
        "accuracy": scores.WHOLE_ROWS,
    }
    huggingface: ClassVar[HuggingFace] = HuggingFace("classifier", "multi_label_classification")

    def loss_sums(self, logits: Logits, targets: Array, weights: Float[Array, " B"]) -> Sums:
        """The mean binary cross-entropy of all labels."""
        return {"loss": pair(binary_cross_entropy(logits, targets).mean(axis=-1), weights)}

    @classmethod
    def fitted(cls, labels: Iterable[tuple[str, ...]], style: str) -> "Multilabel":
        """The labels that there are, sorted; one at least."""
        return cls(labels=_sorted(chain(*labels), 1), style=style)

    def parse(self, value: Any) -> tuple[str, ...]:
        """Names from a list, or from text with commas between them; there may be none."""
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        if not isinstance(value, list):
            raise ValueError(f"{value!r}; allowed: a list, or text")
        return tuple(dict.fromkeys(_name(name, self.labels) for name in value))

    def targets(self, labels: Sequence[tuple[str, ...]]) -> np.ndarray:
        """See `SentenceHead.targets`."""
        ids = {label: i for i, label in enumerate(self.labels)}
        targets = np.zeros((len(labels), len(ids)), np.float32)
        for row, names in zip(targets, labels, strict=True):
            row[[ids[name] for name in names]] = 1
        return targets

    def decode(self, logits: np.ndarray) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
        """The labels whose probability is above one half."""
        chosen = (tuple(compress(self.labels, row)) for row in logits > 0)
        return [*zip(chosen, map(tuple, special.expit(logits).tolist()), strict=True)]

    def constants(self, labels: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """The most frequent labels: none, one, two, ..., all."""
        frequent = [name for name, _ in Counter(chain(*labels)).most_common()]
        return [tuple(frequent[:count]) for count in range(len(frequent) + 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression(SentenceHead):
    """One number. Targets are float32 [B], scaled; so are the outputs, `logits` [B]."""

    value_range: tuple[float, float] = (0.0, 1.0)  # the numbers that the network sees as 0 and 1

    from_data: ClassVar[tuple[str, ...]] = ("value_range",)
    metrics: ClassVar[Mapping[str, Metric]] = {
        "loss": dataclasses.replace(base.LOSS, unit="squared error")
    }
    scores: ClassVar[Mapping[str, Score]] = {
        "spearman": scores.SPEARMAN,
        "pearson": scores.PEARSON,
        "mse": scores.SQUARED_ERROR,
    }
    huggingface: ClassVar[HuggingFace] = HuggingFace("classifier", "regression")

    def outputs(self, layers: SentenceLayers, hidden: Hidden, batch: Batch) -> Outputs:
        """Scaled numbers."""
        return {"logits": layers(hidden, None)[:, 0]}

    def loss_sums(self, logits: Logits, targets: Array, weights: Float[Array, " B"]) -> Sums:
        """The squared error of scaled numbers."""
        return {"loss": pair((logits[:, 0] - targets) ** 2, weights)}

    @classmethod
    def fitted(cls, labels: Iterable[float], style: str) -> "Regression":
        """The range of the numbers that there are; one at least."""
        numbers = list(labels)
        if not numbers:
            raise ValueError("there are no rows")
        return cls(value_range=(min(numbers), max(numbers)), style=style)

    def parse(self, value: Any) -> float:
        """A finite number."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{value!r}; allowed: a number")
        return number

    def targets(self, labels: Sequence[float]) -> np.ndarray:
        """See `SentenceHead.targets`."""
        low, high = self.value_range
        return ((np.array(labels) - low) / ((high - low) or 1.0)).astype(np.float32)

    def comparable(self, labels: Sequence[float]) -> np.ndarray:
        """Numbers in the unit of the labels."""
        return np.array(labels, np.float64)

    def decode(self, logits: np.ndarray) -> list[tuple[float, tuple[float, ...]]]:
        """Numbers in the unit of the labels, without probabilities."""
        low, high = self.value_range
        return [(number, ()) for number in (low + logits * (high - low)).tolist()]

    def constants(self, labels: Sequence[float]) -> list[float]:
        """Any number: none has a correlation with the labels."""
        return [0.0]


def _sorted(labels: Iterable[str], at_least: int) -> tuple[str, ...]:
    names = sorted(set(labels))
    if len(names) < at_least:
        raise ValueError(f"the labels are {names}; at least two are needed to learn anything")
    return tuple(names)


def _name(value: Any, labels: Sequence[str]) -> str:
    """A label: text, or a number or truth value by its name in JSON."""
    name = json.dumps(value) if isinstance(value, bool | int) else value
    if not isinstance(name, str) or not name:
        raise ValueError(f"{value!r}; allowed: the name of a label")
    if labels and name not in labels:
        raise ValueError(f"{name!r}; allowed: {', '.join(labels)}")
    return name
