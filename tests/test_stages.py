"""Stages, freezing, ramps and resuming: algorithms are functions of the step alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_objectives import SAMPLES, init, mask, sums

from electra_jax.checks import objective_for
from electra_jax.config import get_config
from electra_jax.modeling.electra import network_of
from electra_jax.monitoring.rates import compilations
from electra_jax.objectives import Objective, metrics
from electra_jax.objectives.base import Inputs
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.schedules import Ramp, at
from electra_jax.training.optimizer import only_trained
from electra_jax.training.step import TrainState

pytestmark = pytest.mark.process

BATCH = tiny.packed(8)
program = functools.cache(tiny.program)


def run(objective: Objective, num_steps: int, state: TrainState | None = None, **optimizer):
    """The states before and after each step, and the metrics of each, on one device."""
    running = program(objective, **optimizer)
    layout = jax.tree.map(lambda x: x.sharding, running.abstract_state)
    states, history = [jax.device_get(state or running.init())], []
    for _ in range(num_steps):
        state = jax.device_put(states[-1], layout)
        state, pairs = running.train_step(state, running.place(BATCH))
        states.append(jax.device_get(state))
        history.append(metrics.summarize(jax.device_get(pairs), objective.loss_terms))
    return states, history


@functools.cache
def trained(kind: str):
    return run(tiny.objective(kind, init_stddev=0.1), 5, warmup_steps=1)


def moved(before: TrainState, after: TrainState) -> set[str]:
    old, new = tiny.flat(before.params), tiny.flat(after.params)
    return {name for name in old if (old[name] != new[name]).any()}


def with_moments(state: TrainState) -> set[str]:
    return {name for name, moment in tiny.flat(tiny.moments(state).nu).items() if moment.any()}


def assert_equal(found, expected) -> None:
    for name, value in tiny.flat(expected).items():
        np.testing.assert_array_equal(tiny.flat(found)[name], value, err_msg=name)


@pytest.mark.parametrize("sharing", [pytest.param("none", marks=pytest.mark.slow), "gdes"])
def test_second_stage_begins_with_the_generators_weights_and_freezes_them(sharing):
    width = {"none": {"embedding_size": 32}, "gdes": {}}[sharing]
    objective = tiny.objective("two_stage", sharing, init_stddev=0.1, **width)
    tables = "embeddings/" if sharing == "gdes" else "generator/embeddings/"
    every = tiny.flat(objective.structure()).keys()
    of_generator = {name for name in every if name.startswith(("generator/", tables))}
    states, history = run(objective, 5, warmup_steps=1)  # steps 0 and 2 have rate 0
    assert moved(states[1], states[2]) == with_moments(states[2]) == of_generator
    terms = [{"mlm_loss"}] * 2 + [{"mlm_loss", "rtd_loss"}] * 3
    assert [set(line) & {"mlm_loss", "rtd_loss"} for line in history] == terms
    assert history[1]["loss"] == pytest.approx(history[1]["mlm_loss"], rel=1e-6)
    assert history[3]["loss"] == pytest.approx(50 * history[3]["rtd_loss"], rel=1e-6)

    # Step 2 begins with the copy, and rate 0 leaves it as it is.
    start, copied = states[2].params, states[3].params
    assert_equal(copied["discriminator"]["encoder"], start["generator"]["encoder"])
    mine, theirs = network_of(copied, "discriminator"), network_of(start, "generator")
    assert_equal(mine["embeddings"], theirs["embeddings"])
    rest = every - of_generator
    assert moved(states[3], states[4]) == moved(states[2], states[5]) == rest
    assert with_moments(states[5]) == rest
    assert [line["learning_rate"] for line in history] == pytest.approx(
        [0, 1e-3 * (1 - 1 / 2), 0, 1e-3 * (1 - 1 / 98), 1e-3 * (1 - 2 / 98)], rel=1e-5
    )


def test_two_stages_without_a_first_one_have_a_frozen_random_generator():
    """To the bit; the generator is that of step 0, and so are its moments, which are zero."""
    config = get_config()
    config.generator.update(sharing="gdes", width=1.0)
    config.algorithm = "two_stage"
    two_stage = objective_for(config)
    config.algorithm = "joint"
    config.generator.kind = "frozen"
    assert objective_for(config) == two_stage

    objective = tiny.objective(sharing="gdes", init_stddev=0.1, loss={"generator_steps": 0})
    states, history = run(objective, 3, warmup_steps=1, weight_decay=0.5)
    every = tiny.flat(states[0].params).keys()
    of_generator = {name for name in every if name.startswith(("generator/", "embeddings/"))}
    assert moved(states[0], states[3]) == every - of_generator
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
    rest = tiny.flat(states[0].params).keys() - frozen
    assert moved(states[0], states[3]) == with_moments(states[3]) == rest
    ones = jax.tree.map(jnp.ones_like, states[0].params)
    kept = only_trained(ones, functools.partial(objective.is_trained, step=None))
    assert {name for name, x in tiny.flat(kept).items() if not x.any()} == frozen


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[] if kind in ("all_tokens_mlm", "two_stage") else pytest.mark.slow
        )
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
            assert_equal(again[-1], straight[5])
    assert not compiled


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
    params, batch = init(objective), jax.device_put(tiny.packed(4))
    masked = mask(objective, batch)

    @jax.jit
    def sums_at(step):
        return objective.sums(params, Inputs(batch, masked, SAMPLES, step=step))

    early, late = sums_at(jnp.int32(0)), sums_at(jnp.int32(3))
    end = sums(objective, params, batch, masked, evaluation=False)
    np.testing.assert_array_equal(late["replaced_fraction"], end["replaced_fraction"])
    assert (early["reconstruction_loss"] != end["reconstruction_loss"]).any()
