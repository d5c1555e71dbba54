"""Losses, gradients and metrics of the objectives (spec 3.4, 3.6, 3.7, 10)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import MASK

from electra_jax.checks import objective_for
from electra_jax.config import get_config
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.objectives import Objective, make_objective, masking, metrics
from electra_jax.objectives.base import Inputs, context
from electra_jax.objectives.electra import ReplacedTokenDetection, rtd_sums
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.mlm import mlm_sums

INIT, MASKS, SAMPLES = (jax.random.key(number) for number in range(3))


@functools.cache
def init(objective: Objective):
    return jax.jit(objective.init)(INIT)


@functools.partial(jax.jit, static_argnums=0)
def mask(objective: Objective, batch) -> Masked:
    return objective.mask(batch, MASKS)


@functools.partial(jax.jit, static_argnums=0, static_argnames="evaluation")
def sums(objective: Objective, params, batch, masked, evaluation=True):
    return objective.sums(params, Inputs(batch, masked, SAMPLES, is_evaluation=evaluation))


def loss(objective: Objective, params, batch, masked, terms=None):
    """The weighted mean losses, of all terms or of some."""
    pairs = objective.sums(params, Inputs(batch, masked, SAMPLES))
    weights = objective.loss_terms
    return sum(
        weights[term] * pairs[term][0] / jnp.maximum(pairs[term][1], 1.0)
        for term in terms or weights
    )


gradients = jax.jit(jax.grad(loss, argnums=1), static_argnums=(0, 4))


def summary(objective: Objective, pairs) -> dict[str, float]:
    return metrics.summarize(jax.device_get(pairs), objective.loss_terms)


# Losses, recomputed in NumPy


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def test_mlm_loss_by_hand():
    logits = np.zeros((2, 2, 128), np.float32)
    logits[0, 0, 5] = math.log(3)  # probability 3/130 of the label, which is the best
    logits[1, 0, 9] = math.log(3)  # probability 1/130, another token is better
    logits[1, 1, 9] = 50.0  # not in use
    masked = Masked(
        masked_ids=jnp.zeros((2, 6), jnp.int32),
        masked_positions=jnp.zeros((2, 2), jnp.int32),
        labels=jnp.array([[5, 7], [8, 0]]),
        weights=jnp.array([[1.0, 0.0], [1.0, 0.0]]),
    )
    pairs = mlm_sums(jnp.array(logits), masked)
    np.testing.assert_allclose(pairs["mlm_loss"], [math.log(130 / 3) + math.log(130), 2], rtol=1e-6)
    np.testing.assert_array_equal(pairs["mlm_accuracy"], [1, 2])


def test_rtd_loss_and_accuracies_by_hand():
    logits = jnp.log(
        jnp.array([[1.0, 3.0, 1 / 3, 3.0, 9.0, 9.0], [1 / 9, 3.0, 1 / 3, 9.0, 9.0, 9.0]])
    )
    is_replaced = jnp.array([[0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], bool)
    is_real = jnp.array([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]], bool)
    pairs = rtd_sums(logits, is_replaced, is_real)
    likelihoods = [1 / 2, 3 / 4, 1 / 4, 1 / 4, 9 / 10]  # of the right answer, token by token
    np.testing.assert_allclose(pairs["rtd_loss"], [-np.log(likelihoods).sum(), 5], rtol=1e-6)
    np.testing.assert_array_equal(pairs["rtd_accuracy"], [3, 5])
    np.testing.assert_array_equal(pairs["rtd_precision"], [1, 2])
    np.testing.assert_array_equal(pairs["rtd_recall"], [1, 2])
    np.testing.assert_array_equal(pairs["replaced_fraction"], [2, 5])


def test_metrics_equal_a_recomputation():
    """All that follows from the networks' logits, in NumPy."""
    objective = tiny.objective(mode="faithful", init_stddev=0.2)
    params, batch = init(objective), tiny.packed(16)
    masked = mask(objective, batch)

    @jax.jit
    def networks(params, batch, masked):
        model = objective.bind(params)
        logits = model.generate(masked.masked_ids, context(batch), masked.masked_positions, None)
        keys = masking.row_keys(SAMPLES, batch["row"])
        samples = masking.sample_replacements(logits, masked.labels, keys)
        corrupted = masking.corrupt("faithful", batch["input_ids"], masked, samples)
        return logits, samples, corrupted, model.discriminate(corrupted, context(batch), None)

    logits, samples, corrupted, answers = map(np.asarray, networks(params, batch, masked))
    used = np.asarray(masked.weights) > 0
    labels = np.asarray(masked.labels)[used]
    log_probabilities = log_softmax(logits)[used]
    real = batch["segment_ids"] > 0
    replaced = (corrupted != batch["input_ids"])[real]
    scores = answers[real]
    pairs_of_tokens = scores[replaced][:, None] - scores[~replaced]
    expected = {
        "mlm_loss": -log_probabilities[np.arange(len(labels)), labels].mean(),
        "mlm_accuracy": (log_probabilities.argmax(axis=-1) == labels).mean(),
        "sampled_mlm_accuracy": (samples[used] == labels).mean(),
        "rtd_loss": -np.log(sigmoid(np.where(replaced, scores, -scores))).mean(),
        "rtd_accuracy": ((scores > 0) == replaced).mean(),
        "rtd_precision": replaced[scores > 0].mean(),
        "rtd_recall": (scores > 0)[replaced].mean(),
        "replaced_fraction": replaced.mean(),
        "rtd_auc": ((pairs_of_tokens > 0) + (pairs_of_tokens == 0) / 2).mean(),
    }
    expected["loss"] = expected["mlm_loss"] + 50 * expected["rtd_loss"]
    values = summary(objective, sums(objective, params, batch, masked))
    assert values.keys() == expected.keys()
    for name, value in values.items():
        tolerance = 1e-3 if name == "rtd_auc" else 1e-5  # bins of scores
        assert value == pytest.approx(expected[name], rel=tolerance), name

    # What counts as replaced: never a special token, padding, or a sample that hit the original.
    special = np.isin(batch["input_ids"], [tiny.CLS, tiny.SEP, tiny.PAD])
    assert not ((corrupted != batch["input_ids"]) & special).any()
    assert replaced.sum() <= used.sum()


