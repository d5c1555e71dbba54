"""TensorFlow's checkpoints, read without it; files that were cut, damaged or made up."""

import struct
from pathlib import Path

import bundles
import jax.numpy as jnp
import numpy as np
import pytest

from electra_jax.errors import UserError
from electra_jax.interop.tensor_bundle import read_index

WRITTEN_BY_TENSORFLOW = Path(__file__).parent / "tf_checkpoint" / "model.ckpt-7"


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    layers = {f"layer_{i}/kernel": rng.normal(size=(3, 2)).astype("f4") for i in range(70)}
    return layers | {
        "scalar": np.array(4_000_000, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.arange(3, dtype=np.float16),
        "brain": np.arange(3).astype(jnp.bfloat16),
        "double": np.arange(3.0),
        "whole": np.arange(3, dtype=np.int32),
        "truth": np.array([True, False]),
    }


def test_every_tensor_comes_back(tmp_path):
    bundles.write_bundle(tmp_path / "model", tensors())
    found = read_index(tmp_path / "model")
    assert found.keys() == tensors().keys()
    for name, expected in tensors().items():
        np.testing.assert_array_equal(found[name].read(), expected, strict=True)


def test_a_checkpoint_that_tensorflow_has_written():
    """120 variables, so that the index has several blocks; value i in the variable `i`."""
    found = read_index(WRITTEN_BY_TENSORFLOW)
    assert len(found) == 121
    assert found["global_step"].read() == 7
    for i in range(120):
        name = f"electra/encoder/layer_{i}/attention/self/query/kernel"
        np.testing.assert_array_equal(found[name].read(), np.full((1, 2), i, np.float32))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model.index: cannot be read: No such file"):
        read_index(tmp_path / "model")
    bundles.write_bundle(tmp_path / "model", tensors())
    (tmp_path / "model.data-00000-of-00001").unlink()
    with pytest.raises(UserError, match=r"model.data-00000-of-00001: there is no such file"):
        read_index(tmp_path / "model")


def test_data_that_is_cut_off_is_named(tmp_path):
    bundles.write_bundle(tmp_path / "model", tensors())
    path = tmp_path / "model.data-00000-of-00001"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"has 1,\d+ bytes, but whole ends at 1,\d+; .*cut off"):
        read_index(tmp_path / "model")


def test_no_damage_of_the_index_goes_unnoticed_or_is_a_fault_of_ours(tmp_path):
    """Every byte cut off or changed gives one clear error, or nothing changes."""
    some = {name: x for name, x in tensors().items() if "layer" not in name}
    bundles.write_bundle(tmp_path / "model", some)
    path = tmp_path / "model.index"
    whole = path.read_bytes()
    damaged = [whole[:i] for i in range(len(whole))]
    for i in range(len(whole)):
        for change in (0x01, 0x80, 0xFF):
            damaged.append(whole[:i] + bytes([whole[i] ^ change]) + whole[i + 1 :])
    unnoticed = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            found = read_index(tmp_path / "model")
        except UserError:
            continue
        unnoticed += 1
        assert {name: x.read().tobytes() for name, x in found.items()} == {
            name: x.tobytes() for name, x in some.items()
        }
    # Padding in the footer, and a block that tables have and checkpoints leave empty.
    assert unnoticed <= 3 * (bundles.FOOTER_BYTES - 8 + len(bundles.block({})))


def entry(name: bytes, content: bytes) -> dict[bytes, bytes]:
    return {b"": bundles.field(1, 1), name: content}


LENGTHS = bundles.field(1, 1) + bundles.field(2, bundles.field(2, bundles.field(1, 2)))
HOSTILE = {
    "a shape of more bytes than there are": (
        entry(b"x", LENGTHS + bundles.field(5, 4)),
        "x has 4 bytes, which its shape",
    ),
    "a place far outside": (
        entry(b"x", LENGTHS + bundles.field(5, 8) + bundles.field(4, 2**40)),
        "cut off",
    ),
    "a negative size": (
        entry(b"x", bundles.field(1, 1) + bundles.field(5, 2**64 - 8)),
        "impossible shape or place",
    ),
    "a negative dimension": (
        entry(b"x", bundles.field(2, bundles.field(2, bundles.field(1, 2**64 - 1)))),
        "impossible shape or place",
    ),
    "a partitioned variable": (entry(b"x", LENGTHS + bundles.field(7, b"")), "x is partitioned"),
    "text": (entry(b"x", bundles.field(1, 7)), "x has the data type 7"),
    "another file": (entry(b"x", LENGTHS + bundles.field(3, 9)), "x is in file 9 of 1"),
    "no UTF-8": (entry(b"\xff", LENGTHS), "not readable as a TensorFlow checkpoint"),
    "bytes for a number": (entry(b"x", bundles.field(1, b"1")), "impossible shape or place"),
    "a number for a shape": (entry(b"x", bundles.field(2, 1)), "a number in the place of"),
    "a group": (entry(b"x", bytes([1 << 3 | 3])), "wire type 3"),
    "a field that does not end": (entry(b"x", b"\x0a\x7f"), "outside of its message"),
    "a number that does not end": (entry(b"x", b"\xff" * 20), "more than 10 bytes"),
    "big-endian": ({b"": bundles.field(1, 1) + bundles.field(2, 1)}, "big-endian"),
    "a million files": ({b"": bundles.field(1, 10**6)}, "1000000 files of data"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_well_made_indices_with_hostile_content_are_refused(case, tmp_path):
    content, message = HOSTILE[case]
    (tmp_path / "model.index").write_bytes(bundles.table(content))
    (tmp_path / "model.data-00000-of-00001").write_bytes(b"12345678")
    with pytest.raises(UserError, match=message):
        read_index(tmp_path / "model")


def test_compressed_blocks_are_refused(tmp_path):
    whole = bundles.table({b"": bundles.field(1, 1)})
    size = len(bundles.block({b"": bundles.field(1, 1)})) - 5
    path = tmp_path / "model.index"
    path.write_bytes(whole[:size] + b"\x01" + whole[size + 1 :])
    with pytest.raises(UserError, match="compressed"):
        read_index(tmp_path / "model")
    path.write_bytes(b"\0" * 40 + struct.pack("<Q", bundles.MAGIC))
    with pytest.raises(UserError, match="a block lies outside of it"):
        read_index(tmp_path / "model")
