"""Numbers do not depend on the topology; `test_sharding.py` has where arrays lie."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from electra_jax.monitoring.rates import compilations
from electra_jax.objectives import masking
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.program import Program, make_program
from electra_jax.training.step import TrainState, init_state

pytestmark = pytest.mark.process

BATCH = tiny.packed(16)
SEED = 1

# name: data, fsdp, tensor, micro-batches, api, optimizer sharded
CARRIERS = {
    "one device": (1, 1, 1, 1, "jit", False),
    "one device, 4 microbatches": (1, 1, 1, 4, "jit", False),
    "2 data": (2, 1, 1, 1, "jit", False),
    "2 fsdp, 2 tensor": (1, 2, 2, 1, "jit", False),
    "8 data": (8, 1, 1, 1, "jit", False),
    "8 data, optimizer sharded": (8, 1, 1, 1, "jit", True),
    "2 data, 4 fsdp": (2, 4, 1, 1, "jit", False),
    "4 data, 2 tensor": (4, 1, 2, 1, "jit", False),
    "2 data, 2 fsdp, 2 tensor": (2, 2, 2, 1, "jit", False),
    "2 data, 2 fsdp, 2 tensor, optimizer sharded": (2, 2, 2, 1, "jit", True),
    "2 data, 4 fsdp, 2 microbatches": (2, 4, 1, 2, "jit", False),
    "4 data, 2 fsdp, 2 microbatches, optimizer sharded": (4, 2, 1, 2, "jit", True),
    "8 pmapped": (8, 1, 1, 1, "pmap", False),
    "4 pmapped, 2 microbatches": (4, 1, 1, 2, "pmap", False),
}
SHARDED, PMAPPED = "2 data, 2 fsdp, 2 tensor", "8 pmapped"
SLOW = (
    "2 data",
    "4 pmapped, 2 microbatches",
    "2 data, 2 fsdp, 2 tensor, optimizer sharded",
    "4 data, 2 fsdp, 2 microbatches, optimizer sharded",
)
CASES = [  # carrier, objective, whether it takes long
    *[(carrier, "electra", carrier in SLOW) for carrier in list(CARRIERS)[1:]],
    (SHARDED, "mlm", False),
    *[(SHARDED, kind, True) for kind in tiny.VARIANTS],
    *[(PMAPPED, kind, True) for kind in tiny.VARIANTS],
]


@functools.cache
def program(carrier: str, kind: str) -> Program:
    *axes, parts, api, shard_optimizer = CARRIERS[carrier]
    objective = tiny.objective(kind, init_stddev=0.1)
    return make_program(
        tiny.mesh(*axes), objective, tiny.optimizer(), SEED, parts, api, shard_optimizer
    )


@functools.cache
def initial(kind: str) -> TrainState:
    """The state of step 0, on the host."""
    init = functools.partial(init_state, tiny.objective(kind, init_stddev=0.1), tiny.optimizer())
    return jax.device_get(jax.jit(init, static_argnums=0)(SEED))


def start(program: Program, kind: str) -> TrainState:
    layout = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    return jax.device_put(initial(kind), layout)


@functools.cache
def train(carrier: str, kind: str) -> tuple[dict, list[dict]]:
    """Parameters after five steps, and the metrics of each."""
    running, history = program(carrier, kind), []
    state = start(running, kind)
    for _ in range(5):
        state, sums = running.train_step(state, running.place(BATCH))
        history.append(jax.device_get(sums))
    return tiny.flat(state.params), history


@pytest.mark.parametrize(
    ("carrier", "kind"),
    [
        pytest.param(carrier, kind, marks=[pytest.mark.slow] if is_slow else [])
        for carrier, kind, is_slow in CASES
    ],
)
def test_training_is_the_same_on_any_topology(carrier, kind):
    params, history = train("one device", kind)
    other_params, other_history = train(carrier, kind)
    start = tiny.flat(initial(kind).params)
    assert all((params[name] != start[name]).any() for name in params)
    atol = 1e-6 if carrier == "one device, 4 microbatches" else 1e-5
    for name, value in params.items():
        np.testing.assert_allclose(other_params[name], value, rtol=0, atol=atol, err_msg=name)
    for sums, other in zip(history, other_history, strict=True):
        assert sums.keys() == other.keys()
        for name, value in sums.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, err_msg=name)


def steps(program: Program, state: TrainState, first: int, last: int) -> tuple[TrainState, list]:
    """The state after the steps `first` to `last`, each on a batch of its own, and their sums."""
    history = []
    for step in range(first, last + 1):
        batch = program.place(tiny.packed(16, seed=step))
        state, sums = program.train_step(state, batch)
        history.append(jax.device_get(sums))
    return state, history


@pytest.fixture(scope="module", params=["8 data", "2 data, 4 fsdp", "4 data, 2 tensor"])
def interrupted(request, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray], list[dict]]:
    """Checkpoints with that of step 5, and what comes of 10 steps more where they were made."""
    directory = tmp_path_factory.mktemp("checkpoints")
    origin = program(request.param, "electra")
    with Checkpoints(directory, "hash", keep=1) as checkpoints:
        state, _ = steps(origin, start(origin, "electra"), 1, 5)
        checkpoints.save(5, state, {}, {})
        state, history = steps(origin, state, 6, 15)
    return directory, tiny.flat(state), history


@pytest.mark.parametrize("target", ["one device", "2 data", "2 fsdp, 2 tensor", "8 data"])
def test_a_run_that_moves_goes_on_as_if_it_had_not(interrupted, target):
    directory, expected, expected_history = interrupted
    moved = program(target, "electra")
    with Checkpoints(directory, "hash", keep=1) as checkpoints:
        restored = checkpoints.restore_newest(moved.abstract_state, print)
    state, history = steps(moved, restored.state, 6, 15)
    for name, value in tiny.flat(state).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5, err_msg=name)
    for sums, other in zip(history, expected_history, strict=True):
        for name, value in sums.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-5, err_msg=name)


def test_initial_state_is_the_same_on_any_topology():
    state = program(SHARDED, "electra").init()
    expected = tiny.flat(initial("electra"))
    for name, value in tiny.flat(state).items():
        # A draw near zero is a difference of numbers near one: it is rounded to their precision.
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=2e-8, err_msg=name)


@pytest.mark.parametrize("carrier", [SHARDED, PMAPPED])
def test_evaluation_is_the_same_on_any_topology(carrier):
    def evaluate(carrier: str) -> dict[str, np.ndarray]:
        running = program(carrier, "electra")
        sums = running.eval_step(start(running, "electra").params, running.place(BATCH))
        return jax.device_get(sums)

    expected = evaluate("one device")
    sums = evaluate(carrier)
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        if name == "rtd_auc":  # a score on the border of two bins may fall in either
            assert np.abs(sums[name] - value).sum() <= 4
        else:
            np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("mode", ["clean", "faithful"])
def test_masks_and_samples_are_identical_integers(mode):
    objective = tiny.objective(mode=mode)

    def draw(batch):
        key = jax.random.key(SEED)
        masked = objective.mask(batch, key)
        keys = masking.row_keys(key, batch["row"])
        logits = jax.vmap(lambda key: jax.random.normal(key, (4, 384)))(keys)
        return masked, masking.sample_replacements(logits, masked.labels, keys)

    expected = jax.tree.leaves(jax.device_get(jax.jit(draw)(BATCH)))
    for carrier in ("8 data", SHARDED, PMAPPED):
        carry = jax.pmap if carrier == PMAPPED else jax.jit
        drawn = carry(draw)(program(carrier, "electra").place(BATCH))
        for one, other in zip(expected, jax.tree.leaves(drawn), strict=True):
            np.testing.assert_array_equal(np.reshape(other, one.shape), one)


@pytest.mark.parametrize("carrier", ["one device", SHARDED, PMAPPED])
def test_compiles_once(carrier):
    running = program(carrier, "electra")
    with compilations() as compiled:
        jax.jit(lambda x: x + 1)(1)
        assert compiled  # the event is still called so
        state, _ = running.train_step(running.init(), running.place(BATCH))
        compiled.clear()
        for _ in range(2):
            state, _ = running.train_step(state, running.place(BATCH))
    assert not compiled