def test_samples_equal_to_the_original_are_not_replaced():
    """A generator that always proposes token 7, on text of nothing else."""
    objective = tiny.objective(init_stddev=0.2)
    params = init(objective)
    params["generator"]["head"]["bias"] = params["generator"]["head"]["bias"].at[7].set(100.0)
    batch = tiny.batch([[[7] * 20], [[7] * 30], [], []])
    pairs = sums(objective, params, batch, mask(objective, batch))
    np.testing.assert_array_equal(pairs["sampled_mlm_accuracy"], [7, 7])
    np.testing.assert_array_equal(pairs["replaced_fraction"], [0, 54])


def test_training_computes_no_histogram():
    objective = tiny.objective(init_stddev=0.2)
    params, batch = init(objective), tiny.packed(4)
    masked = mask(objective, batch)

    def program(evaluation: bool) -> str:
        return sums.lower(objective, params, batch, masked, evaluation=evaluation).as_text()

    assert "rtd_auc" not in sums(objective, params, batch, masked, evaluation=False)
    assert str(metrics.SCORE_BINS) in program(evaluation=True)
    assert str(metrics.SCORE_BINS) not in program(evaluation=False)


def test_objective_knows_which_tokens_start_words():
    config, settings = get_config(), {"strip_accents": True, "max_word_chars": 9}
    tokens = [*config.data.special_tokens, "word", "##s"]
    words = WordPiece(tokens, lower_case=True, **settings)
    assert make_objective(config, words).masking.starts_word == ()
    config.masking.unit = "word"
    assert make_objective(config, words).masking.starts_word == (True,) * 6 + (False,)


