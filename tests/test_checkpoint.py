from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from ml_collections import ConfigDict

from electra_jax import parallel
from electra_jax.checkpoint import Checkpoints
from electra_jax.errors import UserError
from electra_jax.step import TrainState

MESHES = {
    "8 data": (8, 1, 1),
    "2 data x 4 fsdp": (2, 4, 1),
    "2 fsdp x 4 tensor": (1, 2, 4),
    "1 device": (1, 1, 1),
}


def mesh(name: str) -> Mesh:
    data, fsdp, tensor = MESHES[name]
    sizes = ConfigDict({"data": data, "fsdp": fsdp, "tensor": tensor})
    return parallel.make_mesh(sizes, jax.devices()[: data * fsdp * tensor])


def abstract_state(mesh_name: str) -> TrainState:
    program = parallel.make_program(mesh(mesh_name), tiny.objective(), tiny.optimizer(), seed=0)
    return program.abstract_state


def make_state(abstract: TrainState, seed: int = 0) -> TrainState:
    """Arbitrary values, subnormal and huge ones among them, in the shapes of a state."""
    rng = np.random.default_rng(seed)

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        exponents = rng.uniform(-40, 38, leaf.shape)
        values = np.asarray(10.0**exponents if leaf.dtype == np.float32 else 7, leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(make, abstract)


def assert_same(found: TrainState, expected: TrainState) -> None:
    found, expected = tiny.flat(found), tiny.flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True, err_msg=name)


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir())


@pytest.mark.parametrize("target", MESHES)
def test_state_comes_back_bit_for_bit_on_any_mesh(target, tmp_path):
    state = make_state(abstract_state("8 data"))
    with Checkpoints(tmp_path / "made", "hash", keep=1) as checkpoints:
        checkpoints.save(3, state, {})
    with Checkpoints(tmp_path / "made", "hash", keep=1) as checkpoints:
        assert checkpoints.latest_step() == 3
        wanted = abstract_state(target)
        restored = checkpoints.restore(3, wanted)
    assert_same(restored, state)
    for found, leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert found.sharding == leaf.sharding


def test_a_mesh_that_splits_parameters_is_among_them():
    leaves = jax.tree.leaves(abstract_state("2 data x 4 fsdp"))
    assert not all(leaf.sharding.is_fully_replicated for leaf in leaves)


def test_saving_goes_on_while_the_state_is_overwritten(tmp_path):
    """The next step consumes its input state: its memory is reused while the save is under way."""
    abstract = abstract_state("2 data x 4 fsdp")
    state = make_state(abstract)
    expected = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
    with Checkpoints(tmp_path, "hash", keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
    with Checkpoints(tmp_path, "hash", keep=1) as checkpoints:
        assert_same(checkpoints.restore(1, abstract), expected)


def test_newest_are_kept(tmp_path):
    state = make_state(abstract_state("1 device"))
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in range(1, 6):
            checkpoints.save(step, state, {})
    assert steps(tmp_path) == [4, 5]


@pytest.mark.parametrize(
    "metric, values, best",
    [("eval/rtd_auc", (0.5, 0.9, 0.7, 0.6, 0.8), 2), ("eval/loss", (5.0, 4.0, 2.0, 3.0, 6.0), 3)],
)
def test_best_is_kept_beside_the_newest_even_after_resuming(metric, values, best, tmp_path):
    state = make_state(abstract_state("1 device"))
    for first, last in ((1, 4), (4, 6)):
        with Checkpoints(tmp_path, "hash", keep=1, keep_best=metric) as checkpoints:
            for step in range(first, last):
                checkpoints.save(step, state, {metric: values[step - 1]})
    assert steps(tmp_path) == sorted({best, 5})


def test_checkpoints_without_the_metric_are_not_the_best(tmp_path):
    """Such as those from before `keep_best` was set, or where AUC had no positives."""
    state = make_state(abstract_state("1 device"))
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.save(2, state, {"eval/rtd_auc": 0.9})
    with Checkpoints(tmp_path, "hash", keep=1, keep_best="eval/rtd_auc") as checkpoints:
        for step, metrics in {3: {"eval/rtd_auc": 0.1}, 4: {}, 5: {}}.items():
            checkpoints.save(step, state, metrics)
    assert steps(tmp_path) == [3, 5]


def test_unfinished_checkpoints_do_not_count(tmp_path):
    abstract = abstract_state("1 device")
    state = make_state(abstract)
    with Checkpoints(tmp_path, "hash", keep=3) as checkpoints:
        checkpoints.save(1, state, {})
    unfinished = tmp_path / "9.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "state").mkdir()
    with Checkpoints(tmp_path, "hash", keep=3) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert_same(checkpoints.restore(1, abstract), state)
        checkpoints.save(9, state, {})
    assert steps(tmp_path) == [1, 9]


def test_another_token_store_is_refused_whatever_the_shapes(tmp_path):
    with Checkpoints(tmp_path, "a" * 64, keep=1) as checkpoints:
        checkpoints.save(1, make_state(abstract_state("1 device")), {})
    with Checkpoints(tmp_path, "b" * 64, keep=1) as checkpoints:
        larger = parallel.make_program(
            mesh("1 device"), tiny.objective(vocab_size=999), tiny.optimizer(), seed=0
        )
        message = (
            r"/1 was trained on the token store a{12}, but config\.data gives the store b{12};"
        )
        with pytest.raises(UserError, match=message):
            checkpoints.restore(1, larger.abstract_state)
