"""Metrics that add up: `[sum, weight]` pairs, and score histograms for AUC.

Sums over micro-batches, devices, hosts and steps are exact; the division comes last, on the host.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from electra_jax.errors import UserError

SCORE_BINS = 2**14
SCORE_RANGE = 16.0  # logits beyond +-16 share the outermost bins


@dataclasses.dataclass(frozen=True)
class Metric:
    """How a metric is shown, and which way is better.

    Objectives, and heads and tasks of fine-tuning, list theirs by name, without the prefix `train/`
    or `eval/`. Console, report, best checkpoint and warnings read these lists and nothing else.
    """

    label: str  # in full, as in "RTD AUC"; names its curve where a figure has several
    unit: str = ""  # such as "nats"
    better: Literal["higher", "lower", ""] = ""  # "": it cannot choose the best checkpoint
    console: str = ""  # what the console calls it; "": it is not shown there
    figure: str | None = ""  # title, which several may share; "": the label; None: not drawn
    tile: str = ""  # how the report writes its final value; "": it does not
    jumps: bool = False  # whether a sudden rise in training is worth a warning, as of a loss


loss_metric = functools.partial(Metric, unit="nats", better="lower", jumps=True)
score_metric = functools.partial(Metric, better="higher")


def sign_of(metrics: Mapping[str, Metric], name: str) -> int:
    """1 or -1: checkpoints are better the higher or the lower the metric `name` is.

    Raises:
      UserError: `name`, of `config.checkpoint.keep_best`, is not measured or has no direction.
    """
    signs = {
        f"eval/{key}": 1 if x.better == "higher" else -1 for key, x in metrics.items() if x.better
    }
    if name not in signs:
        raise UserError(
            f"config.checkpoint.keep_best is {name!r}; allowed here: {', '.join(signs)}"
        )
    return signs[name]


def score_histogram(
    logits: Float[Array, "B L"], is_positive: Bool[Array, "B L"], is_real: Bool[Array, "B L"]
) -> Float[Array, "2 bins"]:
    """Counts of negatives (row 0) and positives (row 1) by logit, padding left out."""
    position = (logits + SCORE_RANGE) / (2 * SCORE_RANGE) * SCORE_BINS
    bins = jnp.clip(position, 0, SCORE_BINS - 1).astype(jnp.int32)
    empty = jnp.zeros((2, SCORE_BINS))
    return empty.at[is_positive.astype(jnp.int32), bins].add(is_real.astype(jnp.float32))


def area_under_curve(histogram: Float[np.ndarray, "2 bins"]) -> float | None:
    """Probability that a positive scores above a negative, ties counting half.

    Exact but for scores that share one of the `SCORE_BINS` bins. None where a class is empty.
    """
    negatives, positives = np.asarray(histogram, np.float64)
    if not negatives.sum() or not positives.sum():
        return None
    below = np.cumsum(negatives) - negatives
    wins = (positives * (below + negatives / 2)).sum()
    return float(wins / (negatives.sum() * positives.sum()))


def summarize(sums: Mapping[str, np.ndarray], loss_terms: Mapping[str, float]) -> dict[str, float]:
    """Means of the pairs, AUC of the histograms, and the total `loss` in front.

    The total is the weighted sum of `loss_terms`, or else what `sums` say of it.
    A metric whose weight is zero (precision where nothing was called replaced) is left out.
    """
    values = {}
    for name, total in sums.items():
        if total.shape == (2,):
            if total[1]:
                values[name] = float(total[0] / total[1])
        elif (area := area_under_curve(total)) is not None:
            values[name] = area
    loss = sum(weight * values.get(term, 0.0) for term, weight in loss_terms.items())
    return {"loss": float(loss)} | values
