"""Numbers do not depend on the topology; and arrays lie where the rules say."""

import dataclasses
import functools
import inspect
import math
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from electra_jax.errors import UserError
from electra_jax.modeling.params import ParamInfo, path_name
from electra_jax.monitoring.rates import compilations
from electra_jax.objectives import masking
from electra_jax.sharding.mesh import make_mesh, share_of_rows
from electra_jax.sharding.rules import partition_spec, shardings
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.optimizer import adam_state
from electra_jax.training.program import Program, make_program
from electra_jax.training.step import TrainState, init_state

pytestmark = pytest.mark.process

BATCH = tiny.packed(16)
SEED = 1

# name: data, fsdp, tensor, micro-batches, api, optimiser sharded
CARRIERS = {
    "one device": (1, 1, 1, 1, "jit", False),
    "one device, 4 microbatches": (1, 1, 1, 4, "jit", False),
    "2 data": (2, 1, 1, 1, "jit", False),
    "2 fsdp, 2 tensor": (1, 2, 2, 1, "jit", False),
    "8 data": (8, 1, 1, 1, "jit", False),
    "8 data, optimiser sharded": (8, 1, 1, 1, "jit", True),
    "2 data, 4 fsdp": (2, 4, 1, 1, "jit", False),
    "4 data, 2 tensor": (4, 1, 2, 1, "jit", False),
    "2 data, 2 fsdp, 2 tensor": (2, 2, 2, 1, "jit", False),
    "2 data, 2 fsdp, 2 tensor, optimiser sharded": (2, 2, 2, 1, "jit", True),
    "2 data, 4 fsdp, 2 microbatches": (2, 4, 1, 2, "jit", False),
    "4 data, 2 fsdp, 2 microbatches, optimiser sharded": (4, 2, 1, 2, "jit", True),
    "8 pmapped": (8, 1, 1, 1, "pmap", False),
    "4 pmapped, 2 microbatches": (4, 1, 1, 2, "pmap", False),
}
SLOW = (
    "4 pmapped, 2 microbatches",
    "2 data, 2 fsdp, 2 tensor, optimiser sharded",
    "4 data, 2 fsdp, 2 microbatches, optimiser sharded",
)
OTHERS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in list(CARRIERS)[1:]
]


def mesh(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(ConfigDict({"data": data, "fsdp": fsdp, "tensor": tensor}), devices)


@functools.cache
def program(carrier: str, kind: str) -> Program:
    *axes, parts, api, shard_optimizer = CARRIERS[carrier]
    objective = tiny.objective(kind, init_stddev=0.1)
    return make_program(mesh(*axes), objective, tiny.optimizer(), SEED, parts, api, shard_optimizer)


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


def assert_same_training(carrier: str, kind: str) -> None:
    params, history = train("one device", kind)
    other_params, other_history = train(carrier, kind)
    moved = tiny.flat(initial(kind).params)
    assert all((params[name] != moved[name]).any() for name in params)
    for name, value in params.items():
        np.testing.assert_allclose(other_params[name], value, rtol=0, atol=1e-5, err_msg=name)
    for sums, other in zip(history, other_history, strict=True):
        assert sums.keys() == other.keys()
        for name, value in sums.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("carrier", OTHERS)
def test_training_is_the_same_on_any_topology(carrier):
    assert_same_training(carrier, "electra")


def test_training_a_masked_language_model_is_the_same_too():
    assert_same_training("2 data, 2 fsdp, 2 tensor", "mlm")


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
    state = program("2 data, 2 fsdp, 2 tensor", "electra").init()
    expected = tiny.flat(initial("electra"))
    for name, value in tiny.flat(state).items():
        # A draw near zero is a difference of numbers near one: it is rounded to their precision.
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=2e-8, err_msg=name)


@pytest.mark.parametrize("carrier", ["2 data, 2 fsdp, 2 tensor", "8 pmapped"])
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
    for carrier in ("8 data", "2 data, 2 fsdp, 2 tensor", "8 pmapped"):
        *axes, _, api, _ = CARRIERS[carrier]
        devices = mesh(*axes)
        pmap = functools.partial(jax.pmap, devices=list(devices.devices.flat))
        carry = pmap if api == "pmap" else jax.jit
        drawn = carry(draw)(program(carrier, "electra").place(BATCH))
        for one, other in zip(expected, jax.tree.leaves(drawn), strict=True):
            np.testing.assert_array_equal(np.reshape(other, one.shape), one)


@pytest.mark.parametrize("carrier", ["2 data, 2 fsdp, 2 tensor", "8 pmapped"])
def test_compiles_once(carrier):
    running = program(carrier, "electra")
    with compilations() as compiled:
        state, _ = running.train_step(running.init(), running.place(BATCH))
        compiled.clear()
        for _ in range(2):
            state, _ = running.train_step(state, running.place(BATCH))
    assert not compiled


