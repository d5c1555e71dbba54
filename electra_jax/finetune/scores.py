"""Scores over all examples at once, as scikit-learn and SciPy define them.

Where there is nothing to divide by, a score is 0, as in scikit-learn: no positives, a constant
prediction. Correlations with something constant, which SciPy calls not a number, are 0, too: what
does not vary orders nothing. So every score is a finite number.

All but the squared error are shares, between 0 or -1 and 1; papers give them times 100.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType

import numpy as np

from electra_jax.objectives.metrics import Metric


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(Metric):
    """A metric that `of` computes from labels and predictions, see `SentenceHead.comparable`.

    Tasks that have rules of their own leave `of` out.
    """

    of: Callable[[np.ndarray, np.ndarray], float] | None = None
    better: str = "higher"
    figure: str | None = "Scores"
    tile: str = "{:.4g}"


def sklearn() -> ModuleType:
    """The metrics of scikit-learn, imported when they are needed: that takes a second."""
    from sklearn import metrics

    return metrics


def stats() -> ModuleType:
    """The statistics of SciPy, likewise."""
    from scipy import stats

    return stats


def f1(gold: np.ndarray, predicted: np.ndarray) -> float:
    """F1 of the label 1, the second of two."""
    return sklearn().f1_score(gold, predicted, zero_division=0.0)


def vary(gold: np.ndarray, predicted: np.ndarray) -> bool:
    """Whether a correlation is a number."""
    return bool(np.ptp(gold) > 0 and np.ptp(predicted) > 0)


ACCURACY = Score("accuracy", console="acc", of=lambda x, y: sklearn().accuracy_score(x, y))
F1 = Score("F1", console="f1", of=f1)
MACRO_F1 = Score(  # over the labels in one of the two
    "macro F1", of=lambda x, y: sklearn().f1_score(x, y, average="macro", zero_division=0.0)
)
MATTHEWS = Score(
    "Matthews' correlation",
    console="matthews",
    of=lambda x, y: sklearn().matthews_corrcoef(x, y) if vary(x, y) else 0.0,
)
# Of rows of zeros and ones [N, C]; scikit-learn takes those with C = 1 for something else.
MICRO_F1 = Score("micro F1", of=lambda x, y: f1(x.ravel(), y.ravel()))
LABELWISE_F1 = Score(
    "macro F1", of=lambda x, y: np.mean([f1(*pair) for pair in zip(x.T, y.T, strict=True)])
)
WHOLE_ROWS = Score("accuracy", console="acc", of=lambda x, y: (x == y).all(axis=1).mean())
PEARSON = Score(
    "Pearson's correlation", of=lambda x, y: stats().pearsonr(x, y).statistic if vary(x, y) else 0.0
)
SPEARMAN = Score(
    "Spearman's correlation",
    console="spearman",
    of=lambda x, y: stats().spearmanr(x, y).statistic if vary(x, y) else 0.0,
)
SQUARED_ERROR = Score(
    "squared error",
    better="lower",
    figure=None,
    tile="",
    of=lambda x, y: sklearn().mean_squared_error(x, y),
)
