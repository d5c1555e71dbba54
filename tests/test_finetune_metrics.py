"""Scores against those of scikit-learn 1.9 and SciPy 1.17, computed once and written down here."""

import numpy as np
import pytest
from scipy import stats

from electra_jax.finetune import metrics

RNG = np.random.default_rng(0)
GOLD = RNG.integers(0, 2, 50)
GUESS = np.where(RNG.random(50) < 0.7, GOLD, 1 - GOLD)
GOLD_3 = RNG.integers(0, 3, 60)
GUESS_3 = np.where(RNG.random(60) < 0.6, GOLD_3, RNG.integers(0, 3, 60))
ZEROS, ONES = np.zeros_like(GOLD), np.ones_like(GOLD)
VALUES = RNG.normal(size=40)
ESTIMATES = np.round(VALUES + RNG.normal(size=40), 0)  # with ties
VALUES = np.round(VALUES, 1)
GOLD_SETS = RNG.random((30, 4)) < [0.5, 0.3, 0.1, 0]
GUESSED_SETS = np.where(RNG.random((30, 4)) < 0.8, GOLD_SETS, ~GOLD_SETS)
NOTHING = np.array([], int)


@pytest.mark.parametrize(
    ("gold", "guess", "accuracy", "f1", "macro_f1", "matthews"),
    [
        (GOLD, GUESS, 0.74, 0.7636363636363637, 0.7373737373737375, 0.47534745630546277),
        (
            GOLD_3,
            GUESS_3,
            0.7833333333333333,
            0.7142857142857143,
            0.7719079413994668,
            0.6577865449627871,
        ),
        (GOLD, ONES, 0.54, 0.7012987012987013, 0.35064935064935066, 0.0),
        (ZEROS, GUESS, 0.44, 0.0, 0.3055555555555556, 0.0),
        (ONES, ONES, 1.0, 1.0, 1.0, 0.0),
        (ZEROS, ZEROS, 1.0, 0.0, 1.0, 0.0),
        (GOLD, 2 * GUESS, 0.32, 0.0, 0.23703703703703705, 0.23767372815273138),
        (NOTHING, NOTHING, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_labels(gold, guess, accuracy, f1, macro_f1, matthews):
    assert metrics.accuracy(gold, guess) == pytest.approx(accuracy, abs=1e-12)
    assert metrics.f1(gold == 1, guess == 1) == pytest.approx(f1, abs=1e-12)
    assert metrics.macro_f1(gold, guess) == pytest.approx(macro_f1, abs=1e-12)
    assert metrics.matthews(gold, guess) == pytest.approx(matthews, abs=1e-12)


def test_matthews_of_a_large_set_does_not_overflow():
    gold = np.tile(GOLD, 10_000).astype(np.int32)
    guess = np.tile(GUESS, 10_000).astype(np.int32)
    assert metrics.matthews(gold, guess) == pytest.approx(0.47534745630546277, abs=1e-12)


def test_numbers():
    assert metrics.pearson(VALUES, ESTIMATES) == pytest.approx(0.6143114058983355, abs=1e-12)
    assert metrics.spearman(VALUES, ESTIMATES) == pytest.approx(0.5106223726650055, abs=1e-12)
    assert metrics.mean_squared_error(VALUES, ESTIMATES) == pytest.approx(1.836, abs=1e-12)
    for seed in range(20):
        x, y = np.random.default_rng(seed).normal(size=(2, 30)).round(seed % 3)
        assert metrics.pearson(x, y) == pytest.approx(stats.pearsonr(x, y)[0], abs=1e-12)
        assert metrics.spearman(x, y) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)


@pytest.mark.parametrize("score", [metrics.pearson, metrics.spearman])
def test_correlations_with_what_does_not_vary_are_zero(score):
    constant = np.full(40, 0.1)
    assert score(VALUES, constant) == score(constant, VALUES) == 0.0
    assert score(np.array([]), np.array([])) == 0.0
    assert score(VALUES[:1], ESTIMATES[:1]) == 0.0
    assert score(VALUES, 1e-200 * VALUES) == pytest.approx(1.0)


def test_sets_of_labels():
    found = metrics.multilabel_f1(GOLD_SETS, GUESSED_SETS)
    assert found["micro_f1"] == pytest.approx(0.647887323943662, abs=1e-12)
    assert found["macro_f1"] == pytest.approx(0.4829545454545455, abs=1e-12)
    nothing = metrics.multilabel_f1(GOLD_SETS, np.zeros_like(GOLD_SETS))
    assert nothing == {"micro_f1": 0.0, "macro_f1": 0.0}
    assert metrics.multilabel_f1(GOLD_SETS[:0], GOLD_SETS[:0])["micro_f1"] == 0.0