# Layout


ENCODER = {  # of 5 heads, which 2 does not divide, over 15 wide embeddings
    "encoder/projection/kernel": (None, None),
    "encoder/projection/bias": (None,),
    "encoder/layers/attention/qkv/kernel": (None, "fsdp", None, None, None),
    "encoder/layers/attention/qkv/bias": (None, None, None, None),
    "encoder/layers/attention/out/kernel": (None, None, None, "fsdp"),
    "encoder/layers/attention/out/bias": (None, None),
    "encoder/layers/attention_norm/scale": (None, None),
    "encoder/layers/attention_norm/bias": (None, None),
    "encoder/layers/up/kernel": (None, "fsdp", "tensor"),
    "encoder/layers/up/bias": (None, "tensor"),
    "encoder/layers/down/kernel": (None, "tensor", "fsdp"),
    "encoder/layers/down/bias": (None, None),
    "encoder/layers/output_norm/scale": (None, None),
    "encoder/layers/output_norm/bias": (None, None),
    "head/dense/kernel": ("fsdp", None),
    "head/dense/bias": (None,),
}
DISCRIMINATOR = ENCODER | {
    "head/output/kernel": ("fsdp", None),
    "head/output/bias": (None,),
}
GENERATOR = ENCODER | {  # of 2 heads
    "encoder/layers/attention/qkv/kernel": (None, "fsdp", None, "tensor", None),
    "encoder/layers/attention/qkv/bias": (None, None, "tensor", None),
    "encoder/layers/attention/out/kernel": (None, "tensor", None, "fsdp"),
    "head/norm/scale": (None,),
    "head/norm/bias": (None,),
    "head/bias": (None,),
}
EMBEDDINGS = {
    "word": (None, None),
    "position": (None, None),
    "token_type": (None, None),
    "norm/scale": (None,),
    "norm/bias": (None,),
}


def test_every_parameter_is_split_as_its_axes_say_where_they_divide():
    usual = tiny.objective(embedding_size=15, hidden_size=40, num_heads=5)
    generator = dataclasses.replace(usual.model.generator, num_heads=2)
    model = dataclasses.replace(usual.model, generator=generator)
    objective = dataclasses.replace(usual, model=model)
    found = shardings(objective.param_infos(), objective.structure(), mesh(2, 2, 2))
    leaves = jax.tree.leaves_with_path(found)
    assert {path_name(path): tuple(x.spec) for path, x in leaves} == {
        **{f"discriminator/{name}": spec for name, spec in DISCRIMINATOR.items()},
        **{f"generator/{name}": spec for name, spec in GENERATOR.items()},
        **{f"embeddings/{name}": spec for name, spec in EMBEDDINGS.items()},
    }


TABLE, UP = ("vocab", "embed"), ("layers", "embed", "mlp")


@pytest.mark.parametrize(
    ("names", "shape", "axes", "expected"),
    [
        (TABLE, (300, 8), (8, 1, 1), (None, "data")),  # 8 does not divide 300
        (TABLE, (304, 8), (8, 1, 1), ("data", "fsdp")),
        (TABLE, (304, 8), (2, 2, 2), ("data", "fsdp")),
        (TABLE, (303, 8), (2, 2, 2), (None, "fsdp")),  # nothing is left to split
        (UP, (2, 32, 64), (8, 1, 1), (None, "fsdp", "data")),
        (UP, (2, 32, 64), (4, 1, 2), (None, "data", "tensor")),
        (UP, (2, 32, 64), (2, 2, 2), ("data", "fsdp", "tensor")),
        ((None,), (8,), (8, 1, 1), ("data",)),
        (("vocab",), (3,), (8, 1, 1), (None,)),
    ],
)
def test_moments_are_split_over_data_on_the_largest_whole_axis(names, shape, axes, expected):
    split = partition_spec(ParamInfo(names), shape, mesh(*axes), over_data=True)
    assert split == PartitionSpec(*expected)


def test_moments_lie_as_their_parameters_unless_they_are_sharded():
    for carrier in ("2 data, 2 fsdp, 2 tensor", "2 data, 2 fsdp, 2 tensor, optimiser sharded"):
        state = program(carrier, "electra").abstract_state
        params, *moments = (
            jax.tree.map(lambda x: x.sharding, tree)
            for tree in (state.params, *adam_state(state.opt_state))
        )
        assert moments[0] == moments[1]
        assert (moments[0] == params) == ("sharded" not in carrier)


def share(array: jax.Array) -> float:
    """Part of an array's bytes that one device holds."""
    return array.addressable_shards[0].data.nbytes / array.nbytes


