"""Adversarial ELECTRA: the policy's gradient by hand, recomputed, and against the exact one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_objectives import SAMPLES, init, mask, sums
from test_variants import FOUR, gradients, reached, starting_with

from electra_jax.modeling.heads import PADDED_LOGIT
from electra_jax.objectives import masking
from electra_jax.objectives.adversarial import policy_sums
from electra_jax.objectives.base import context


def test_policy_gradient_by_hand():
    logits = jnp.full((2, 6, 128), PADDED_LOGIT).at[:, :, :5].set(0.0)
    logits = logits.at[0, 1, 4].set(math.log(6))
    samples = jnp.array([[4, 4, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    rewards = jnp.array([[1.0, 2, 9, 9, 9, 9], [0.5, 9, 9, 9, 9, 9]])
    baseline = jnp.log(jnp.array([[1.0, 3, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]))
    weights = jnp.array([[1.0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    pairs = policy_sums(logits, samples, rewards, baseline, weights)
    advantages = np.array([1 - math.log(2), 2 - math.log(4 / 3), 0.5 - math.log(2)])
    log_likelihoods = np.log([1 / 5, 6 / 10, 1 / 5])
    np.testing.assert_allclose(
        pairs["policy_loss"], [-(advantages * log_likelihoods).sum(), 3], rtol=1e-6
    )
    right = np.exp([-1, -2, -0.5])  # probability of the right answer
    said = np.array([1 / 2, 3 / 4, 1 / 2])
    cross_entropy = -right * np.log(said) - (1 - right) * np.log(1 - said)
    np.testing.assert_allclose(pairs["baseline_loss"], [cross_entropy.sum(), 3], rtol=1e-6)
    np.testing.assert_allclose(pairs["reward"], [3.5, 3])


def test_policy_loss_equals_a_recomputation():
    """Its log-probability is that of the distribution which is sampled from."""
    objective = dataclasses.replace(
        tiny.objective("adversarial", init_stddev=0.2), temperature=2.0, disallow_correct=True
    )
    params, batch = init(objective), FOUR
    masked = mask(objective, batch)

    @jax.jit
    def parts(params):
        model = objective.bind(params)
        states = model.generator_states(
            masked.masked_ids, context(batch), masked.masked_positions, None
        )
        logits = model.propose(states)
        samples, corrupted = objective.corrupt(logits, batch, masked, SAMPLES, None)
        found = model.discriminate(corrupted, context(batch), None), corrupted != batch["input_ids"]
        found = (jnp.take_along_axis(x, masked.masked_positions, axis=1) for x in found)
        return logits, samples, *found, model.generator.baseline(states)[..., 0]

    used = np.asarray(masked.weights) > 0
    logits, samples, answers, is_replaced, baseline = (
        np.asarray(x)[used].astype(np.float64) for x in parts(params)
    )
    rows, labels = np.arange(len(logits)), np.asarray(masked.labels)[used]
    logits /= 2.0
    logits[rows, labels] = -np.inf
    log_probability = logits[rows, samples.astype(int)] - np.log(np.exp(logits).sum(axis=-1))
    reward = np.log1p(np.exp(np.where(is_replaced, -answers, answers)))
    expected = -((reward - np.log1p(np.exp(-baseline))) * log_probability).sum()
    pairs = sums(objective, params, batch, masked)
    np.testing.assert_allclose(pairs["policy_loss"], [expected, len(rows)], rtol=1e-5)


def test_adversarial_loss_reaches_the_generator_through_the_policy_alone():
    objective = tiny.objective("adversarial", sharing="none", init_stddev=0.2)
    baseline = starting_with(objective, "generator/baseline/")
    generator = starting_with(objective, "generator/") - baseline
    discriminator = starting_with(objective, "discriminator/", "embeddings/")
    assert reached(objective, "rtd_loss") == discriminator
    assert reached(objective, "policy_loss") == generator
    assert reached(objective, "mlm_loss") == generator
    assert reached(objective, "baseline_loss") == baseline
    policy, likelihood = (gradients(objective)[term] for term in ("policy_loss", "mlm_loss"))
    assert all((policy[name] != likelihood[name]).any() for name in generator)


def test_warm_up_is_by_likelihood_and_then_by_reward():
    objective = tiny.objective("adversarial")
    weights = [
        {name: float(x) for name, x in objective.loss_weights(jnp.int32(step)).items()}
        for step in (1, 2)
    ]
    assert weights == [
        {"mlm_loss": 1, "policy_loss": 0, "baseline_loss": 1, "rtd_loss": 50},
        {"mlm_loss": 0, "policy_loss": 1, "baseline_loss": 1, "rtd_loss": 50},
    ]
    assert objective.loss_terms == {"policy_loss": 1, "baseline_loss": 1, "rtd_loss": 50}


@pytest.mark.parametrize("disallow_correct", [False, True])
def test_policy_gradient_agrees_with_the_exact_one(disallow_correct):
    """Of the mean reward over a vocabulary of 5 words, by enumeration; within 4 standard errors."""
    temperature, num_draws = 2.0, 40_000
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.normal(size=5), jnp.float32)
    table = jnp.asarray(rng.uniform(0.1, 3.0, size=5), jnp.float32)  # reward of each
    labels = jnp.full((num_draws, 1), 3)

    def rows_of(words):
        logits = jnp.pad(words, (0, 123), constant_values=PADDED_LOGIT)
        return jnp.broadcast_to(logits, (num_draws, 1, 128))

    keys = masking.row_keys(SAMPLES, jnp.arange(num_draws))
    samples = jax.jit(
        lambda words: masking.sample_replacements(
            rows_of(words), labels, keys, temperature, disallow_correct
        )
    )(words)
    baseline, weight = jnp.full((1, 1), 0.3), jnp.ones((1, 1))

    def per_draw(words):
        rows = masking.proposal_logits(rows_of(words), labels, temperature, disallow_correct)
        pairs = jax.vmap(
            lambda logits, sample: policy_sums(
                logits[None], sample[None], table[sample][None], baseline, weight
            )
        )(rows, samples)
        return -pairs["policy_loss"][:, 0]

    estimates = np.asarray(jax.jit(jax.jacfwd(per_draw))(words))  # [draws, 5]

    def mean_reward(words):
        scaled = words / temperature
        if disallow_correct:
            scaled = scaled.at[3].set(-jnp.inf)
        return (jax.nn.softmax(scaled) * table).sum()

    exact = np.asarray(jax.grad(mean_reward)(words))
    error = estimates.std(axis=0) / math.sqrt(num_draws)
    assert (np.abs(estimates.mean(axis=0) - exact) <= 4 * error + 1e-6).all()
    assert np.abs(exact).max() > 10 * error.max()  # the test could tell zero from this
