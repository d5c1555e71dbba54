"""Arrays lie where the rules say, and every process knows which rows are its own."""

import dataclasses
import inspect
import types
from unittest import mock

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict
from test_parallel import BATCH, PMAPPED, SHARDED, program, start

from electra_jax.errors import UserError
from electra_jax.modeling.params import ParamInfo, path_name
from electra_jax.sharding.mesh import make_mesh, share_of_rows
from electra_jax.sharding.rules import partition_spec, shardings

pytestmark = pytest.mark.process


def by_path(tree, function) -> dict:
    leaves = jax.tree.leaves_with_path(tree)
    return {path_name(path): function(x) for path, x in leaves}


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
    found = shardings(objective.param_infos(), objective.structure(), tiny.mesh(2, 2, 2))
    assert by_path(found, lambda x: tuple(x.spec)) == {
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
    split = partition_spec(ParamInfo(names), shape, tiny.mesh(*axes), over_data=True)
    assert split == PartitionSpec(*expected)


def test_moments_lie_as_their_parameters_unless_they_are_sharded():
    for carrier in (SHARDED, f"{SHARDED}, optimizer sharded"):
        state = program(carrier, "electra").abstract_state
        params, *moments = (
            jax.tree.map(lambda x: x.sharding, tree)
            for tree in (state.params, *tiny.moments(state))
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
        params, *moments = (by_path(x, share) for x in (state.params, *tiny.moments(state)))
        assert all(moment == params for moment in moments)
        return params

    layers = "discriminator/encoder/layers"
    kernels = [
        f"{layers}/{part}/kernel" for part in ("attention/qkv", "attention/out", "up", "down")
    ]
    fsdp = shares("2 data, 4 fsdp")
    assert all(fsdp[name] == 1 / 4 for name in [*kernels, "embeddings/word"])
    assert fsdp[f"{layers}/up/bias"] == fsdp["embeddings/norm/scale"] == 1

    both = shares(SHARDED)
    assert all(both[name] == 1 / 4 for name in kernels)
    assert both[f"{layers}/attention/qkv/bias"] == both[f"{layers}/up/bias"] == 1 / 2
    assert both["generator/encoder/layers/attention/qkv/kernel"] == 1 / 2  # one head: fsdp alone


def test_sharded_moments_stay_so_beside_whole_parameters():
    running = program("8 data, optimizer sharded", "electra")
    state, _ = running.train_step(start(running, "electra"), running.place(BATCH))
    assert all(share(x) == 1 for x in jax.tree.leaves(state.params))
    for moments in tiny.moments(state):
        held = by_path(moments, share)
        whole = {name for name, part in held.items() if part != 1 / 8}
        assert whole == {"generator/head/bias", "discriminator/head/output/bias"}  # 300 and 1


@pytest.mark.parametrize("carrier", [SHARDED, PMAPPED])
def test_place_keeps_rows_in_order(carrier):
    placed = program(carrier, "electra").place(BATCH)
    for name, value in BATCH.items():
        np.testing.assert_array_equal(np.asarray(placed[name]).reshape(value.shape), value)
    held = {shard.data.size for shard in placed["row"].addressable_shards}
    assert held == ({2} if carrier == PMAPPED else {4})


def test_pmapped_state_is_consumed():
    running = program(PMAPPED, "electra")
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
        ([[(0, 2), (4, 6)], [(2, 4), (6, 8)]], [(0, 2), (1, 2)]),  # neighbors in a square of chips
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