def test_devices_hold_their_share_of_parameters_and_moments():
    def shares(carrier: str) -> dict[str, float]:
        running = program(carrier, "electra")
        state, _ = running.train_step(start(running, "electra"), running.place(BATCH))  # stays so
        trees = state.params, *adam_state(state.opt_state)
        params, *moments = (
            {path_name(path): share(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
            for tree in trees
        )
        assert all(moment == params for moment in moments)
        return params

    layers = "discriminator/encoder/layers"
    kernels = [
        f"{layers}/{part}/kernel" for part in ("attention/qkv", "attention/out", "up", "down")
    ]
    fsdp = shares("2 data, 4 fsdp")
    assert all(fsdp[name] == 1 / 4 for name in [*kernels, "embeddings/word"])
    assert fsdp[f"{layers}/up/bias"] == fsdp["embeddings/norm/scale"] == 1

    both = shares("2 data, 2 fsdp, 2 tensor")
    assert all(both[name] == 1 / 4 for name in kernels)
    assert both[f"{layers}/attention/qkv/bias"] == both[f"{layers}/up/bias"] == 1 / 2
    assert both["generator/encoder/layers/attention/qkv/kernel"] == 1 / 2  # one head: fsdp alone


def test_sharded_state_is_smaller_by_the_number_of_shards():
    def bytes_per_device(carrier: str) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(program(carrier, "electra").abstract_state)
        )

    whole = bytes_per_device("8 data")
    assert whole == bytes_per_device("one device")
    assert bytes_per_device("2 data, 4 fsdp") < 0.35 * whole  # all but biases and the like


def test_sharded_moments_stay_so_beside_whole_parameters():
    running = program("8 data, optimiser sharded", "electra")
    state, _ = running.train_step(start(running, "electra"), running.place(BATCH))
    assert all(share(x) == 1 for x in jax.tree.leaves(state.params))
    for moments in adam_state(state.opt_state):
        leaves = jax.tree_util.tree_leaves_with_path(moments)
        held = {path_name(path): share(x) for path, x in leaves}
        whole = {name for name, part in held.items() if part != 1 / 8}
        assert whole == {"generator/head/bias", "discriminator/head/output/bias"}  # 300 and 1


@pytest.mark.parametrize("carrier", ["2 data, 2 fsdp, 2 tensor", "8 pmapped"])
def test_place_keeps_rows_in_order(carrier):
    placed = program(carrier, "electra").place(BATCH)
    for name, value in BATCH.items():
        np.testing.assert_array_equal(np.asarray(placed[name]).reshape(value.shape), value)
    held = {shard.data.size for shard in placed["row"].addressable_shards}
    assert held == ({2} if carrier == "8 pmapped" else {4})


def test_pmapped_state_is_consumed():
    running = program("8 pmapped", "electra")
    state = start(running, "electra")
    running.train_step(state, running.place(BATCH))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_default_mesh_takes_all_devices():
    devices = make_mesh(ConfigDict({"data": -1, "fsdp": 2, "tensor": 2}))
    assert dict(devices.shape) == {"data": 2, "fsdp": 2, "tensor": 2}


class Split:
    """As much of a sharding of 8 rows as is asked for: the rows of each device of each process."""

    mesh = types.SimpleNamespace(size=8)

    def __init__(self, *processes: list[tuple[int, int]]):
        self.processes = processes

    def devices_indices_map(self, shape: tuple[int]) -> dict[mock.Mock, tuple[slice]]:
        assert shape == (8,)
        return {
            mock.Mock(process_index=process): (slice(*rows),)
            for process, devices in enumerate(self.processes)
            for rows in devices
        }


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        ([[(None, None)]], [(0, 1)]),
        ([[(0, 4)], [(4, 8)]], [(0, 2), (1, 2)]),
        ([[(4, 6), (6, 8)], [(0, 2), (2, 4)]], [(1, 2), (0, 2)]),
        ([[(0, 2), (4, 6)], [(2, 4), (6, 8)]], [(0, 2), (1, 2)]),  # neighbours in a square of chips
        ([[(0, 4), (0, 4)], [(4, 8), (4, 8)]], [(0, 2), (1, 2)]),  # tensor inside a process
        ([[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]], [(0, 2), (0, 2), (1, 2), (1, 2)]),  # and across
    ],
)
def test_every_process_knows_its_share_of_the_rows(processes, shares, monkeypatch):
    for process, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert inspect.unwrap(share_of_rows)(Split(*processes)) == share


@pytest.mark.parametrize(
    "processes", [[[(0, 4), (4, 8)], [(4, 8)]], [[(0, 2)], [(2, 8)]], [[(0, 5)], [(4, 8)]]]
)
def test_rows_that_processes_share_in_part_are_refused(processes):
    with pytest.raises(UserError, match=r"config\.parallel\.tensor gives processes some rows"):
        inspect.unwrap(share_of_rows)(Split(*processes))
