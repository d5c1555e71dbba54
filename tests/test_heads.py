"""Heads and losses of fine-tuning, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from scipy import special

from electra_jax.finetune.heads import HEADS
from electra_jax.finetune.heads.sentence import SentenceLayers
from electra_jax.finetune.objective import FineTuning
from electra_jax.objectives.base import Inputs, context

ENCODER = tiny.encoder(init_stddev=0.3)
LENGTH = 12


def batch(size: int = 3) -> dict[str, np.ndarray]:
    """Rows of 12, 9 and 5 tokens, then of padding."""
    rng = np.random.default_rng(0)
    lengths = np.array([12, 9, 5] + [0] * (size - 3))[:, None]
    position = np.broadcast_to(np.arange(LENGTH), (size, LENGTH))
    real = (position < lengths).astype(np.int32)
    segments = ((position >= 4) & (real > 0)).astype(np.int32)
    return {
        "input_ids": rng.integers(5, 50, (size, LENGTH)).astype(np.int32) * real,
        "segment_ids": real,
        "position_ids": position.astype(np.int32),
        "token_type_ids": segments,
        "row": np.arange(size, dtype=np.int32),
    }


@functools.cache
def network(kind: str, outputs: int = 0, style: str = "original") -> tuple[FineTuning, dict]:
    head = HEADS[kind](labels=tuple("abc"[:outputs]), style=style)
    objective = FineTuning(ENCODER, head)
    return objective, objective.init(jax.random.key(1))


def sums(objective: FineTuning, params: dict, rows: dict) -> dict[str, np.ndarray]:
    key = jax.random.key(0)
    found = jax.jit(lambda p, b: objective.sums(p, Inputs(b, (), key)))(params, rows)
    return jax.device_get(found)


def outputs(objective: FineTuning, params: dict, rows: dict) -> dict[str, np.ndarray]:
    return jax.device_get(jax.jit(objective.outputs)(params, rows))


def hidden_states(objective: FineTuning, params: dict, rows: dict) -> np.ndarray:
    rows = jax.tree.map(jnp.asarray, rows)
    return np.asarray(objective.bind(params).hidden(rows["input_ids"], context(rows), None))


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - special.logsumexp(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("style", ["original", "huggingface"])
def test_classification_is_one_linear_layer_or_two(style):
    objective, params = network("classification", 3, style)
    rows = batch(4) | {"label": np.array([2, 0, 1, 0], np.int32)}
    x = hidden_states(objective, params, rows)[:, 0]
    head = jax.device_get(params["head"])
    if style == "huggingface":
        x = x @ head["dense"]["kernel"] + head["dense"]["bias"]
        x = x * special.ndtr(x)  # gelu
    logits = x @ head["output"]["kernel"] + head["output"]["bias"]
    np.testing.assert_allclose(outputs(objective, params, rows)["logits"], logits, atol=1e-5)
    loss = -log_softmax(logits)[range(3), rows["label"][:3]].sum()  # the row of padding is left out
    found = sums(objective, params, rows)
    np.testing.assert_allclose(found["loss"], [loss, 3], rtol=1e-5)
    right = (logits.argmax(axis=-1) == rows["label"])[:3].sum()
    np.testing.assert_array_equal(found["accuracy"], [right, 3])
    assert objective.denominators(jax.tree.map(jnp.asarray, rows), ())["loss"] == 3


def test_multilabel_and_regression():
    objective, params = network("multilabel", 2)
    rows = batch()
    logits = outputs(objective, params, rows)["logits"]
    label = np.array([[1, 0], [1, 1], [0, 0]], np.float32)
    chosen = np.where(label > 0, special.log_expit(logits), special.log_expit(-logits))
    found = sums(objective, params, rows | {"label": label})["loss"]
    np.testing.assert_allclose(found, [-chosen.mean(axis=1).sum(), 3], rtol=1e-5)

    objective, params = network("regression")
    values = outputs(objective, params, rows)["logits"]
    label = np.array([0.5, -1, 2], np.float32)
    found = sums(objective, params, rows | {"label": label})["loss"]
    np.testing.assert_allclose(found, [((values - label) ** 2).sum(), 3], rtol=1e-5)


def test_tagging_counts_words():
    objective, params = network("tagging", 3)
    label = np.full((3, LENGTH), -1, np.int32)
    label[0, [1, 3]], label[2, 2] = [2, 0], 1
    rows = batch() | {"label": label}
    logits = outputs(objective, params, rows)["logits"]
    assert logits.shape == (3, LENGTH, 3)
    is_word = label >= 0
    loss = -log_softmax(logits)[is_word, label[is_word]].sum()
    np.testing.assert_allclose(sums(objective, params, rows)["loss"], [loss, 3], rtol=1e-5)
    assert objective.denominators(jax.tree.map(jnp.asarray, rows), ())["loss"] == 3


def spans(rows: dict) -> dict[str, np.ndarray]:
    """Answers in the second segments of two rows, and none in the third."""
    allowed = rows["token_type_ids"].copy()
    allowed[:, 0] = 1
    start, end, none = ([5, 4, 0], [6, 8, 0], [0, 0, 1])
    return rows | {
        "allowed": allowed,
        "start": np.array(start, np.int32),
        "end": np.array(end, np.int32),
        "is_impossible": np.array(none, np.int32),
    }


def test_joint_span_head_equals_its_formula():
    """Spec 6.4, written out: ends given each start, answerability from the mean of the starts."""
    objective, params = network("qa")
    rows = spans(batch())
    hidden = hidden_states(objective, params, rows).astype(np.float64)
    head = jax.device_get(params["head"])

    def two_layers(layers, x):
        x = x @ layers["dense"]["kernel"] + layers["dense"]["bias"]
        return (x * special.ndtr(x) @ layers["output"]["kernel"] + layers["output"]["bias"])[..., 0]

    masked = np.where(rows["allowed"] > 0, 0, -1000)
    start = (hidden @ head["start"]["kernel"] + head["start"]["bias"])[..., 0] + masked
    end = np.empty((3, LENGTH, LENGTH))  # [row, start, end]
    for s in range(LENGTH):
        pairs = np.concatenate([np.repeat(hidden[:, s : s + 1], LENGTH, axis=1), hidden], axis=-1)
        end[:, s] = two_layers(head["end"], pairs) + masked
    mean = np.einsum("bl,blh->bh", special.softmax(start, axis=-1), hidden)
    none = two_layers(head["answerable"], np.concatenate([hidden[:, 0], mean], axis=-1))

    found, each = outputs(objective, params, rows), np.arange(3)
    np.testing.assert_allclose(found["null_logit"], none, atol=1e-4)
    for row in each:
        order = np.argsort(-start[row])
        is_clear = rows["allowed"][row][order] > 0  # others are all about -1000
        np.testing.assert_array_equal(found["start_top"][row][is_clear], order[is_clear])
        for k in np.flatnonzero(is_clear):
            s = found["start_top"][row, k]
            expected = log_softmax(end[row, s])
            at = found["end_top"][row, k]
            np.testing.assert_allclose(found["end_log_prob"][row, k], expected[at], atol=2e-4)
            assert expected[at[0]] == expected.max()
    gold = rows["start"], rows["end"]
    start_loss = -log_softmax(start)[each, gold[0]].sum()
    end_loss = -log_softmax(end[each, gold[0]])[each, gold[1]].sum()
    signs = np.where(rows["is_impossible"] > 0, 1, -1)
    none_loss = -special.log_expit(signs * none).sum()
    losses = sums(objective, params, rows)
    np.testing.assert_allclose(losses["start_loss"], [start_loss, 3], rtol=1e-4)
    np.testing.assert_allclose(losses["end_loss"], [end_loss, 3], rtol=1e-4)
    np.testing.assert_allclose(losses["answerable_loss"], [none_loss, 3], rtol=1e-4)
    assert objective.loss_terms == {"start_loss": 0.5, "end_loss": 0.5, "answerable_loss": 0.5}


def test_independent_span_head_is_two_outputs_of_every_token():
    objective, params = network("qa", style="huggingface")
    rows = spans(batch())
    found = outputs(objective, params, rows)
    assert found["start_logits"].shape == found["end_logits"].shape == (3, LENGTH)
    assert (found["end_logits"][rows["allowed"] == 0] < -900).all()
    loss = -log_softmax(found["end_logits"])[range(3), rows["end"]].sum()
    np.testing.assert_allclose(sums(objective, params, rows)["end_loss"], [loss, 3], rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "style"),
    [("classification", "huggingface"), ("tagging", "original"), ("qa", "original")],
)
def test_every_parameter_learns(kind, style):
    objective, params = network(kind, 3, style)
    labels = {
        "classification": np.array([2, 0, 1], np.int32),
        "tagging": np.broadcast_to(np.arange(LENGTH, dtype=np.int32) % 3, (3, LENGTH)),
    }
    rows = spans(batch()) | ({"label": labels[kind]} if kind in labels else {})
    rows = jax.tree.map(jnp.asarray, rows)

    def loss(params):
        found = objective.sums(params, Inputs(rows, (), jax.random.key(0), jax.random.key(1)))
        return sum(found[name][0] for name in objective.loss_terms)

    for name, gradient in tiny.flat(jax.jit(jax.grad(loss))(params)).items():
        assert np.abs(gradient).max() > 0, name


def test_dropout_of_the_head_is_on_in_training_only():
    head = SentenceLayers(ENCODER, 200, False, nnx.Rngs(0))
    hidden = jnp.ones((1, 1, 16))
    once, again = (np.asarray(head(hidden, jax.random.key(seed))) for seed in (1, 2))
    assert (once != again).any()
    np.testing.assert_array_equal(head(hidden, None), head(hidden, None))
