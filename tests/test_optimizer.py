"""The update rule and the schedule against spec 4.1 and 4.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.objective import FineTuning
from electra_jax.modeling.params import ParamInfo
from electra_jax.training.optimizer import (
    OptimizerConfig,
    adam_state,
    learning_rate,
    make_optimizer,
    scale_by_biased_adam,
    scale_by_depth,
)

KERNEL, BIAS = ParamInfo(("embed",)), ParamInfo((None,), decays=False)


def rate(config: OptimizerConfig, step: int) -> float:
    return float(learning_rate(config, jnp.int32(step)))


def test_three_steps_by_hand():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, num_steps=10, max_grad_norm=0)
    optimizer = make_optimizer(config, {"kernel": KERNEL, "bias": BIAS})
    params = {"kernel": jnp.array([1.0]), "bias": jnp.array([1.0])}
    state = optimizer.init(params)
    rates = [0.0, 0.1 * 0.9 * 0.5, 0.1 * 0.8]  # decay times warm-up
    kernel, bias, m, v = 1.0, 1.0, 0.0, 0.0
    for step, gradient in enumerate([0.5, -1.0, 2.0]):
        grads = {"kernel": jnp.array([gradient]), "bias": jnp.array([gradient])}
        updates, state = optimizer.update(grads, state, params)
        at = learning_rate(config, jnp.int32(step))
        params = jax.tree.map(lambda p, u, at=at: p - at * u, params, updates)

        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        direction = m / (v**0.5 + 1e-6)
        kernel -= rates[step] * (direction + 0.01 * kernel)
        bias -= rates[step] * direction
        assert float(at) == pytest.approx(rates[step], rel=1e-6)
        np.testing.assert_allclose(params["kernel"], kernel, rtol=1e-6)
        np.testing.assert_allclose(params["bias"], bias, rtol=1e-6)
        np.testing.assert_allclose(adam_state(state).mu["kernel"], m, rtol=1e-6)
        np.testing.assert_allclose(adam_state(state).nu["kernel"], v, rtol=1e-6)
        if step == 0:
            assert params["kernel"] == 1  # rate 0, but the moments above have moved


def test_constant_gradient_overshoots_as_without_bias_correction():
    adam = scale_by_biased_adam(0.9, 0.999, 1e-6)
    gradient = {"x": jnp.float32(3.0)}
    ratios, state = [], adam.init(gradient)
    for _ in range(50):
        update, state = adam.update(gradient, state)
        ratios.append(float(update["x"]))
    steps = np.arange(1, 51)
    np.testing.assert_allclose(ratios, (1 - 0.9**steps) / np.sqrt(1 - 0.999**steps), rtol=1e-4)
    assert ratios[0] == pytest.approx(3.2, abs=0.05)
    assert max(ratios) == pytest.approx(6.57, abs=0.01)
    assert 10 <= np.argmax(ratios) + 1 <= 15


NOT_DECAYED = """
embeddings/norm/bias
embeddings/norm/scale
discriminator/encoder/layers/attention/out/bias
discriminator/encoder/layers/attention/qkv/bias
discriminator/encoder/layers/attention_norm/bias
discriminator/encoder/layers/attention_norm/scale
discriminator/encoder/layers/down/bias
discriminator/encoder/layers/output_norm/bias
discriminator/encoder/layers/output_norm/scale
discriminator/encoder/layers/up/bias
discriminator/encoder/projection/bias
discriminator/head/dense/bias
discriminator/head/output/bias
generator/encoder/layers/attention/out/bias
generator/encoder/layers/attention/qkv/bias
generator/encoder/layers/attention_norm/bias
generator/encoder/layers/attention_norm/scale
generator/encoder/layers/down/bias
generator/encoder/layers/output_norm/bias
generator/encoder/layers/output_norm/scale
generator/encoder/layers/up/bias
generator/encoder/projection/bias
generator/head/bias
generator/head/dense/bias
generator/head/norm/bias
generator/head/norm/scale
"""
DECAYED = """
embeddings/position
embeddings/token_type
embeddings/word
discriminator/encoder/layers/attention/out/kernel
discriminator/encoder/layers/attention/qkv/kernel
discriminator/encoder/layers/down/kernel
discriminator/encoder/layers/up/kernel
discriminator/encoder/projection/kernel
discriminator/head/dense/kernel
discriminator/head/output/kernel
generator/encoder/layers/attention/out/kernel
generator/encoder/layers/attention/qkv/kernel
generator/encoder/layers/down/kernel
generator/encoder/layers/up/kernel
generator/encoder/projection/kernel
generator/head/dense/kernel
"""


def test_biases_and_layer_norms_alone_are_not_decayed():
    decayed = jax.tree.map(lambda info: info.decays, tiny.objective().param_infos())
    decayed = tiny.flat(decayed)
    assert {name for name, yes in decayed.items() if not yes} == set(NOT_DECAYED.split())
    assert {name for name, yes in decayed.items() if yes} == set(DECAYED.split())


@pytest.mark.parametrize(("max_grad_norm", "factor"), [(1.0, 1 / 13), (26.0, 1.0), (0, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(max_grad_norm, factor):
    config = tiny.optimizer(max_grad_norm=max_grad_norm)
    grads = {"kernel": jnp.array([3.0, 4.0]), "bias": jnp.array([12.0])}  # norm 13
    optimizer = make_optimizer(config, {"kernel": KERNEL, "bias": BIAS})
    mu = adam_state(optimizer.update(grads, optimizer.init(grads), grads)[1]).mu
    np.testing.assert_allclose(mu["kernel"], [0.3 * factor, 0.4 * factor], rtol=1e-6)
    np.testing.assert_allclose(mu["bias"], [1.2 * factor], rtol=1e-6)


def test_warmup_and_decay_are_multiplied():
    config = OptimizerConfig(learning_rate=5e-4, warmup_steps=10_000, num_steps=1_000_000)
    assert rate(config, 0) == 0
    assert rate(config, 5_000) == pytest.approx(5e-4 * 0.5 * 0.995, rel=1e-6)
    assert rate(config, 10_000) == pytest.approx(5e-4 * 0.99, rel=1e-6)  # the peak
    assert rate(config, 10_000) > max(rate(config, 9_999), rate(config, 10_001))
    assert rate(config, 500_000) == pytest.approx(5e-4 * 0.5, rel=1e-6)
    assert rate(config, 1_000_000) == rate(config, 1_500_000) == 0


def test_no_warmup_starts_at_the_full_rate():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, num_steps=4, decay_power=2.0)
    assert [rate(config, step) for step in range(5)] == [0.5, 0.28125, 0.125, 0.03125, 0]


# Fine-tuning: spec 4.3

TABLE = {  # of small and base, and of large: group to the factor of the original
    "fixed": {
        (12, 0.8): {"head": 1, "top": 0.8, "next": 0.64, "lowest": 0.0687, "embeddings": 0.0550},
        (24, 0.9): {"head": 1, "top": 0.9, "next": 0.81, "lowest": 0.0798, "embeddings": 0.0718},
    },
    "faithful": {
        (12, 0.8): {"head": 1, "top": 0.64, "next": 0.512, "lowest": 0.0550, "embeddings": 0.0440},
        (24, 0.9): {"head": 1, "top": 0.81, "next": 0.729, "lowest": 0.0718, "embeddings": 0.0646},
    },
}


@pytest.mark.parametrize("mode", TABLE)
@pytest.mark.parametrize(("num_layers", "decay"), [(12, 0.8), (24, 0.9)])
def test_layerwise_rates_of_every_parameter(mode, num_layers, decay):
    """By what one update does, when every direction is one: stacked layers have a rate each."""
    objective = FineTuning(tiny.encoder(num_layers=num_layers), Spans())
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), objective.structure())
    scaled, _ = scale_by_depth(decay, mode, objective.param_infos()).update(ones, ())
    expected = TABLE[mode][num_layers, decay]
    seen = set()
    for name, update in tiny.flat(scaled).items():
        if name.startswith("encoder/layers/"):
            by_layer = update.reshape(num_layers, -1)
            assert (by_layer == by_layer[:, :1]).all(), name
            found = {"top": -1, "next": -2, "lowest": 0}
            for group, layer in found.items():
                assert by_layer[layer, 0] == pytest.approx(expected[group], abs=5e-5), name
            seen |= {*found}
        else:
            group = "head" if name.startswith("head/") else "embeddings"
            assert update == pytest.approx(np.full_like(update, expected[group]), abs=5e-5), name
            seen.add(group)
    assert seen == {*expected}


def test_layerwise_rates_multiply_the_decay_of_weights_too():
    """As in the original, where they are part of the learning rate."""
    infos = {
        "table": ParamInfo((None, None), depth="input"),
        "layers": {"kernel": KERNEL.stacked(), "bias": BIAS.stacked()},
        "head": KERNEL,
    }
    params = jax.tree.map(lambda info: jnp.ones((1,) * len(info.axes)), infos)
    config = OptimizerConfig(
        1.0, 0, 10, weight_decay=0.5, max_grad_norm=0, layerwise_decay=0.1, epsilon=1.0
    )
    optimizer = make_optimizer(config, infos)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    found = {name: float(x.flat[0]) for name, x in tiny.flat(updates).items()}
    assert found == pytest.approx(
        {
            "table": 0.5 * 0.01,
            "layers/bias": 0,
            "layers/kernel": 0.5 * 0.1,
            "head": 0.5,
        }
    )
