"""The compiled train step: what it costs, what it repeats, what it adds up."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.training import step
from electra_jax.training.program import Program
from electra_jax.training.step import TrainState

BATCH = tiny.packed(8)


@functools.cache
def usual_program() -> Program:
    return tiny.program(tiny.objective(dropout=0.1, attention_dropout=0.1), learning_rate=3e-3)


def train(
    program: Program, num_steps: int, state: TrainState | None = None
) -> tuple[TrainState, list[dict[str, np.ndarray]]]:
    """The last state and the metrics of each step, from `state` or from the start."""
    state, history = state or program.init(), []
    for _ in range(num_steps):
        state, sums = program.train_step(state, program.place(BATCH))
        history.append(jax.device_get(sums))
    return state, history


def mean(sums, name: str) -> float:
    return sums[name][0] / sums[name][1]


def assert_equal(left, right) -> None:
    right = tiny.flat(right)
    for name, value in tiny.flat(left).items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_no_logits_for_every_token():
    """The generator's head sees predicted positions only, forward and backward."""
    program = usual_program()
    text = program.train_step.lower(program.abstract_state, program.place(BATCH)).as_text()
    assert "8x4x384xf32" in text
    for columns in (tiny.VOCAB, 384):
        assert f"8x32x{columns}x" not in text
        assert f"256x{columns}x" not in text


def test_state_is_donated():
    program = usual_program()
    compiled = program.train_step.lower(program.abstract_state, program.place(BATCH)).compile()
    size = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(program.abstract_state))
    assert compiled.memory_analysis().alias_size_in_bytes >= size

    state = program.init()
    program.train_step(state, program.place(BATCH))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_loss_falls_and_repeats_bit_for_bit():
    state, history = train(usual_program(), 30)
    again, same_history = train(usual_program(), 30)
    for term in ("mlm_loss", "rtd_loss"):
        losses = [mean(sums, term) for sums in history]
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    assert_equal(state, again)
    assert_equal(history, same_history)


@dataclasses.dataclass(frozen=True)
class FixedMasks(MaskedLanguageModel):
    """The same masks in all steps, so that nothing but dropout is random."""

    def mask(self, batch, key):
        return super().mask(batch, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class OftenIll(MaskedLanguageModel):
    """A loss that is not finite where the first token of the batch says so."""

    def sums(self, params, inputs):
        sums = super().sums(params, inputs)
        poison = jnp.where(inputs.batch["input_ids"][0, 1] == tiny.MASK, jnp.nan, 1.0)
        return sums | {"mlm_loss": sums["mlm_loss"] * poison}


def test_update_that_is_not_finite_changes_nothing_but_the_step():
    usual = tiny.objective("mlm")
    ill = tiny.program(OftenIll(usual.model, usual.masking), warmup_steps=1)
    state, _ = train(ill, 2)
    before = jax.tree.map(np.array, state)
    bad_ids = BATCH["input_ids"].copy()
    bad_ids[0, 1] = tiny.MASK
    state, sums = ill.train_step(state, ill.place(BATCH | {"input_ids": bad_ids}))
    assert np.isnan(sums["grad_norm"][0]) and np.isnan(sums["mlm_loss"][0])
    assert_equal(before, dataclasses.replace(state, step=state.step - 1))
    after, _ = ill.train_step(state, ill.place(BATCH))
    old, new = tiny.flat(before), tiny.flat(after)
    assert {name for name in new if not np.array_equal(new[name], old[name])} > {"step"}
    assert all(np.isfinite(value).all() for value in new.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_is_drawn_anew_in_every_step(dropout):
    usual = tiny.objective("mlm", dropout=dropout, init_stddev=0.2)
    fixed = tiny.program(FixedMasks(usual.model, usual.masking), warmup_steps=1)
    first, second = train(fixed, 2)[1]  # step 0 has rate 0: both see the same parameters
    assert (first["mlm_loss"][0] == second["mlm_loss"][0]) == (dropout == 0)


def test_metrics_are_sums_and_weights():
    program = usual_program()
    _, (_, sums) = train(program, 2)
    real = int((BATCH["segment_ids"] > 0).sum())
    sizes = (BATCH["segment_ids"] > 0).sum(axis=1)
    predictions = sum(max(1, round(0.15 * int(size))) for size in np.minimum(sizes, 29))
    rate = 3e-3 * 0.99 * 0.5
    np.testing.assert_allclose(sums["learning_rate"], [rate, 1], rtol=1e-6)
    np.testing.assert_array_equal(sums["tokens"], [real, 1])
    assert sums["grad_norm"][0] > 0 and sums["grad_norm"][1] == 1
    for name in ("mlm_loss", "mlm_accuracy", "sampled_mlm_accuracy"):
        assert sums[name][1] == predictions
    for name in ("rtd_loss", "rtd_accuracy", "replaced_fraction"):
        assert sums[name][1] == real
    assert sums["rtd_recall"][1] == sums["replaced_fraction"][0]
    assert all(value.dtype == jnp.float32 for value in sums.values())


def test_microbatches_take_every_other_row():
    parts = step.split_rows(jnp.arange(6), 2)
    np.testing.assert_array_equal(parts, [[0, 2, 4], [1, 3, 5]])
