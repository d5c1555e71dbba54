"""Attention alone: who sees whom, against softmax in float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.modeling.attention import Segments, attend

LENGTH, HEADS, WIDTH = 12, 2, 4
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 3 + [2] * 4 + [0] * 5])  # the second has padding
QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, LENGTH, HEADS, WIDTH))
TOGETHER = Segments.of(jnp.asarray(SEGMENTS))
SAME = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
NEAR = np.abs(np.subtract.outer(range(LENGTH), range(LENGTH))) <= 2


def expected(visible: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    query, key, value = (np.asarray(x, np.float64) for x in (QUERY, KEY, VALUE))
    scores = np.einsum("bqad,bkad->baqk", query, key) / math.sqrt(WIDTH) + bias
    weights = np.exp(scores) * visible[:, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("baqk,bkad->bqad", weights, value)


def test_a_query_sees_its_segment_and_padding_sees_padding():
    found = attend(QUERY, KEY, VALUE, TOGETHER)
    np.testing.assert_allclose(found, expected(SAME), atol=1e-6)


@pytest.mark.parametrize("window", [2, jnp.int32(2)], ids=["constant", "of a layer"])
def test_a_window_is_inside_the_segment(window):
    found = attend(QUERY, KEY, VALUE, TOGETHER, window=window)
    np.testing.assert_allclose(found, expected(SAME & NEAR), atol=1e-6)
    everything = attend(QUERY, KEY, VALUE, TOGETHER, window=LENGTH)
    np.testing.assert_array_equal(everything, attend(QUERY, KEY, VALUE, TOGETHER))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_bias_is_added_to_the_scores(batch):
    bias = jax.random.normal(jax.random.key(1), (batch, HEADS, LENGTH, LENGTH))
    found = attend(QUERY, KEY, VALUE, TOGETHER, bias=bias)
    np.testing.assert_allclose(found, expected(SAME, np.asarray(bias)), atol=1e-6)


def test_no_gradient_crosses_a_segment():
    def state(value: jax.Array) -> jax.Array:
        return attend(QUERY, KEY, value, TOGETHER)[0, 0].sum()

    reached = np.abs(jax.grad(state)(VALUE)).sum(axis=(2, 3)) > 0
    np.testing.assert_array_equal(reached[0], SEGMENTS[0] == 1)
    assert not reached[1].any()


def test_dropout_drops_probabilities_and_keeps_the_mean():
    ones = jnp.ones((64, LENGTH, HEADS, WIDTH))
    segments = Segments.of(jnp.ones((64, LENGTH), jnp.int32))
    half = attend(ones, ones, ones, segments, dropout=0.5, dropout_key=jax.random.key(0))
    sixths = np.asarray(half * 6)  # each of 12 equal probabilities is doubled or dropped
    np.testing.assert_allclose(sixths, np.round(sixths), atol=1e-5)
    assert abs(half.mean() - 1) < 0.02
    whole = attend(ones, ones, ones, segments, dropout=0.5)
    np.testing.assert_allclose(whole, ones, rtol=1e-6)


def test_results_have_the_dtype_of_the_values():
    query, key, value = (x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE))
    found = attend(query, key, value, TOGETHER)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected(SAME), atol=0.03)


def test_an_unknown_implementation_is_an_error():
    with pytest.raises(ValueError, match=r"flash.*exact"):
        attend(QUERY, KEY, VALUE, TOGETHER, implementation="flash")