# Untrained losses


def untrained(objective: Objective, batch) -> dict[str, float]:
    """Mean metrics of eight initializations.

    One draw of the last layer shifts all logits together, by up to 0.2, and `rtd_loss` by 0.1.
    """
    masked, start = mask(objective, batch), jax.jit(objective.init)
    values = [
        summary(objective, sums(objective, start(key), batch, masked))
        for key in jax.random.split(INIT, 8)
    ]
    names = ["loss", *objective.loss_terms]
    return {name: np.mean([each[name] for each in values]) for name in names}


def test_untrained_losses():
    losses = untrained(tiny.objective(vocab_size=2000), tiny.packed(4, vocab_size=2000))
    assert losses["mlm_loss"] == pytest.approx(math.log(2000), abs=0.05)
    assert 0.6 < losses["rtd_loss"] < 0.75


@pytest.mark.slow
def test_untrained_losses_of_electra_small():
    config, vocab_size = get_config(), 30522
    config.model.dtype = "float32"
    objective = ReplacedTokenDetection(
        objective_for(config, vocab_size).model, tiny.masking_config(vocab_size=vocab_size)
    )
    losses = untrained(objective, tiny.packed(4, length=128, vocab_size=vocab_size))
    assert losses["mlm_loss"] == pytest.approx(10.33, abs=0.05)
    assert 0.6 < losses["rtd_loss"] < 0.75
    assert 43 < losses["loss"] < 47


# Gradients


def test_padding_changes_nothing():
    objective = tiny.objective(
        init_stddev=0.2, max_positions=128, loss={"discriminator_weight": 1.0}
    )
    params, batch = init(objective), tiny.packed(4)
    masked = mask(objective, batch)
    values = sums(objective, params, batch, masked)
    slopes = tiny.flat(gradients(objective, params, batch, masked, None))
    for columns in (16, 64):
        wide = tiny.widen(batch, columns)
        wide_ids = np.pad(masked.masked_ids, ((0, 0), (0, columns)))
        wide_masked = dataclasses.replace(masked, masked_ids=wide_ids)
        wide_values = sums(objective, params, wide, wide_masked)
        for name, value in values.items():
            np.testing.assert_allclose(wide_values[name], value, rtol=1e-6, err_msg=name)
    wide_slopes = tiny.flat(gradients(objective, params, wide, wide_masked, None))
    for name, slope in slopes.items():
        np.testing.assert_allclose(wide_slopes[name], slope, rtol=0, atol=1e-6, err_msg=name)


# Batches with little or nothing to predict

TEXT = list(range(MASK + 1, MASK + 31))
BATCHES = {
    "only special tokens": [[[]], [[], [], []], [[]], [[]]],
    "only padding": [[], [], [], []],
    "fewer maskable tokens than the budget": [[[]] * 14 + [[9]], [[9]], [[]], [TEXT]],
    "mixed lengths": [[[9]], [TEXT[:5], TEXT[:15]], [TEXT], [TEXT[:20]]],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("mode", "unit", "dtype"),
    [
        ("clean", "token", "float32"),
        ("clean", "span", "float32"),
        ("faithful", "token", "bfloat16"),
    ],
)
def test_losses_and_gradients_are_finite(mode, unit, dtype, rows):
    objective = tiny.objective(mode=mode, unit=unit, dtype=jnp.dtype(dtype))
    params, batch = init(objective), tiny.batch(rows)
    masked = mask(objective, batch)
    for name, value in sums(objective, params, batch, masked).items():
        assert value.dtype == jnp.float32, name
        assert np.isfinite(value).all(), name
    for name, value in tiny.flat(gradients(objective, params, batch, masked, None)).items():
        assert value.dtype == np.float32, name
        assert np.isfinite(value).all(), name
