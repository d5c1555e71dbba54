"""The networks against arithmetic of their own, and the invariances they promise."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jaxprs import matrix_products

from electra_jax.modeling.electra import Electra, structure
from electra_jax.modeling.encoders.base import Context
from electra_jax.modeling.heads import PADDED_LOGIT
from electra_jax.modeling.layers import dropout
from electra_jax.objectives import Objective
from electra_jax.objectives.base import Inputs, context
from electra_jax.objectives.masking import Masked

KEY = jax.random.key(0)


def random_params(objective: Objective, scale: float = 0.3, seed: int = 0) -> dict:
    """Random numbers in every place, so that biases and scales take part."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), objective.structure()
    )


def bind(objective: Objective, params: dict) -> Electra:
    return nnx.merge(structure(objective.model)[0], params)


@functools.cache
def packed_batch(num_rows: int = 3) -> dict:
    batch = tiny.packed(num_rows)
    second_segment = (np.arange(tiny.LENGTH) % 5 > 2) & (batch["segment_ids"] > 0)
    return jax.device_put(batch | {"token_type_ids": np.int32(second_segment)})


# The forward pass in float64 NumPy, written from spec 1.2 to 1.7 and from nothing else.


def reference_norm(x, norm):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * norm["scale"] + norm["bias"]


def reference_gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def reference_dense(x, dense):
    return x @ dense["kernel"] + dense["bias"]


def reference_layer(x, layer, visible):
    """One post-LN layer on one row `[L, H]`; `visible[query, key]` says who sees whom."""
    qkv, out = layer["attention"]["qkv"], layer["attention"]["out"]
    _, _, num_heads, width = qkv["kernel"].shape
    attended = np.zeros_like(x) + out["bias"]
    for head in range(num_heads):
        q, k, v = (x @ qkv["kernel"][:, i, head] + qkv["bias"][i, head] for i in range(3))
        scores = np.exp(q @ k.T / math.sqrt(width)) * visible
        attended += scores / scores.sum(axis=1, keepdims=True) @ v @ out["kernel"][head]
    y = reference_norm(attended + x, layer["attention_norm"])
    f = reference_dense(reference_gelu(reference_dense(y, layer["up"])), layer["down"])
    return reference_norm(f + y, layer["output_norm"])


def reference_states(embeddings, encoder, row):
    """Input of the stack and all its layers, for the real tokens of one row, [N+1, L, H]."""
    x = (
        embeddings["word"][row["input_ids"]]
        + embeddings["position"][row["position_ids"]]
        + embeddings["token_type"][row["token_type_ids"]]
    )
    x = reference_norm(x, embeddings["norm"])
    states = [reference_dense(x, encoder["projection"]) if "projection" in encoder else x]
    visible = row["segment_ids"][:, None] == row["segment_ids"][None, :]
    for i in range(len(encoder["layers"]["up"]["bias"])):
        layer = jax.tree.map(lambda x, i=i: x[i], encoder["layers"])
        states.append(reference_layer(states[-1], layer, visible))
    return np.stack(states)


def reference_replaced_token_logits(hidden, head):
    return reference_dense(reference_gelu(reference_dense(hidden, head["dense"])), head["output"])[
        :, 0
    ]


def reference_masked_lm_logits(hidden, head, word):
    x = reference_norm(reference_gelu(reference_dense(hidden, head["dense"])), head["norm"])
    return x @ word.T + head["bias"]


def real_rows(batch):
    """Each row without its padding, float64-ready."""
    for i, size in enumerate((np.asarray(batch["segment_ids"]) > 0).sum(axis=1)):
        yield i, {name: np.asarray(x)[i, :size] for name, x in batch.items() if x.ndim == 2}


