"""The update rule and the schedule against spec 4.1 and 4.2."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.objective import FineTuning
from electra_jax.modeling.params import ParamInfo
from electra_jax.training.optimizer import (
    AdamState,
    OptimizerConfig,
    learning_rate,
    make_optimizer,
    scale_by_biased_adam,
    scale_by_depth,
)

KERNEL, BIAS = ParamInfo(("embed",)), ParamInfo((None,), decays=False)


def adam_state(opt_state: optax.OptState) -> AdamState:
    return next(part for part in opt_state if isinstance(part, AdamState))


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
        mu, nu = adam_state(state)
        found = [at, params["kernel"], params["bias"], mu["kernel"], nu["kernel"]]
        expected = [rates[step], kernel, bias, m, v]
        np.testing.assert_allclose(np.hstack(found), expected, rtol=1e-6)
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


def test_biases_and_layer_norms_alone_are_not_decayed():
    decays = jax.tree.map(lambda info: info.decays, tiny.objective().param_infos())
    kinds = {name: bool(decays) for name, decays in tiny.flat(decays).items()}
    assert kinds == {name: not name.endswith(("bias", "norm/scale")) for name in kinds}
    assert sorted(kinds.values()) == [False] * 26 + [True] * 16


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

GROUPS = ("head", "top", "next", "lowest", "embeddings")
TABLE = {  # of small and base, and of large: the original's factor of each group
    ("fixed", 12, 0.8): (1, 0.8, 0.64, 0.0687, 0.0550),
    ("fixed", 24, 0.9): (1, 0.9, 0.81, 0.0798, 0.0718),
    ("faithful", 12, 0.8): (1, 0.64, 0.512, 0.0550, 0.0440),
    ("faithful", 24, 0.9): (1, 0.81, 0.729, 0.0718, 0.0646),
}


@pytest.mark.parametrize(("mode", "num_layers", "decay"), TABLE)
def test_layerwise_rates_of_every_parameter(mode, num_layers, decay):
    """By what one update does, when every direction is one: stacked layers have a rate each."""
    objective = FineTuning(tiny.encoder(num_layers=num_layers), Spans())
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), objective.structure())
    scaled, _ = scale_by_depth(decay, mode, objective.param_infos()).update(ones, ())
    expected, seen = dict(zip(GROUPS, TABLE[mode, num_layers, decay], strict=True)), set()
    for name, update in tiny.flat(scaled).items():
        if name.startswith("encoder/layers/"):
            by_layer = update.reshape(num_layers, -1)
            assert (by_layer == by_layer[:, :1]).all(), name
            for group, layer in {"top": -1, "next": -2, "lowest": 0}.items():
                assert by_layer[layer, 0] == pytest.approx(expected[group], abs=5e-5), name
                seen.add(group)
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
    expected = {"table": 0.5 * 0.01, "layers/bias": 0, "layers/kernel": 0.5 * 0.1, "head": 0.5}
    assert found == pytest.approx(expected)
