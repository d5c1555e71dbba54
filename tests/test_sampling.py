"""Samples and corrupted rows (spec 3.5): distributions, and what is written where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats
from tiny import CLS, PAD, SEP

from electra_jax.modeling.heads import PADDED_LOGIT
from electra_jax.objectives import masking
from electra_jax.objectives.base import context
from electra_jax.objectives.masking import Masked

pytestmark = pytest.mark.process

KEY = jax.random.key(0)


def padded(logits: np.ndarray) -> np.ndarray:
    width = -(-len(logits) // masking.VOCAB_BLOCK) * masking.VOCAB_BLOCK
    return np.pad(logits, (0, width - len(logits)), constant_values=PADDED_LOGIT)


def draw(logits: np.ndarray, label: int, count: int, key=KEY, **options) -> np.ndarray:
    """Independent samples from one distribution."""
    shape = (256, 8)
    many = jnp.broadcast_to(jnp.float32(logits), (*shape, len(logits)))

    @jax.jit
    def repeat(keys):
        return jax.lax.map(
            lambda key: masking.sample_replacements(
                many, jnp.full(shape, label), masking.row_keys(key, jnp.arange(256)), **options
            ),
            keys,
        )

    return np.ravel(repeat(jax.random.split(key, -(-count // (256 * 8)))))


@pytest.mark.parametrize(
    ("temperature", "disallow_correct"), [(0.5, False), (1.0, False), (1.0, True), (2.0, True)]
)
def test_samples_follow_the_softmax(temperature, disallow_correct):
    vocab_size, label = 300, 130
    logits = np.random.default_rng(1).normal(0, 0.5, vocab_size)
    logits += np.repeat([0.0, 0.7, -0.4], 128)[:vocab_size]  # blocks of unequal weight
    options = {"temperature": temperature, "disallow_correct": disallow_correct}
    samples = draw(padded(logits), label, 200_000, **options)
    counts = np.bincount(samples, minlength=vocab_size)
    assert len(counts) == vocab_size  # padded columns are never drawn

    allowed = np.ones(vocab_size, bool)
    if disallow_correct:
        allowed[label] = False
        assert counts[label] == 0
    odds = np.exp(logits[allowed] / temperature)
    expected = odds / odds.sum() * samples.size
    assert expected.min() > 5
    assert stats.chisquare(counts[allowed], expected).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_million_samples_of_a_bfloat16_network_follow_its_float32_softmax(temperature):
    objective = tiny.objective(vocab_size=200, dtype=jnp.dtype("bfloat16"), init_stddev=0.3)
    batch = jax.device_put(tiny.batch([[[*range(5, 25)]]]))

    @jax.jit
    def first_logits(key):
        model = objective.bind(objective.init(key))
        return model.generate(batch["input_ids"], context(batch), jnp.array([[3]]), None)[0, 0]

    logits = np.asarray(first_logits(KEY))
    assert logits.dtype == np.float32
    samples = draw(logits, 0, 1_000_000, jax.random.key(1), temperature=temperature)
    counts = np.bincount(samples, minlength=200)
    odds = np.exp(logits[:200].astype(np.float64) / temperature)
    expected = odds / odds.sum() * counts.sum()
    assert expected.min() > 5
    assert expected.max() > 2 * expected.mean()
    assert len(counts) == 200
    assert stats.chisquare(counts, expected).pvalue > 0.01


def test_label_can_be_disallowed_where_its_block_holds_nothing_else():
    logits = np.zeros(129)
    logits[128] = 20.0  # by far the best, alone in the second block
    assert (draw(padded(logits), 128, 1000) == 128).all()
    samples = draw(padded(logits), 128, 1000, disallow_correct=True)
    assert samples.max() < 128


# Corruption


def corrupt(mode, input_ids, positions, weights, samples) -> list[int]:
    masked = Masked(
        masked_ids=jnp.array([input_ids]),
        masked_positions=jnp.array([positions]),
        labels=jnp.zeros((1, len(positions)), jnp.int32),
        weights=jnp.array([weights], jnp.float32),
    )
    return masking.corrupt(mode, masked.masked_ids, masked, jnp.array([samples]))[0].tolist()


@pytest.mark.parametrize("mode", ["clean", "faithful"])
def test_only_slots_in_use_are_written(mode):
    ids = [CLS, 10, 11, 12, SEP, PAD]
    written = corrupt(mode, ids, [3, 1, 0, 2], [1, 1, 0, 0], [90, 91, 92, 93])
    assert written == [CLS, 91, 11, 90, SEP, PAD]


def test_faithful_mode_averages_samples_of_one_position():
    ids = [CLS, 10, 11, SEP]
    assert corrupt("faithful", ids, [2, 2, 1], [1, 1, 1], [1000, 2001, 7]) == [CLS, 7, 1500, SEP]


def test_faithful_mode_never_writes_position_0():
    assert corrupt("faithful", [10, 11], [0, 1], [1, 1], [90, 91]) == [10, 91]