SHAPES = {
    "shared embeddings": {},
    "no projection": {"embedding_size": 32},
    "own embeddings": {"sharing": "none"},
    "one encoder": {"sharing": "all"},
    "one layer, one head": {"num_layers": 1, "num_heads": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_both_networks_equal_the_specification(shape):
    objective = tiny.objective(**SHAPES[shape])
    params, batch = random_params(objective), packed_batch()
    model = bind(objective, params)
    positions = jnp.array([[3, 0, 5, 5], [1, 2, 3, 4], [7, 9, 8, 0]])
    replaced = model.discriminate(batch["input_ids"], context(batch), None)
    words = model.generate(batch["input_ids"], context(batch), positions, None)
    assert replaced.dtype == words.dtype == jnp.float32
    assert (words[..., tiny.VOCAB :] <= PADDED_LOGIT + 100).all()

    exact = jax.tree.map(np.float64, params)
    shared, own, discriminator = exact["embeddings"], exact["generator"], exact["discriminator"]
    embeddings = own.get("embeddings", shared)
    encoder = own.get("encoder", discriminator["encoder"])
    for i, row in real_rows(batch):
        hidden = reference_states(shared, discriminator["encoder"], row)[-1]
        expected = reference_replaced_token_logits(hidden, discriminator["head"])
        np.testing.assert_allclose(replaced[i, : len(expected)], expected, atol=1e-5, rtol=1e-5)
        hidden = reference_states(embeddings, encoder, row)[-1][positions[i]]
        expected = reference_masked_lm_logits(hidden, own["head"], embeddings["word"])
        np.testing.assert_allclose(words[i, :, : tiny.VOCAB], expected, atol=1e-5, rtol=1e-5)


def test_hidden_states_equal_the_specification():
    objective = tiny.objective()
    params, batch = random_params(objective), packed_batch()
    model = bind(objective, params)
    embedded = model.embeddings(batch["input_ids"], context(batch), None)
    encoder = model.discriminator.encoder
    last, states = encoder.hidden_states(embedded, context(batch), None, every_layer=True)
    np.testing.assert_array_equal(last, states[-1])
    alone, nothing = encoder.hidden_states(embedded, context(batch), None)
    np.testing.assert_allclose(alone, last, atol=1e-6)
    assert nothing is None
    exact = jax.tree.map(np.float64, params)
    for i, row in real_rows(batch):
        expected = reference_states(exact["embeddings"], exact["discriminator"]["encoder"], row)
        size = expected.shape[1]
        np.testing.assert_allclose(states[:, i, :size], expected, atol=1e-5, rtol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads"):
        dataclasses.replace(tiny.objective().model.generator, num_heads=3)


# One function, compiled in several ways


@functools.cache
def drawn(vocab_size: int = tiny.VOCAB) -> Masked:
    return tiny.objective(vocab_size=vocab_size).mask(packed_batch(), KEY)


def total_loss(objective: Objective, params: dict, batch: dict, masked: Masked, dropout_key=None):
    sums = objective.sums(params, Inputs(batch, masked, KEY, dropout_key))
    terms = objective.loss_terms.items()
    return sum(weight * sums[term][0] / sums[term][1] for term, weight in terms)


def loss_and_grads(objective: Objective, params: dict, batch=None, masked=None, dropout_key=None):
    batch = packed_batch() if batch is None else batch
    masked = drawn() if masked is None else masked
    function = functools.partial(total_loss, objective, dropout_key=dropout_key)
    return jax.jit(jax.value_and_grad(function))(params, batch, masked)


def assert_same_up_to_rounding(ours, theirs):
    """Equal to 1e-6, relative to the largest number of each array or to 1."""
    for name, x in tiny.flat(theirs).items():
        np.testing.assert_allclose(
            tiny.flat(ours)[name], x, rtol=0, atol=1e-6 * max(1, np.abs(x).max()), err_msg=name
        )


@functools.cache
def with_dropout(**change) -> tuple:
    objective = tiny.objective("mlm", dropout=0.1, attention_dropout=0.1, **change)
    return loss_and_grads(objective, random_params(objective, scale=0.1), dropout_key=KEY)


@pytest.mark.parametrize(
    "change", [{"remat": "dots"}, {"remat": "full"}, {"scan_unroll": 2}], ids=str
)
def test_recomputation_and_unrolling_change_no_number(change):
    """Dropout is on: what is recomputed must draw the same mask again."""
    assert_same_up_to_rounding(with_dropout(**change), with_dropout())


def gradient_products(**encoder) -> list:
    """The matrix products of a training step: how each looks and how often it runs."""
    objective = tiny.objective(**encoder)
    loss = functools.partial(total_loss, objective)
    arguments = random_params(objective), packed_batch(), drawn()
    return list(matrix_products(jax.make_jaxpr(jax.grad(loss))(*arguments).jaxpr))


def test_remat_policies_recompute_what_they_say():
    """Of a layer's six products `dots` repeats the two without parameters, `full` all."""
    none, dots, full = (
        sum(times for _, times in gradient_products(remat=remat))
        for remat in ("none", "dots", "full")
    )
    layers = 2 * 2  # of both networks
    assert (dots - none, full - none) == (2 * layers, 6 * layers)


# Precision


def test_bfloat16_products_read_bfloat16_only():
    num_slots = drawn().masked_positions.shape[1]
    length, num_rows = tiny.LENGTH, 3
    scores = [(num_rows, heads, length, length) for heads in (1, 2)]  # generator, discriminator
    logits = (num_rows, num_slots, 384)
    products = [product for product, _ in gradient_products(dtype=jnp.bfloat16)]
    assert {x.aval.dtype for product in products for x in product.invars} == {
        np.dtype(jnp.bfloat16)
    }
    # Scores and logits themselves are added up in float32 and never rounded.
    unrounded = {
        product.outvars[0].aval.shape
        for product in products
        if product.outvars[0].aval.dtype == jnp.float32
    }
    assert unrounded == {*scores, logits}


def test_bfloat16_keeps_parameters_gradients_and_logits_in_float32():
    objective = tiny.objective(dtype=jnp.bfloat16)
    params, batch = random_params(objective, scale=0.1), packed_batch()
    float32 = np.dtype(np.float32)
    assert {x.dtype for x in jax.tree.leaves(objective.structure())} == {float32}

    def outputs(params):
        model = objective.bind(params)
        ids, inputs = batch["input_ids"], context(batch)
        embedded = model.embeddings(ids, inputs, None)
        logits = model.generate(ids, inputs, drawn().masked_positions, None)
        return embedded, logits, model.discriminate(ids, inputs, None)

    dtypes = [x.dtype for x in jax.eval_shape(outputs, params)]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.float32]

    loss = functools.partial(total_loss, objective)
    grads = jax.eval_shape(jax.grad(loss), params, batch, drawn())
    assert {x.dtype for x in jax.tree.leaves(grads)} == {float32}

    rounded = outputs(params)[2]
    exact = tiny.objective().bind(params).discriminate(batch["input_ids"], context(batch), None)
    assert 0 < np.abs(rounded - exact).max() < 0.02 * np.abs(exact).max()


# Padding and pieces


@functools.cache
def everything(columns: int) -> tuple:
    """Logits of real tokens, loss and gradients, in rows with `columns` more of padding."""
    objective = tiny.objective(max_positions=tiny.LENGTH)
    batch = jax.device_put(tiny.widen(jax.device_get(packed_batch()), columns))
    masked_ids = jnp.pad(drawn().masked_ids, ((0, 0), (0, columns)))
    masked = dataclasses.replace(drawn(), masked_ids=masked_ids)

    def loss_and_logits(params):
        model = objective.bind(params)
        replaced = model.discriminate(batch["input_ids"], context(batch), None)
        words = model.generate(masked_ids, context(batch), masked.masked_positions, None)
        return total_loss(objective, params, batch, masked), (replaced, words)

    params = random_params(objective, scale=0.1)
    (loss, (replaced, words)), grads = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(
        params
    )
    return replaced[batch["segment_ids"] > 0], words, loss, grads


@pytest.mark.parametrize("columns", [16, 64])
def test_padding_changes_nothing(columns):
    assert_same_up_to_rounding(everything(columns), everything(0))


def test_packed_pieces_equal_pieces_in_rows_of_their_own():
    objective = tiny.objective()
    packed = jax.device_get(packed_batch())
    places = [
        (row, packed["segment_ids"][row] == piece)
        for row in range(3)
        for piece in range(1, packed["segment_ids"][row].max() + 1)
    ]
    assert len(places) == 5
    fields = packed.keys() - {"row"}
    alone = {name: np.zeros((len(places), tiny.LENGTH), np.int32) for name in fields}
    for i, (row, is_piece) in enumerate(places):
        for name in fields:
            alone[name][i, : is_piece.sum()] = packed[name][row, is_piece]

    @jax.jit
    def outputs(params, batch):
        everywhere = jnp.broadcast_to(jnp.arange(tiny.LENGTH), batch["input_ids"].shape)
        model = bind(objective, params)
        return (
            model.discriminate(batch["input_ids"], context(batch), None),
            model.generate(batch["input_ids"], context(batch), everywhere, None),
        )

    params = random_params(objective, scale=0.1)
    together, apart = outputs(params, packed_batch()), outputs(params, jax.device_put(alone))
    for x, y in zip(together, apart, strict=True):
        for i, (row, is_piece) in enumerate(places):
            np.testing.assert_allclose(x[row, is_piece], y[i, : is_piece.sum()], atol=1e-6, rtol=0)


def test_a_token_sees_its_piece_and_nothing_else():
    objective = tiny.objective()
    encoder = bind(objective, random_params(objective)).discriminator.encoder
    embedded = jax.random.normal(KEY, (1, 10, 8))
    segment_ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 3, 0, 0]])

    def token(embedded, position):
        return encoder(embedded, Context(segment_ids, segment_ids, segment_ids), None)[
            0, position, :5
        ].sum()

    for position in (0, 4, 7):
        gradient = np.asarray(jax.grad(token)(embedded, position))[0]
        own = np.asarray(segment_ids[0] == segment_ids[0, position])
        assert (gradient[own] != 0).any(axis=1).all()
        assert (gradient[~own] == 0).all()


