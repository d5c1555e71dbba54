"""What scores are where libraries give none, and for sets of labels; the rest is scikit-learn's."""

import numpy as np
import pytest

from electra_jax.finetune import scores

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=40)
SETS = (RNG.random((30, 4)) < [0.5, 0.3, 0.1, 0]).astype(np.float32)
ZEROS = np.zeros(5, np.int32)


@pytest.mark.parametrize("score", [scores.PEARSON, scores.SPEARMAN, scores.MATTHEWS])
def test_correlations_with_what_does_not_vary_are_zero(score):
    """Without a warning, and for a single value."""
    labels = VALUES if score is not scores.MATTHEWS else (VALUES > 0).astype(np.int32)
    constant = np.full_like(labels, 1)
    assert score.of(labels, constant) == score.of(constant, labels) == 0.0
    assert score.of(labels[:1], labels[1:2]) == 0.0
    assert score.of(labels, labels) == pytest.approx(1)


def test_correlations_of_tiny_numbers_are_numbers():
    assert scores.PEARSON.of(VALUES, 1e-200 * VALUES) == pytest.approx(1.0)


def test_nothing_to_divide_by_is_zero():
    assert scores.F1.of(ZEROS, ZEROS) == 0
    assert scores.MACRO_F1.of(ZEROS, 1 + ZEROS) == 0
    assert scores.MICRO_F1.of(SETS, np.zeros_like(SETS)) == 0
    assert scores.LABELWISE_F1.of(SETS, np.zeros_like(SETS)) == 0


def test_matthews_of_a_large_set_does_not_overflow():
    gold = np.tile(np.int32([0, 0, 1, 1]), 200_000)
    assert scores.MATTHEWS.of(gold, 1 - gold) == pytest.approx(-1)


@pytest.mark.parametrize("labels", [1, 4])
def test_sets_of_labels(labels):
    """Of a single label, too; a label that is never there counts as 0."""
    gold, predicted = SETS[:, :labels], np.ones_like(SETS[:, :labels])
    true = gold.sum(axis=0)
    f1 = 2 * true / (true + 30)
    assert scores.LABELWISE_F1.of(gold, predicted) == pytest.approx(f1.mean())
    micro = 2 * true.sum() / (true.sum() + 30 * labels)
    assert scores.MICRO_F1.of(gold, predicted) == pytest.approx(micro)
    assert scores.WHOLE_ROWS.of(gold, predicted) == pytest.approx(gold.all(axis=1).mean())
