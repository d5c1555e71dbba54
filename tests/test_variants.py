"""The paper's other objectives, generators and algorithms: losses by hand, equivalences, gradients.

`test_objectives.py` has ELECTRA and BERT themselves, `test_stages.py` what changes in training.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from scipy import stats
from test_objectives import SAMPLES, init, log_softmax, mask, sums

from electra_jax.checks import objective_for
from electra_jax.config import get_config
from electra_jax.modeling.electra import network_of, structure
from electra_jax.modeling.heads import PADDED_LOGIT, MaskedLMHead
from electra_jax.objectives import Objective, masking
from electra_jax.objectives.base import Inputs, context
from electra_jax.objectives.corruption import frequency_logits
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.reconstruction import copy_sums

FOUR = jax.device_put(tiny.packed(4))


@functools.cache
def gradients(objective: Objective) -> dict[str, dict[str, np.ndarray]]:
    """By loss term and parameter."""
    masked = mask(objective, FOUR)
    terms = objective.denominators(FOUR, masked).keys()

    def losses(params):
        pairs = objective.sums(params, Inputs(FOUR, masked, SAMPLES))
        return {term: pairs[term][0] for term in terms}

    slopes = jax.jit(jax.jacrev(losses))(init(objective))
    return {term: tiny.flat(slopes[term]) for term in terms}


def reached(objective: Objective, term: str) -> set[str]:
    """The parameters that the gradient of a loss term reaches."""
    return {name for name, slope in gradients(objective)[term].items() if slope.any()}


def starting_with(objective: Objective, *beginnings: str) -> set[str]:
    return {name for name in tiny.flat(objective.structure()) if name.startswith(beginnings)}


# Losses by hand, on 2 rows of 6 tokens

ROWS = {  # of four and two tokens
    "input_ids": jnp.array([[2, 7, 8, 3, 0, 0], [2, 3, 0, 0, 0, 0]]),
    "segment_ids": jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
}
SECOND_AND_THIRD = Masked(
    masked_ids=jnp.zeros((2, 6), jnp.int32),
    masked_positions=jnp.array([[2, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
    labels=jnp.zeros((2, 6), jnp.int32),
    weights=jnp.array([[1.0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
)


def test_electra_15_by_hand():
    """Odds of "replaced" 1, 3, 1/3, 3, 9, 9 in the first row; tokens 1 and 2 are judged."""
    objective = tiny.objective("electra_15")
    logits = jnp.log(jnp.array([[1.0, 3, 1 / 3, 3, 9, 9], [9.0, 9, 9, 9, 9, 9]]))
    corrupted = jnp.array([[2, 9, 8, 3, 0, 0], [2, 3, 0, 0, 0, 0]])
    pairs = objective.detection_sums(logits, corrupted, Inputs(ROWS, SECOND_AND_THIRD, SAMPLES))
    np.testing.assert_allclose(pairs["rtd_loss"], [-2 * math.log(3 / 4), 2], rtol=1e-6)
    np.testing.assert_array_equal(pairs["rtd_accuracy"], [2, 2])
    np.testing.assert_array_equal(pairs["rtd_precision"], [1, 1])
    np.testing.assert_array_equal(pairs["rtd_recall"], [1, 1])
    np.testing.assert_array_equal(pairs["replaced_fraction"], [1, 2])
    assert objective.denominators(ROWS, SECOND_AND_THIRD) == {"mlm_loss": 2.0, "rtd_loss": 2.0}


def test_copy_mechanism_by_hand():
    """A vocabulary of 5 whose softmax is 1/5 for all but what the text says."""
    logits = jnp.full((2, 6, 128), PADDED_LOGIT).at[:, :, :5].set(0.0)
    logits = logits.at[0, 3, 4].set(math.log(6))  # now 6/10, and 1/10 for the others
    gates = jnp.log(jnp.array([[1.0, 1, 3, 1, 1, 1], [1 / 3, 1, 1, 1, 1, 1]]))
    shown = jnp.array([[1, 2, 3, 2, 0, 0], [1, 2, 0, 0, 0, 0]])
    labels = jnp.array([[1, 3, 3, 4, 0, 0], [0, 2, 0, 0, 0, 0]])
    real = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]], bool)
    pairs = copy_sums(logits, gates, shown, labels, real)
    likelihoods = [
        1 / 2 + 1 / 2 * 1 / 5,  # kept, and right
        1 / 2 * 1 / 5,  # replaced
        3 / 4 + 1 / 4 * 1 / 5,
        1 / 2 * 6 / 10,
        3 / 4 * 1 / 5,
        1 / 2 + 1 / 2 * 1 / 5,
    ]
    np.testing.assert_allclose(
        pairs["reconstruction_loss"], [-np.log(likelihoods).sum(), 6], rtol=1e-6
    )
    # Where the text was changed, what is shown is likelier: 1/2 + 1/10 beats 1/10; and 1/2 + 1/20
    # beats 3/10. In the second row, 1/4 + 3/20 beats 3/20.
    np.testing.assert_array_equal(pairs["reconstruction_accuracy"], [3, 6])
    np.testing.assert_allclose(pairs["copy_rate"], [1 / 2 * 4 + 3 / 4 + 1 / 4, 6], rtol=1e-6)


def test_replace_mlm_equals_a_recomputation():
    """Loss of the discriminator on the corrupted text, at the predicted positions."""
    objective = tiny.objective("replace_mlm", init_stddev=0.2)
    params, batch = init(objective), FOUR
    masked = mask(objective, batch)

    @jax.jit
    def logits_of_discriminator(params):
        model = objective.bind(params)
        proposed = model.generate(masked.masked_ids, context(batch), masked.masked_positions, None)
        _, corrupted = objective.corrupt(proposed, batch, masked, SAMPLES, None)
        hidden = model.discriminator_states(corrupted, context(batch), None)
        logits = model.discriminator.head(hidden, model.embeddings.word[...])
        return jnp.take_along_axis(logits, masked.masked_positions[..., None], axis=1)

    used = np.asarray(masked.weights) > 0
    logits, labels = (
        np.asarray(logits_of_discriminator(params))[used],
        np.asarray(masked.labels)[used],
    )
    expected = -log_softmax(logits)[np.arange(len(labels)), labels].sum()
    pairs = sums(objective, params, batch, masked)
    np.testing.assert_allclose(pairs["reconstruction_loss"], [expected, len(labels)], rtol=1e-5)
    hits = (logits.argmax(axis=-1) == labels).sum()
    np.testing.assert_array_equal(pairs["reconstruction_accuracy"], [hits, len(labels)])


# Equivalences


def test_electra_15_is_electra_where_everything_is_selected():
    every, some = tiny.objective(init_stddev=0.2), tiny.objective("electra_15", init_stddev=0.2)
    params, batch = init(every), FOUR
    real = jnp.asarray(batch["segment_ids"] > 0)
    positions = jnp.broadcast_to(jnp.arange(tiny.LENGTH), real.shape)
    masked = Masked(
        masked_ids=jnp.where(real, tiny.MASK, 0),
        masked_positions=jnp.where(real, positions, 0),
        labels=jnp.where(real, jnp.asarray(batch["input_ids"]), 0),
        weights=real.astype(jnp.float32),
    )
    expected = sums(every, params, batch, masked)
    found = sums(some, params, batch, masked)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert some.denominators(batch, masked) == every.denominators(batch, masked)


@pytest.mark.parametrize("length", [32, 29])  # of parts of 4 positions: the last one is not full
def test_closed_gate_makes_all_tokens_mlm_replace_mlm_on_the_selected_positions(length):
    usual = tiny.objective("all_tokens_mlm", init_stddev=0.2)
    params, batch = init(usual), tiny.packed(4, length=length)
    masked = mask(usual, batch)
    copy = {"kernel": jnp.zeros((32, 1)), "bias": jnp.array([-1e4])}  # never copies
    head = params["discriminator"]["head"]
    closed = params | {"discriminator": params["discriminator"] | {"head": head | {"copy": copy}}}

    class OfSelected(type(usual)):
        def discriminator_sums(self, model, corrupted_ids, inputs, key):
            selected = masking.is_selected(inputs.masked, length)
            only = {**inputs.batch, "segment_ids": inputs.batch["segment_ids"] * selected}
            # Attention is that of the whole text; the loss is that of the selected positions.
            states = model.discriminator_states(corrupted_ids, context(inputs.batch), key)
            model.discriminator_states = lambda *_: states
            inputs = dataclasses.replace(inputs, batch=only)
            return super().discriminator_sums(model, corrupted_ids, inputs, key)

    replace = tiny.objective("replace_mlm", loss={"frequencies": usual.frequencies})
    replace = dataclasses.replace(
        replace,
        model=dataclasses.replace(usual.model, discriminator_head=MaskedLMHead),
        temperature=1.0,
    )
    head = {name: x for name, x in head.items() if name != "copy"}
    expected = sums(
        replace,
        params | {"discriminator": params["discriminator"] | {"head": head}},
        batch,
        masked,
    )
    found = sums(OfSelected(**vars(usual)), closed, batch, masked)
    for name in ("reconstruction_loss", "reconstruction_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)
    assert found["copy_rate"][0] == 0
    open_gate = sums(usual, params, batch, masked)
    assert open_gate["reconstruction_loss"][1] == (batch["segment_ids"] > 0).sum()


def test_all_tokens_mlm_in_parts_is_that_of_all_at_once():
    """Loss and gradients, against logits for every token."""
    objective = tiny.objective("all_tokens_mlm", init_stddev=0.2)
    params, batch = init(objective), jax.device_put(tiny.packed(2))
    masked = mask(objective, batch)

    def at_once(params):
        model = objective.bind(params)
        logits = objective.generator_logits(model, batch, masked, None)
        _, corrupted = objective.corrupt(logits, batch, masked, SAMPLES, None)
        states = model.discriminator_states(corrupted, context(batch), None)
        head, words = model.discriminator.head, model.discriminator_words()
        real, labels = batch["segment_ids"] > 0, jnp.asarray(batch["input_ids"])
        pairs = copy_sums(head(states, words), head.gate(states), corrupted, labels, real)
        return pairs["reconstruction_loss"][0]

    def in_parts(params):
        pairs = objective.sums(params, Inputs(batch, masked, SAMPLES))
        return pairs["reconstruction_loss"][0]

    expected, found = (jax.jit(jax.value_and_grad(loss))(params) for loss in (at_once, in_parts))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for name, slope in tiny.flat(expected[1]).items():
        scale = max(1.0, np.abs(slope).max())
        np.testing.assert_allclose(
            tiny.flat(found[1])[name], slope, rtol=0, atol=1e-5 * scale, err_msg=name
        )
    text = jax.jit(jax.grad(in_parts)).lower(params).as_text()
    assert "2x4x384xf32" in text
    assert "2x32x384x" not in text and "64x384x" not in text


def test_uniform_is_unigram_on_a_flat_corpus():
    config = get_config()
    config.generator.kind = "uniform"
    uniform = objective_for(config, 100)
    config.generator.kind = "unigram"
    assert objective_for(config, 100) == uniform
    np.testing.assert_array_equal(*(frequency_logits((x,) * 100) for x in (1.0, 7.0)))


def test_frequencies_are_what_is_sampled():
    objective = tiny.objective("all_tokens_mlm")
    frequencies = tuple(float(x) for x in np.random.default_rng(0).integers(0, 4, 300))
    objective = dataclasses.replace(objective, frequencies=frequencies)
    batch = jax.device_put(tiny.packed(2000))
    masked = mask(objective, batch)

    @jax.jit
    def samples(batch, masked):
        model = objective.bind(init(objective))
        logits = objective.generator_logits(model, batch, masked, None)
        return objective.corrupt(logits, batch, masked, SAMPLES, None)[0]

    drawn = np.asarray(samples(batch, masked))[np.asarray(masked.weights) > 0]
    counts, shares = np.bincount(drawn, minlength=300), np.array(frequencies) / sum(frequencies)
    assert (counts[shares == 0] == 0).all()
    expected = shares[shares > 0] * len(drawn)
    assert stats.chisquare(counts[shares > 0], expected).pvalue > 1e-4


# Gradient paths


SHARED = "embeddings/"
PATHS = [  # objective, sharing, loss, and what its gradient reaches
    ("electra", "embeddings", "rtd_loss", ("discriminator/", SHARED)),
    ("electra", "embeddings", "mlm_loss", ("generator/", SHARED)),
    ("electra", "none", "rtd_loss", ("discriminator/", SHARED)),
    ("electra", "none", "mlm_loss", ("generator/",)),
    ("electra", "all", "rtd_loss", ("discriminator/", SHARED)),
    ("electra", "all", "mlm_loss", ("generator/", SHARED, "discriminator/encoder/")),
    ("replace_mlm", "embeddings", "reconstruction_loss", ("discriminator/", SHARED)),
    ("replace_mlm", "embeddings", "mlm_loss", ("generator/", SHARED)),
    # Even where the discriminator predicts words, and its output is its table, too.
    ("replace_mlm", "gdes", "reconstruction_loss", ("discriminator/",)),
    ("replace_mlm", "gdes", "mlm_loss", ("generator/", SHARED)),
]


@pytest.mark.parametrize(("kind", "sharing", "term", "expected"), PATHS)
def test_a_loss_reaches_the_other_network_through_shared_tables_only(kind, sharing, term, expected):
    objective = tiny.objective(kind, sharing=sharing, init_stddev=0.2)
    assert reached(objective, term) == starting_with(objective, *expected)


def test_gdes_reads_shared_tables_and_its_own():
    objective = tiny.objective("replace_mlm", sharing="gdes", init_stddev=0.2)
    assert starting_with(objective, "discriminator/embeddings/") == {
        f"discriminator/embeddings/{name}"
        for name in ("word", "position", "token_type", "norm/scale", "norm/bias")
    }
    params = init(objective)
    own = params["discriminator"]["embeddings"]
    tables = {**own, "word": own["word"] + 0.5}
    shifted = params | {"discriminator": params["discriminator"] | {"embeddings": tables}}
    model = nnx.merge(structure(objective.model)[0], shifted)
    np.testing.assert_array_equal(model.discriminator_words(), params["embeddings"]["word"] + 0.5)
    read = network_of(shifted, "discriminator")["embeddings"]["word"]
    np.testing.assert_array_equal(read, model.discriminator_words())


def test_gdes_starts_as_shared_embeddings():
    gdes, shared = (
        tiny.objective(sharing=sharing, init_stddev=0.2) for sharing in ("gdes", "embeddings")
    )
    params, batch = init(gdes), FOUR
    masked = mask(gdes, batch)
    own = {name: x for name, x in params["discriminator"].items() if name != "embeddings"}
    expected = sums(shared, params | {"discriminator": own}, batch, masked)
    for name, value in sums(gdes, params, batch, masked).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


# Parameters


def count(**changes) -> int:
    config = get_config()
    config.update_from_flattened_dict({k.replace("__", "."): x for k, x in changes.items()})
    return tiny.count(structure(objective_for(config, 30522).model)[1])


def test_parameter_counts():
    """Of the small model: V = 30522, E = 128, H = 256, a generator 64 wide."""
    usual = count()
    assert usual == 14_196_219
    tables = (30522 + 512 + 2) * 128
    assert count(generator__sharing="gdes") == usual + tables + 2 * 128
    generator = 608_064 + 39_098
    assert count(generator__kind="unigram") == usual - generator
    rtd_head, lm_head = 256 * 256 + 256 + 256 + 1, 256 * 128 + 128 + 2 * 128 + 30522
    assert count(objective="electra_15") == usual
    assert count(objective="replace_mlm") == usual - rtd_head + lm_head
    assert count(objective="all_tokens_mlm") == usual - rtd_head + lm_head + 256 + 1
    assert count(algorithm="adversarial") == usual + 64 + 1
