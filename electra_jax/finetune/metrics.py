"""Scores over all examples at once, as scikit-learn and SciPy define them.

Where there is nothing to divide by, the score is 0, as in scikit-learn: no examples, no positives,
a constant prediction. Correlations with something constant, which SciPy calls not a number, are 0,
too: what does not vary orders nothing. So every score is a finite number.

All but `mean_squared_error` are shares, between 0 or -1 and 1; papers give them times 100.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

Number = int | float | np.number


def accuracy(gold: Int[np.ndarray, "N"], predicted: Int[np.ndarray, "N"]) -> float:
    """The share of equal labels."""
    return _ratio((gold == predicted).sum(), gold.size)


def f1(gold: Bool[np.ndarray, "N"], predicted: Bool[np.ndarray, "N"]) -> float:
    """The harmonic mean of precision and recall of what is True."""
    return f1_of_counts((gold & predicted).sum(), predicted.sum(), gold.sum())


def f1_of_counts(correct: Number, predicted: Number, gold: Number) -> float:
    """The harmonic mean of precision (correct / predicted) and recall (correct / gold)."""
    return _ratio(2 * correct, predicted + gold)


def macro_f1(gold: Int[np.ndarray, "N"], predicted: Int[np.ndarray, "N"]) -> float:
    """The mean F1 over the labels that are in `gold` or `predicted`."""
    labels = np.union1d(gold, predicted)
    return _ratio(sum(f1(gold == label, predicted == label) for label in labels), labels.size)


def matthews(gold: Int[np.ndarray, "N"], predicted: Int[np.ndarray, "N"]) -> float:
    """Matthews' correlation coefficient, for two and for more labels (Gorodkin 2004)."""
    labels = np.union1d(gold, predicted)
    gold_counts = np.array([(gold == label).sum() for label in labels], np.float64)
    predicted_counts = np.array([(predicted == label).sum() for label in labels], np.float64)
    correct, total = (gold == predicted).sum(), gold.size
    covariance = correct * total - gold_counts @ predicted_counts
    gold_variance = total**2 - gold_counts @ gold_counts
    predicted_variance = total**2 - predicted_counts @ predicted_counts
    return _ratio(covariance, np.sqrt(gold_variance * predicted_variance))


def pearson(gold: Float[np.ndarray, "N"], predicted: Float[np.ndarray, "N"]) -> float:
    """Pearson's correlation coefficient."""
    if gold.size == 0 or np.ptp(gold) == 0 or np.ptp(predicted) == 0:
        return 0.0
    gold, predicted = (x - x.mean(dtype=np.float64) for x in (gold, predicted))
    # Divided first, so that tiny and huge numbers have squares, too.
    gold, predicted = (x / np.abs(x).max() for x in (gold, predicted))
    r = gold @ predicted / np.sqrt((gold @ gold) * (predicted @ predicted))
    return float(np.clip(r, -1.0, 1.0))


def spearman(gold: Float[np.ndarray, "N"], predicted: Float[np.ndarray, "N"]) -> float:
    """Spearman's rank correlation coefficient; equal values share the mean of their ranks."""
    from scipy import stats  # slow to import, and all commands import this module

    return pearson(stats.rankdata(gold), stats.rankdata(predicted))


def mean_squared_error(gold: Float[np.ndarray, "N"], predicted: Float[np.ndarray, "N"]) -> float:
    """The mean of the squared differences, in the square of the unit of the labels."""
    difference = gold.astype(np.float64) - predicted
    return _ratio(difference @ difference, gold.size)


def multilabel_f1(
    gold: Bool[np.ndarray, "N C"], predicted: Bool[np.ndarray, "N C"]
) -> dict[str, float]:
    """F1 of all decisions (`micro_f1`), and the mean F1 over the labels (`macro_f1`)."""
    per_label = [f1(gold[:, label], predicted[:, label]) for label in range(gold.shape[1])]
    return {
        "micro_f1": f1(gold.ravel(), predicted.ravel()),
        "macro_f1": _ratio(sum(per_label), len(per_label)),
    }


def _ratio(part: Number, whole: Number) -> float:
    return float(part / whole) if whole else 0.0
