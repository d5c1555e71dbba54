import gc
import os
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from electra_jax.errors import UserError
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.training.checkpoint import Checkpoints, restore_params
from electra_jax.training.job import Evaluator
from electra_jax.training.program import make_program
from electra_jax.training.step import TrainState

pytestmark = pytest.mark.process

MESHES = {
    "8 data": (8, 1, 1),
    "2 data x 4 fsdp": (2, 4, 1),
    "4 data x 2 tensor": (4, 1, 2),
    "2 fsdp x 4 tensor": (1, 2, 4),
    "1 device": (1, 1, 1),
    "2 data": (2, 1, 1),
    "2 data x 2 fsdp": (2, 2, 1),
}


def abstract_state(mesh: str = "1 device", **sizes) -> TrainState:
    objective, optimizer = tiny.objective(**sizes), tiny.optimizer()
    return make_program(tiny.mesh(*MESHES[mesh]), objective, optimizer, seed=0).abstract_state


def make_state(abstract: TrainState, seed: int = 0) -> TrainState:
    """Arbitrary values, subnormal and huge ones among them, in the shapes of a state."""
    rng = np.random.default_rng(seed)

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        exponents = rng.uniform(-40, 38, leaf.shape)
        values = np.asarray(10.0**exponents if leaf.dtype == np.float32 else 7, leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(make, abstract)


def assert_same(found: TrainState | dict, expected: TrainState | dict) -> None:
    found, expected = tiny.flat(found), tiny.flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True, err_msg=name)


def save(directory: Path, steps: dict[int, dict], keep: int = 1, score=None) -> None:
    """Checkpoints with other values for each step, and the metrics that are given."""
    with Checkpoints(directory, "hash", keep, score) as checkpoints:
        for step, found in steps.items():
            checkpoints.save(step, make_state(abstract_state(), seed=step), found, {"of": step})


def judge(metric: str) -> Evaluator:
    return Evaluator(print, ReplacedTokenDetection.metrics, keep_best=metric)


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir())


@pytest.mark.parametrize(
    ("origin", "target"),
    [("8 data", target) for target in MESHES]
    + [
        (origin, target)
        for origin in ("2 data x 4 fsdp", "4 data x 2 tensor")
        for target in ("1 device", "2 data", "2 data x 2 fsdp", "8 data")
    ],
)
def test_state_comes_back_bit_for_bit_on_any_mesh(origin, target, tmp_path):
    state = make_state(abstract_state(origin))
    with Checkpoints(tmp_path / "made", "hash", keep=1) as checkpoints:
        checkpoints.save(3, state, {}, {})
    with Checkpoints(tmp_path / "made", "hash", keep=1) as checkpoints:
        assert checkpoints.latest_step() == 3
        wanted = abstract_state(target)
        restored = checkpoints.restore_newest(wanted, print).state
    assert_same(restored, state)
    for found, leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert found.sharding == leaf.sharding


def test_saving_goes_on_while_the_state_is_overwritten(tmp_path):
    """The next step consumes its input state: its memory is reused while the save is under way."""
    abstract = abstract_state("2 data x 4 fsdp")
    assert not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(abstract))
    state = make_state(abstract)
    expected = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
    with Checkpoints(tmp_path, "hash", keep=1) as checkpoints:
        checkpoints.save(1, state, {}, {})
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
    with Checkpoints(tmp_path, "hash", keep=1) as checkpoints:
        assert_same(checkpoints.restore_newest(abstract, print).state, expected)


def test_newest_are_kept(tmp_path):
    save(tmp_path, {step: {} for step in range(1, 6)}, keep=2)
    assert steps(tmp_path) == [4, 5]


@pytest.mark.parametrize(
    "metric, values, best",
    [("eval/rtd_auc", (0.5, 0.9, 0.7, 0.6, 0.8), 2), ("eval/loss", (5.0, 4.0, 2.0, 3.0, 6.0), 3)],
)
def test_best_is_kept_beside_the_newest_even_after_resuming(metric, values, best, tmp_path):
    results = {step: {metric: value} for step, value in enumerate(values, 1)}
    for part in (range(1, 4), range(4, 6)):
        save(tmp_path, {step: results[step] for step in part}, score=judge(metric).score)
    assert steps(tmp_path) == sorted({best, 5})


def test_checkpoints_without_the_metric_are_not_the_best(tmp_path):
    """Such as those from before `keep_best` was set, or where AUC had no positives."""
    save(tmp_path, {1: {}, 2: {"eval/rtd_auc": 0.9}}, keep=2)
    later = {3: {"eval/rtd_auc": 0.1}, 4: {}, 5: {}}
    save(tmp_path, later, score=judge("eval/rtd_auc").score)
    assert steps(tmp_path) == [3, 5]