def test_a_row_of_padding_is_finite():
    objective = tiny.objective()
    batch = jax.device_put(tiny.batch([[], [[7, 8]]]))
    replaced = bind(objective, random_params(objective)).discriminate(
        batch["input_ids"], context(batch), None
    )
    assert np.isfinite(replaced).all()


# Dropout


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_its_share_and_the_mean(rate):
    kept_share = 1 - round(256 * rate) / 256
    dropped_out = np.asarray(dropout(jnp.ones((100, 1003)), rate, KEY))
    kept = dropped_out > 0
    sigma = math.sqrt(kept_share * (1 - kept_share) / kept.size)
    assert abs(kept.mean() - kept_share) < 4 * sigma
    np.testing.assert_allclose(dropped_out[kept], 1 / kept_share, rtol=1e-6)
    assert abs(dropped_out.mean() - 1) < 4 * sigma / kept_share
    # Elements that share a random word are as independent as others.
    pairs = kept[:, 0:1000:4] & kept[:, 1:1000:4]
    assert abs(pairs.mean() - kept_share**2) < 4 * 0.5 / math.sqrt(pairs.size)


def test_dropout_is_off_without_a_key_or_a_rate():
    x = jnp.arange(12.0).reshape(3, 4)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, KEY) is x


def test_dropout_draws_depend_on_the_key_alone():
    x = jnp.ones((8, 9))
    one, same, other = (np.asarray(dropout(x, 0.5, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
