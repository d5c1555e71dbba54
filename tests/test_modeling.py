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

from electra_jax.checks import objective_for
from electra_jax.config import get_config
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


def reference_tower(embeddings, encoder, row):
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
    "one tower": {"sharing": "all"},
    "one layer, one head": {"num_layers": 1, "num_heads": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_both_towers_equal_the_specification(shape):
    objective = tiny.objective(**SHAPES[shape])
    params, batch = random_params(objective), packed_batch()
    model = bind(objective, params)
    positions = jnp.array([[3, 0, 5, 5], [1, 2, 3, 4], [7, 9, 8, 0]])
    verdicts = model.discriminate(batch["input_ids"], context(batch), None)
    words = model.generate(batch["input_ids"], context(batch), positions, None)
    assert verdicts.dtype == words.dtype == jnp.float32
    assert (words[..., tiny.VOCAB :] <= PADDED_LOGIT + 100).all()

    exact = jax.tree.map(np.float64, params)
    shared, own, discriminator = exact["embeddings"], exact["generator"], exact["discriminator"]
    embeddings = own.get("embeddings", shared)
    encoder = own.get("encoder", discriminator["encoder"])
    for i, row in real_rows(batch):
        hidden = reference_tower(shared, discriminator["encoder"], row)[-1]
        expected = reference_replaced_token_logits(hidden, discriminator["head"])
        np.testing.assert_allclose(verdicts[i, : len(expected)], expected, atol=1e-5, rtol=1e-5)
        hidden = reference_tower(embeddings, encoder, row)[-1][positions[i]]
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
        expected = reference_tower(exact["embeddings"], exact["discriminator"]["encoder"], row)
        size = expected.shape[1]
        np.testing.assert_allclose(states[:, i, :size], expected, atol=1e-5, rtol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads"):
        dataclasses.replace(tiny.objective().model.generator, num_heads=3)


# Parameters


def count(tree: dict) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def sized(hidden, layers, embedding, width, sharing="embeddings", objective="electra") -> dict:
    config = get_config()
    config.objective = objective
    config.model.update(hidden_size=hidden, num_layers=layers, embedding_size=embedding)
    config.generator.update(width=width, sharing=sharing)
    return structure(objective_for(config, 30522).model)[1]


@pytest.mark.parametrize(
    ("size", "total", "electra", "shared", "discriminator_head", "generator", "lm_head"),
    [  # spec 1.8, read off the original's checkpoints
        (
            (256, 12, 128, 0.25),
            14_196_219,
            13_483_008,
            3_972_864,
            66_049,
            608_064,
            39_098,
        ),
        (
            (256, 12, 128, 1.0),
            23_122_875,
            13_483_008,
            3_972_864,
            66_049,
            9_510_144,
            63_674,
        ),
        (
            (768, 12, 768, 1 / 3),
            119_386_427,
            108_891_648,
            23_837_184,
            591_361,
            9_673_984,
            229_434,
        ),
        (
            (1024, 24, 1024, 0.25),
            354_655_291,
            334_092_288,
            31_782_912,
            1_050_625,
            19_216_640,
            295_738,
        ),
    ],
    ids=["small", "small, generator 1.0", "base", "large"],
)
def test_parameter_counts_equal_the_original(
    size, total, electra, shared, discriminator_head, generator, lm_head
):
    params = sized(*size)
    assert count(params["embeddings"]) == shared
    assert count(params["embeddings"]) + count(params["discriminator"]["encoder"]) == electra
    assert count(params["discriminator"]["head"]) == discriminator_head
    assert count(params["generator"]["encoder"]) == generator
    assert count(params["generator"]["head"]) == lm_head
    assert count(params) == total


# Of the small model by hand: V = 30522, E = 128, H = 256, and 64 for the small generator.
EMBEDDINGS = (30522 + 512 + 2 + 2) * 128
PROJECTION = 128 * 256 + 256
ENCODER = PROJECTION + 12 * (4 * (256 * 256 + 256) + 2 * 256 * 1024 + 1024 + 256 + 2 * 2 * 256)
RTD_HEAD = 256 * 256 + 256 + 256 + 1
SMALL_ENCODER = 12 * (4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 2 * 2 * 64)


def test_untied_embeddings_count():
    params = sized(256, 12, 128, 0.25, sharing="none")
    own_embeddings = (30522 + 512 + 2 + 2) * 64  # as wide as the generator: no projection
    lm_head = 64 * 64 + 64 + 2 * 64 + 30522
    assert "projection" not in params["generator"]["encoder"]
    assert count(params["generator"]) == own_embeddings + SMALL_ENCODER + lm_head
    assert count(params) == EMBEDDINGS + ENCODER + RTD_HEAD + count(params["generator"])


def test_fully_tied_count():
    params = sized(256, 12, 128, 1.0, sharing="all")
    lm_head = 256 * 128 + 128 + 2 * 128 + 30522
    assert count(params["generator"]) == lm_head
    assert count(params) == EMBEDDINGS + ENCODER + RTD_HEAD + lm_head


def test_masked_language_model_count():
    params = sized(256, 12, 128, 1.0, objective="mlm")
    lm_head = 256 * 128 + 128 + 2 * 128 + 30522
    assert params.keys() == {"embeddings", "generator"}
    assert count(params) == EMBEDDINGS + ENCODER + lm_head


def test_initialisation_is_the_original_one():
    """Spec 1.5: truncated normal but for two Glorot layers, biases 0, scales 1."""
    objective = tiny.objective(
        vocab_size=1000, embedding_size=32, hidden_size=64, intermediate_size=256
    )
    params = jax.jit(objective.init)(KEY)
    glorot = {  # limit sqrt(6 / (fan_in + fan_out))
        "discriminator/encoder/projection/kernel": math.sqrt(6 / (32 + 64)),
        "discriminator/head/output/kernel": math.sqrt(6 / (64 + 1)),
    }
    normal = 0
    for name, x in tiny.flat(params).items():
        if name.endswith("scale"):
            assert (x == 1).all(), name
        elif name.endswith("bias"):
            assert (x == 0).all(), name
        elif name in glorot:
            assert 0.9 * glorot[name] < np.abs(x).max() <= glorot[name], name
            assert abs(x.std() - glorot[name] / math.sqrt(3)) < 0.15 * glorot[name], name
        else:
            normal += 1
            assert np.abs(x).max() <= 0.04, name
            if x.size >= 1000:
                assert abs(x.std() - 0.0176) < 4 * 0.0176 / math.sqrt(x.size), name
    assert set(glorot) <= tiny.flat(params).keys()
    assert normal == 3 + 2 * 4 + 2  # tables; four stacked kernels of two encoders; two heads
    kernels = params["discriminator"]["encoder"]["layers"]["up"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])  # each layer has a draw of its own


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
    layers = 2 * 2  # of both towers
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
        verdicts = model.discriminate(batch["input_ids"], context(batch), None)
        words = model.generate(masked_ids, context(batch), masked.masked_positions, None)
        return total_loss(objective, params, batch, masked), (verdicts, words)

    params = random_params(objective, scale=0.1)
    (loss, (verdicts, words)), grads = jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(
        params
    )
    return verdicts[batch["segment_ids"] > 0], words, loss, grads


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
    verdicts = bind(objective, random_params(objective)).discriminate(
        batch["input_ids"], context(batch), None
    )
    assert np.isfinite(verdicts).all()


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