def test_unfinished_checkpoints_do_not_count(tmp_path):
    save(tmp_path, {1: {}}, keep=3)
    (tmp_path / "9.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with Checkpoints(tmp_path, "hash", keep=3) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert checkpoints.restore_newest(abstract_state(), print).step == 1
    save(tmp_path, {9: {}}, keep=3)
    assert steps(tmp_path) == [1, 9]


def test_another_token_store_is_refused_whatever_the_shapes(tmp_path):
    with Checkpoints(tmp_path, "a" * 64, keep=1) as checkpoints:
        checkpoints.save(1, make_state(abstract_state()), {}, {})
    with Checkpoints(tmp_path, "b" * 64, keep=1) as checkpoints:
        larger = abstract_state(vocab_size=999)
        with pytest.raises(UserError, match=r"/1 was trained .* a{12}, but config.data .* b{12}"):
            checkpoints.restore_newest(larger, print)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Checkpoints of the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("two") / "made"
    save(directory, {1: {}, 2: {}}, keep=2)
    return directory


@pytest.fixture
def collected():
    """Tasks that Orbax leaves behind when it cannot read end here, and not in another test."""
    yield
    gc.collect()


DAMAGE = {
    "truncated values": lambda step: [os.truncate(path, 1000) for path in tiny.value_files(step)],
    "missing values": lambda step: [path.unlink() for path in tiny.value_files(step)],
    "truncated index": lambda step: os.truncate(step / "state" / "manifest.ocdbt", 20),
    "missing state": lambda step: shutil.rmtree(step / "state"),
    "empty provenance": lambda step: os.truncate(step / "provenance" / "metadata", 0),
    "missing progress": lambda step: (step / "progress" / "metadata").unlink(),
    "nothing in it": lambda step: [shutil.rmtree(step), step.mkdir()],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_newest_is_kept_aside_and_the_one_before_restored(two, tmp_path, damage):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "2")
    before = sorted(path.name for path in (tmp_path / "2").rglob("*"))
    abstract, lines = abstract_state(), []
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        restored = checkpoints.restore_newest(abstract, lines.append)
        assert (restored.step, restored.progress) == (1, {"of": 1})
        assert_same(restored.state, make_state(abstract, seed=1))
        assert sorted(path.name for path in (tmp_path / "2.damaged.1").rglob("*")) == before
        checkpoints.save(2, restored.state, {}, {})
    assert lines[0].startswith(f"warning: {tmp_path}/2 cannot be read: ")
    assert lines[1:] == [f"warning: {tmp_path}/2 is now 2.damaged.1, and of no further use"]
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        assert checkpoints.restore_newest(abstract, lines.append).step == 2


def test_nothing_is_renamed_where_none_can_be_read(two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for step in ("1", "2"):
        shutil.rmtree(tmp_path / step / "state")
    with (
        Checkpoints(tmp_path, "hash", keep=2) as checkpoints,
        pytest.raises(UserError, match=rf"^{tmp_path}: .* steps 2, 1;"),
    ):
        checkpoints.restore_newest(abstract_state(), print)
    assert steps(tmp_path) == [1, 2]


def test_newest_step_is_known_while_it_is_being_written(tmp_path):
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        assert checkpoints.restore_newest(abstract_state(), print) is None
        checkpoints.save(3, make_state(abstract_state()), {}, {})
        assert checkpoints.latest_step() == 3


def test_full_disk_is_known_before_anything_is_written(tmp_path, monkeypatch):
    state = make_state(abstract_state())
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        checkpoints.save(1, state, {}, {})
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        usage = types.SimpleNamespace(free=size - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(OSError, match="No space left on device") as error:
            checkpoints.save(2, state, {}, {})
        assert error.value.filename == str(tmp_path)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("origin", MESHES)
def test_parameters_come_alone_from_any_mesh(origin, tmp_path):
    states = {step: make_state(abstract_state(origin), seed=step) for step in (3, 12)}
    with Checkpoints(tmp_path, "hash", keep=2) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {}, {})
    for asked, expected in ((None, 12), (3, 3), (12, 12)):
        step, params = restore_params(tmp_path, asked)
        assert step == expected
        assert_same(params, states[expected].params)
        assert all(type(x) is np.ndarray for x in jax.tree.leaves(params))


def test_parameters_are_read_without_the_optimizer(two, tmp_path):
    """Moments are most of the bytes of a state. What is opened is listed where Orbax reads it."""
    opened = []
    read = ocp.type_handlers.NumpyHandler.deserialize

    async def deserialize(self, infos, args=None):
        opened.extend(info.name for info in infos)
        return await read(self, infos, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocp.type_handlers.NumpyHandler, "deserialize", deserialize)
        restore_params(two)
    assert opened and all(name.startswith("params.") for name in opened)


def test_parameters_of_no_checkpoint(two, tmp_path):
    with pytest.raises(UserError, match=rf"^{tmp_path}: there is no checkpoint$"):
        restore_params(tmp_path)
    with pytest.raises(UserError, match=r"there is no checkpoint of step 7; there are 1, 2$"):
        restore_params(two, 7)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("damage", ["truncated values", "truncated index", "missing state"])
def test_parameters_of_a_damaged_checkpoint(damage, two, tmp_path):
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    DAMAGE[damage](tmp_path / "2")
    with pytest.raises(UserError, match=f"^{tmp_path}/2 cannot be read: "):
        restore_params(tmp_path)
