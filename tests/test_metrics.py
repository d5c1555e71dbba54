import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from electra_jax.errors import UserError
from electra_jax.objectives.adversarial import AdversarialTokenDetection
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.metrics import (
    SCORE_BINS,
    SCORE_RANGE,
    area_under_curve,
    score_histogram,
    sign_of,
    summarize,
)
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.training.step import eval_step


def pairwise_area(scores: np.ndarray, labels: np.ndarray) -> float:
    """The share of all (positive, negative) pairs in the right order, ties counting half."""
    positive, negative = scores[labels][:, None], scores[~labels][None, :]
    return ((positive > negative) + 0.5 * (positive == negative)).mean()


def histogram(scores, labels, real=None) -> np.ndarray:
    """Of one or several rows."""
    labels = jnp.atleast_2d(jnp.asarray(labels, bool))
    real = jnp.ones_like(labels) if real is None else jnp.atleast_2d(jnp.asarray(real, bool))
    return np.asarray(score_histogram(jnp.atleast_2d(jnp.float32(scores)), labels, real))


def area(scores, labels, real=None) -> float | None:
    return area_under_curve(histogram(scores, labels, real))


@pytest.mark.parametrize("share", [0.06, 0.5])
def test_area_equals_all_pairs_compared(share):
    rng = np.random.default_rng(0)
    labels = rng.random(500) < share
    # At the centers of bins, where binning loses nothing; few enough bins for many ties.
    bins = rng.integers(0, 40, 500) + 10 * labels + SCORE_BINS // 2
    scores = (bins + 0.5) / SCORE_BINS * 2 * SCORE_RANGE - SCORE_RANGE
    exact = pairwise_area(scores, labels)
    assert 0.5 < exact < 0.9
    assert area(scores, labels) == pytest.approx(exact, abs=1e-12)


def test_binning_of_any_scores_is_harmless():
    rng = np.random.default_rng(1)
    labels = rng.random(1000) < 0.1
    scores = rng.normal(size=1000) * 3 + 2 * labels
    assert area(scores, labels) == pytest.approx(pairwise_area(scores, labels), abs=1e-4)


def test_ties_count_half():
    assert area([1.0, 1.0], [0, 1]) == 0.5
    # Of the four pairs two are right, one is tied and one is wrong.
    assert area([0.0, 2.0, 1.0, 2.0], [0, 0, 1, 1]) == 2.5 / 4
    assert area([0.0, 1.0, 2.0, 3.0], [0, 0, 1, 1]) == 1.0
    assert area([0.0, 1.0, 2.0, 3.0], [1, 1, 0, 0]) == 0.0


def test_scores_beyond_the_range_are_kept_at_its_ends():
    assert area([-1e9, -20.0, 20.0, 1e9], [0, 0, 1, 1]) == 1.0
    assert area([20.0, 30.0], [0, 1]) == 0.5  # one bin


def test_padding_does_not_count():
    scores, labels = [0.5, -0.2, 0.1, 0.9], [1, 0, 0, 1]
    padding = [-9.0] * 12  # the original counted it as easy negatives (spec 0.13)
    real = [1] * 4 + [0] * 12
    assert area(scores + padding, labels + [0] * 12, real) == area(scores, labels) == 1.0
    wrong = area(scores[::-1], [0, 1, 0, 1])
    assert area(scores[::-1] + padding, [0, 1, 0, 1] + [0] * 12, real) == wrong < 1


def test_histograms_of_batches_add_up():
    rng = np.random.default_rng(2)
    scores = np.float32(rng.normal(size=(2, 300)))
    labels = rng.random((2, 300)) < 0.2
    first, second = (histogram(scores[i], labels[i]) for i in range(2))
    assert area_under_curve(first + second) == area(scores, labels)


@pytest.mark.parametrize("labels", [[0, 0], [1, 1]])
def test_one_empty_class_has_no_area(labels):
    assert area([0.1, 0.2], labels) is None
    assert area([0.1, 0.2, 0.3], [*labels, 1 - labels[0]], real=[1, 1, 0]) is None


def test_summary_divides_weighs_and_leaves_out_what_has_no_weight():
    empty = np.zeros((2, SCORE_BINS), np.float32)
    sums = {
        "mlm_loss": np.float32([30.0, 10.0]),
        "rtd_loss": np.float32([2.0, 20.0]),
        "rtd_precision": np.float32([0.0, 0.0]),
        "rtd_auc": empty,
    }
    values = summarize(sums, {"mlm_loss": 1.0, "rtd_loss": 50.0})
    assert list(values) == ["loss", "mlm_loss", "rtd_loss"]
    assert values == pytest.approx({"loss": 3 + 50 * 0.1, "mlm_loss": 3.0, "rtd_loss": 0.1})
    assert {type(value) for value in values.values()} == {float}


def test_the_best_checkpoint_can_be_that_of_a_metric_with_a_direction():
    assert sign_of(ReplacedTokenDetection.metrics, "eval/rtd_auc") == 1
    assert sign_of(ReplacedTokenDetection.metrics, "eval/rtd_loss") == -1
    uniform = tiny.objective(loss={"frequencies": (1.0,) * tiny.VOCAB})
    for metrics, name in (
        (ReplacedTokenDetection.metrics, "eval/rtd_precision"),
        (MaskedLanguageModel.metrics, "eval/rtd_auc"),
        (AdversarialTokenDetection.metrics, "eval/loss"),
        (uniform.measured, "eval/mlm_loss"),
        (uniform.measured, "rtd_auc"),
    ):
        with pytest.raises(
            UserError, match=rf"config.checkpoint.keep_best is '{name}'; allowed.*eval/"
        ):
            sign_of(metrics, name)


@pytest.mark.parametrize("kind", ["electra", "mlm", *tiny.VARIANTS])
def test_objectives_list_all_that_they_measure(kind):
    objective, batch = tiny.objective(kind), tiny.packed(8)
    sums = jax.eval_shape(
        functools.partial(eval_step, objective=objective),
        objective.structure(),
        batch,
        np.uint32(0),
    )
    assert {*sums} | {"loss"} == {*objective.measured}
    assert {*objective.loss_terms} <= {*objective.measured}
    documented = (Path(__file__).parents[1] / "docs" / "running.md").read_text()
    assert [name for name in objective.measured if f"`{name}`" not in documented] == []
