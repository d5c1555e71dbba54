"""Checkpoints that TensorFlow has written, read by it: whole, cut and damaged."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import weights

from electra_jax.errors import UserError
from electra_jax.interop import tensorflow1
from electra_jax.interop.pretrained import load_encoder

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

COMMITTED = Path(__file__).parent / "tf_checkpoint" / "model.ckpt-7"


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint of the original, written by TensorFlow."""
    tensorflow = pytest.importorskip("tensorflow")
    weights.save_original(tmp_path, weights.random_params(weights.recipe())[1])
    variables = dict(sorted(np.load(tmp_path / "model.ckpt-7.npz").items()))  # as TensorFlow does
    (tmp_path / "model.ckpt-7.npz").unlink()
    slices = [""] * len(variables)
    prefix = str(tmp_path / "model.ckpt-7")
    tensorflow.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[*variables],
        shape_and_slices=slices,
        tensors=[tensorflow.constant(x) for x in variables.values()],
    )
    return tmp_path


def test_a_checkpoint_gives_the_parameters_back(saved):
    pretrained = load_encoder(str(saved))
    params = weights.random_params(weights.recipe())[1]
    weights.assert_equal(tiny.flat(pretrained.params), weights.main_network(params))
    assert any(line.startswith("global_step -> not used") for line in pretrained.table)


def test_a_checkpoint_of_many_variables():
    """120, so that the index has several blocks; value i in the variable `i`."""
    pytest.importorskip("tensorflow")
    found, left_out = tensorflow1.read(COMMITTED)
    assert (len(found), {*left_out}) == (120, {"global_step"})
    for i in range(120):
        name = f"electra/encoder/layer_{i}/attention/self/query/kernel"
        expected = np.full((1, 2), i, np.float32)
        np.testing.assert_array_equal(found[name], expected, strict=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:100] + b"0123456789" + content[110:],
        None,
    ],
    ids=["cut", "empty", "damaged", "missing"],
)
@pytest.mark.parametrize("suffix", ["index", "data-00000-of-00001"])
def test_what_is_not_whole_is_refused_in_one_line(suffix, change, saved):
    path = saved / f"model.ckpt-7.{suffix}"
    content = path.read_bytes()
    path.unlink()
    if change:
        path.write_bytes(change(content))
    with pytest.raises(UserError) as error:
        load_encoder(str(saved))
    assert str(saved) in str(error.value) and "\n" not in str(error.value)
