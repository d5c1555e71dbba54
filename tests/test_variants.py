"""The paper's other objectives, generators and algorithms: losses by hand, equivalences, gradients.

`test_objectives.py` has ELECTRA and BERT themselves.
"""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from ml_collections import ConfigDict
from test_objectives import SAMPLES, init, mask, sums

from electra_jax.checks import objective_for
from electra_jax.config import get_config
from electra_jax.data import tokenizers
from electra_jax.modeling.electra import network_of, structure
from electra_jax.modeling.heads import PADDED_LOGIT, MaskedLMHead
from electra_jax.monitoring.rates import compilations
from electra_jax.objectives import Objective, make_objective, masking, metrics
from electra_jax.objectives.adversarial import policy_sums
from electra_jax.objectives.base import Inputs, context
from electra_jax.objectives.corruption import frequency_logits
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.reconstruction import copy_sums
from electra_jax.objectives.schedules import Ramp, at
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.optimizer import adam_state, only_trained
from electra_jax.training.program import Program, make_program
from electra_jax.training.step import TrainState

BATCH = tiny.packed(8)
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

EVERYTHING = Masked(  # of two rows of four and two tokens
    masked_ids=jnp.zeros((2, 6), jnp.int32),
    masked_positions=jnp.array([[0, 1, 2, 3, 0, 0], [0, 1, 0, 0, 0, 0]]),
    labels=jnp.zeros((2, 6), jnp.int32),
    weights=jnp.array([[1.0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
)
ROWS = {
    "input_ids": jnp.array([[2, 7, 8, 3, 0, 0], [2, 3, 0, 0, 0, 0]]),
    "segment_ids": jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
}
SECOND_AND_THIRD = dataclasses.replace(
    EVERYTHING,
    masked_positions=jnp.array([[2, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
    weights=jnp.array([[1.0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]),
)


def test_electra_15_by_hand():
    """Odds of "replaced" 1, 3, 1/3, 3, 9, 9 in the first row; tokens 1 and 2 are judged."""
    objective = tiny.objective("electra_15")
    verdicts = jnp.log(jnp.array([[1.0, 3, 1 / 3, 3, 9, 9], [9.0, 9, 9, 9, 9, 9]]))
    corrupted = jnp.array([[2, 9, 8, 3, 0, 0], [2, 3, 0, 0, 0, 0]])
    pairs = objective.detection_sums(verdicts, corrupted, Inputs(ROWS, SECOND_AND_THIRD, SAMPLES))
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
    right = np.exp([-1, -2, -0.5])  # probability of the right verdict
    said = np.array([1 / 2, 3 / 4, 1 / 2])
    cross_entropy = -right * np.log(said) - (1 - right) * np.log(1 - said)
    np.testing.assert_allclose(pairs["baseline_loss"], [cross_entropy.sum(), 3], rtol=1e-6)
    np.testing.assert_allclose(pairs["reward"], [3.5, 3])


def test_replace_mlm_equals_a_recomputation():
    """Loss of the discriminator on the corrupted text, at the predicted positions."""
    objective = tiny.objective("replace_mlm", init_stddev=0.2)
    params, batch = init(objective), FOUR
    masked = mask(objective, batch)

    @jax.jit
    def logits_of_main_network(params):
        model = objective.bind(params)
        proposed = model.generate(masked.masked_ids, context(batch), masked.masked_positions, None)
        _, corrupted = objective.corrupt(proposed, batch, masked, SAMPLES, None)
        hidden = model.discriminator_states(corrupted, context(batch), None)
        logits = model.discriminator.head(hidden, model.embeddings.word[...])
        return jnp.take_along_axis(logits, masked.masked_positions[..., None], axis=1)

    used = np.asarray(masked.weights) > 0
    logits = np.asarray(logits_of_main_network(params), np.float64)[used]
    labels = np.asarray(masked.labels)[used]
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -log_softmax[np.arange(len(labels)), labels].sum()
    pairs = sums(objective, params, batch, masked)
    np.testing.assert_allclose(pairs["reconstruction_loss"], [expected, len(labels)], rtol=1e-5)
    hits = (logits.argmax(axis=-1) == labels).sum()
    np.testing.assert_array_equal(pairs["reconstruction_accuracy"], [hits, len(labels)])


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
        verdicts = model.discriminate(corrupted, context(batch), None)
        verdicts, is_replaced = (
            jnp.take_along_axis(x, masked.masked_positions, axis=1)
            for x in (verdicts, corrupted != batch["input_ids"])
        )
        return logits, samples, verdicts, is_replaced, model.generator.baseline(states)[..., 0]

    used = np.asarray(masked.weights) > 0
    logits, samples, verdicts, is_replaced, baseline = (
        np.asarray(x)[used].astype(np.float64) for x in parts(params)
    )
    rows, labels = np.arange(len(logits)), np.asarray(masked.labels)[used]
    logits /= 2.0
    logits[rows, labels] = -np.inf
    log_probability = logits[rows, samples.astype(int)] - np.log(np.exp(logits).sum(axis=-1))
    reward = np.log1p(np.exp(np.where(is_replaced, -verdicts, verdicts)))
    expected = -((reward - np.log1p(np.exp(-baseline))) * log_probability).sum()
    pairs = sums(objective, params, batch, masked)
    np.testing.assert_allclose(pairs["policy_loss"], [expected, len(rows)], rtol=1e-5)


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
    lines = ["tokens start words", "words start with tokens"] * 5
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
    trained = tokenizers.train("wordpiece", lines, 100, **settings)
    config = get_config()
    config.generator.kind = "uniform"
    uniform = make_objective(config, trained)
    config.generator.kind = "unigram"
    flat = make_objective(config, trained, np.full(trained.vocab_size, 7))
    for one, other in zip(*(frequency_logits(x.frequencies) for x in (uniform, flat)), strict=True):
        assert one == other
    assert dataclasses.replace(flat, frequencies=uniform.frequencies) == uniform


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
    counts = np.bincount(drawn, minlength=300)
    shares = np.array(frequencies) / sum(frequencies)
    assert (counts[shares == 0] == 0).all()
    expected = shares[shares > 0] * len(drawn)
    statistic = ((counts[shares > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


# Stages and freezing


def run(objective: Objective, num_steps: int, state: TrainState | None = None, **optimizer):
    """The states before and after each step, and the metrics of each, on one device."""
    program = one_device(objective, tuple(optimizer.items()))
    layout = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    states, history = [jax.device_get(state or program.init())], []
    for _ in range(num_steps):
        state = jax.device_put(states[-1], layout)
        state, pairs = program.train_step(state, program.place(BATCH))
        states.append(jax.device_get(state))
        history.append(metrics.summarize(jax.device_get(pairs), objective.loss_terms))
    return states, history


@functools.cache
def one_device(objective: Objective, optimizer: tuple = ()) -> Program:
    mesh = make_mesh(get_config().parallel, jax.devices()[:1])
    return make_program(mesh, objective, tiny.optimizer(**dict(optimizer)), 0)


def moved(before: TrainState, after: TrainState) -> set[str]:
    old, new = tiny.flat(before.params), tiny.flat(after.params)
    return {name for name in old if (old[name] != new[name]).any()}


def with_moments(state: TrainState) -> set[str]:
    return {
        name for name, moment in tiny.flat(adam_state(state.opt_state).nu).items() if moment.any()
    }


@pytest.mark.parametrize("sharing", [pytest.param("none", marks=pytest.mark.slow), "gdes"])
def test_second_stage_begins_with_the_generators_weights_and_freezes_them(sharing):
    width = {"none": {"embedding_size": 32}, "gdes": {}}[sharing]
    objective = tiny.objective("two_stage", sharing, init_stddev=0.1, **width)
    tables = "embeddings/" if sharing == "gdes" else "generator/embeddings/"
    of_generator = starting_with(objective, "generator/", tables)
    states, history = (
        trained("two_stage") if sharing == "gdes" else run(objective, 5, warmup_steps=1)
    )  # steps 0 and 2 have rate 0
    assert moved(states[1], states[2]) == of_generator
    assert with_moments(states[2]) == of_generator
    assert [set(line) & {"mlm_loss", "rtd_loss"} for line in history] == [
        {"mlm_loss"},
        {"mlm_loss"},
        *[{"mlm_loss", "rtd_loss"}] * 3,
    ]
    assert history[1]["loss"] == pytest.approx(history[1]["mlm_loss"], rel=1e-6)
    assert history[3]["loss"] == pytest.approx(50 * history[3]["rtd_loss"], rel=1e-6)

    # Step 2 begins with the copy, and rate 0 leaves it as it is.
    start, copied = states[2].params, states[3].params
    mine, theirs = copied["discriminator"]["encoder"], start["generator"]["encoder"]
    for name, value in tiny.flat(mine).items():
        np.testing.assert_array_equal(value, tiny.flat(theirs)[name], err_msg=name)
    mine, theirs = (
        network_of(params, name)["embeddings"]
        for params, name in ((copied, "discriminator"), (start, "generator"))
    )
    for name, value in tiny.flat(mine).items():
        np.testing.assert_array_equal(value, tiny.flat(theirs)[name], err_msg=name)
    assert moved(states[3], states[4]) == tiny.flat(start).keys() - of_generator
    assert moved(states[2], states[5]) == tiny.flat(start).keys() - of_generator
    assert with_moments(states[5]) == tiny.flat(start).keys() - of_generator
    assert [line["learning_rate"] for line in history] == pytest.approx(
        [0, 1e-3 * (1 - 1 / 2), 0, 1e-3 * (1 - 1 / 98), 1e-3 * (1 - 2 / 98)], rel=1e-5
    )


def test_two_stages_without_a_first_one_have_a_frozen_random_generator():
    """To the bit; the generator is that of step 0, and so are its moments, which are zero."""
    config = get_config()
    config.model.update(hidden_size=32, num_layers=1, embedding_size=8, max_positions=32)
    config.generator.update(sharing="gdes", width=1.0)
    config.algorithm = "two_stage"
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
    trained = tokenizers.train("wordpiece", ["tokens start words"] * 5, 100, **settings)
    two_stage = make_objective(config, trained)
    config.algorithm = "joint"
    config.generator.kind = "frozen"
    frozen = make_objective(config, trained)
    assert frozen == two_stage

    objective = tiny.objective(sharing="gdes", init_stddev=0.1, loss={"generator_steps": 0})
    of_generator = starting_with(objective, "generator/", "embeddings/")
    states, history = run(objective, 3, warmup_steps=1, weight_decay=0.5)
    assert moved(states[0], states[3]) == tiny.flat(states[0].params).keys() - of_generator
    assert not with_moments(states[3]) & of_generator
    assert history[0]["loss"] == pytest.approx(50 * history[0]["rtd_loss"], rel=1e-6)
    assert objective.loss_terms == {"rtd_loss": 50.0}


@dataclasses.dataclass(frozen=True)
class FrozenEncoder(MaskedLanguageModel):
    """Of parameters that have gradients, some do not train."""

    def is_trained(self, name, step):
        return "/encoder/" not in name


def test_frozen_parameters_stay_even_where_they_have_gradients():
    usual = tiny.objective("mlm", init_stddev=0.1)
    objective = FrozenEncoder(usual.model, usual.masking)
    frozen = {name for name in tiny.flat(objective.structure()) if "/encoder/" in name}
    states, _ = run(objective, 3, warmup_steps=1, weight_decay=0.5)
    assert moved(states[0], states[3]) == tiny.flat(states[0].params).keys() - frozen
    assert with_moments(states[3]) == tiny.flat(states[0].params).keys() - frozen
    ones = jax.tree.map(jnp.ones_like, states[0].params)
    kept = only_trained(ones, functools.partial(objective.is_trained, step=None))
    assert {name for name, x in tiny.flat(kept).items() if not x.any()} == frozen


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("electra_15", "replace_mlm") else [])
        for kind in tiny.VARIANTS
    ],
)
def test_resuming_is_exact_and_nothing_is_compiled_after_step_one(kind):
    """Resumed just before, at and after the step where stages and algorithms change."""
    objective = tiny.objective(kind, init_stddev=0.1)
    straight, history = trained(kind)
    with compilations() as compiled:
        for step in (1, 2, 3):
            again, tail = run(objective, 5 - step, straight[step], warmup_steps=1)
            assert tail == history[step:]
            for name, value in tiny.flat(straight[5]).items():
                np.testing.assert_array_equal(tiny.flat(again[-1])[name], value, err_msg=name)
    assert not compiled


@functools.cache
def trained(kind: str):
    return run(tiny.objective(kind, init_stddev=0.1), 5, warmup_steps=1)


def test_names_of_all_metrics_are_in_the_contract():
    text = (Path(__file__).parents[1] / "docs" / "running.md").read_text()
    for kind in tiny.VARIANTS:
        for line in trained(kind)[1]:
            assert [name for name in line if f"`{name}`" not in text] == ["tokens"]


QUICK = ("all_tokens_mlm", "adversarial")  # of the topology tests
TOPOLOGIES = {"sharded": ((2, 2, 2), "jit"), "pmapped": ((8, 1, 1), "pmap")}


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        *[(kind, "sharded") for kind in QUICK],
        *[
            pytest.param(kind, topology, marks=pytest.mark.slow)
            for kind in tiny.VARIANTS
            for topology in TOPOLOGIES
            if topology == "pmapped" or kind not in QUICK
        ],
    ],
)
def test_training_is_the_same_on_any_topology(kind, topology):
    sizes, api = TOPOLOGIES[topology]
    mesh = make_mesh(ConfigDict(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))))
    objective = tiny.objective(kind, init_stddev=0.1)
    program = make_program(
        mesh, objective, tiny.optimizer(warmup_steps=1), 0, num_microbatches=1, api=api
    )
    states, history = trained(kind)
    layout = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    state = jax.device_put(states[0], layout)
    for expected in history:
        state, pairs = program.train_step(state, program.place(BATCH))
        found = metrics.summarize(jax.device_get(pairs), objective.loss_terms)
        assert found == pytest.approx(expected, rel=1e-4)
    expected = tiny.flat(states[5].params)
    for name, value in tiny.flat(state.params).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5, err_msg=name)


def test_ramps():
    ramp = Ramp(3.0, 1.0, 4)
    assert [float(at(ramp, jnp.int32(step))) for step in (0, 1, 4, 100)] == [3.0, 2.5, 1.0, 1.0]
    assert at(ramp, None) == 1.0
    assert at(0.5, jnp.int32(3)) == 0.5


def test_ramps_change_loss_and_temperature():
    objective = tiny.objective("replace_mlm", init_stddev=0.1)  # 3 to 1 in 4 steps
    _, history = trained("replace_mlm")
    weights = [(line["loss"] - line["mlm_loss"]) / line["reconstruction_loss"] for line in history]
    assert weights == pytest.approx([3, 2.5, 2, 1.5, 1], rel=1e-5)
    params, masked = init(objective), mask(objective, FOUR)

    @jax.jit
    def sums_at(step):
        return objective.sums(params, Inputs(FOUR, masked, SAMPLES, step=step))

    early, late = sums_at(jnp.int32(0)), sums_at(jnp.int32(3))
    end = sums(objective, params, FOUR, masked, evaluation=False)
    np.testing.assert_array_equal(late["replaced_fraction"], end["replaced_fraction"])
    assert (early["reconstruction_loss"] != end["reconstruction_loss"]).any()


# Gradient paths


def test_gdes_keeps_the_discriminators_gradients_from_the_generators_tables():
    """Even where the discriminator predicts words, and its output is its table, too."""
    objective = tiny.objective("replace_mlm", sharing="gdes", init_stddev=0.2)
    assert reached(objective, "reconstruction_loss") == starting_with(objective, "discriminator/")
    assert reached(objective, "mlm_loss") == starting_with(objective, "generator/", "embeddings/")
    assert starting_with(objective, "discriminator/embeddings/") == {
        f"discriminator/embeddings/{name}"
        for name in ("word", "position", "token_type", "norm/scale", "norm/bias")
    }
    params = init(objective)
    own = params["discriminator"]["embeddings"]
    shifted = {
        "discriminator": {
            **params["discriminator"],
            "embeddings": {**own, "word": own["word"] + 0.5},
        }
    }
    model = nnx.merge(structure(objective.model)[0], params | shifted)
    np.testing.assert_array_equal(model.discriminator_words(), params["embeddings"]["word"] + 0.5)
    read = network_of(params | shifted, "discriminator")["embeddings"]["word"]
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


def test_main_network_reaches_the_generator_through_shared_tables_only():
    objective = tiny.objective("replace_mlm", init_stddev=0.2)
    tables = "embeddings/"
    assert reached(objective, "reconstruction_loss") == starting_with(
        objective, "discriminator/", tables
    )
    assert reached(objective, "mlm_loss") == starting_with(objective, "generator/", tables)


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

    def logits_of(words):
        return jnp.pad(words, (0, 123), constant_values=PADDED_LOGIT)

    def propose(words):
        rows = jnp.broadcast_to(logits_of(words), (num_draws, 1, 128))
        return masking.proposal_logits(rows, labels, temperature, disallow_correct)

    keys = masking.row_keys(SAMPLES, jnp.arange(num_draws))
    samples = jax.jit(
        lambda words: masking.sample_replacements(
            jnp.broadcast_to(logits_of(words), (num_draws, 1, 128)),
            labels,
            keys,
            temperature,
            disallow_correct,
        )
    )(words)

    def per_draw(words):
        pairs = jax.vmap(
            lambda logits, sample: policy_sums(
                logits[None],
                sample[None],
                table[sample][None],
                jnp.full((1, 1), 0.3),
                jnp.ones((1, 1)),
            )
        )(propose(words), samples)
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


# Parameters


def sized(**changes) -> dict:
    config = get_config()
    for name, value in changes.items():
        section, _, leaf = name.rpartition("__")
        setattr(config[section] if section else config, leaf, value)
    return structure(objective_for(config, 30522).model)[1]


def count(tree: dict) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def test_parameter_counts():
    """Of the small model: V = 30522, E = 128, H = 256, a generator 64 wide."""
    usual = count(sized())
    assert usual == 14_196_219
    tables = (30522 + 512 + 2) * 128
    assert count(sized(generator__sharing="gdes")) == usual + tables + 2 * 128
    generator = 608_064 + 39_098
    assert count(sized(generator__kind="unigram")) == usual - generator
    rtd_head, lm_head = 256 * 256 + 256 + 256 + 1, 256 * 128 + 128 + 2 * 128 + 30522
    assert count(sized(objective="electra_15")) == usual
    assert count(sized(objective="replace_mlm")) == usual - rtd_head + lm_head
    assert count(sized(objective="all_tokens_mlm")) == usual - rtd_head + lm_head + 256 + 1
    assert count(sized(algorithm="adversarial")) == usual + 64 + 1
