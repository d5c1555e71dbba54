"""Programs for TPUs that are not there: what the command says, and what the devices send."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from electra_jax import compile
from electra_jax.compile import describe
from electra_jax.config import get_config
from electra_jax.errors import UserError
from electra_jax.jobs.compilation import vocab_size
from electra_jax.sharding.collectives import bytes_of, collectives
from electra_jax.training.ahead_of_time import CHIPS, find_devices

pytestmark = pytest.mark.process

ROOT = Path(compile.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the compiler for TPUs is missing: pip install 'jax[tpu]'",
)

TINY = ("--config=configs/tiny.py", "--topology=v5e:2x2")
SMALL = (
    "--config=configs/small.py",
    "--topology=v5e:2x2",
    "--config.model.num_layers=3",
    "--config.batch_size=32",
    "--config.model.dropout=0",  # random numbers take long to compile
    "--config.model.attention_dropout=0",
)


@functools.cache
def run(*flags: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    command = [sys.executable, "-m", "electra_jax.compile", *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def facts(*flags: str) -> dict:
    code, output, errors = run(*flags, "--json")
    assert code == 0, errors
    return json.loads(output)


def script(code: str) -> tuple[str, str]:
    """Output and errors of Python in a process of its own."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    return done.stdout, done.stderr


def sent(found: dict) -> dict[str, int]:
    """Bytes by kind."""
    return {kind: entry["bytes"] for kind, entry in found["collectives"].items()}


# Compiled programs


@needs_libtpu
def test_data_parallelism_sends_the_gradients_and_nothing_else():
    found = facts(*TINY)
    assert found["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert found["fits"]
    gradients = 2 * found["parameters"]  # bfloat16
    assert sent(found).keys() == {"all-reduce"}
    assert gradients < sent(found)["all-reduce"] < 1.001 * gradients + 1000  # and the metrics


@needs_libtpu
@pytest.mark.parametrize("axis", ["fsdp", "shard_optimizer"])
def test_a_sharded_state_sends_parameters_and_gradients_and_nothing_else(axis):
    flag = "--config.parallel.fsdp=4" if axis == "fsdp" else "--config.parallel.shard_optimizer"
    found = facts(*SMALL, flag)
    assert found["fits"]
    parameters, total = found["parameters"], sent(found)
    assert {*total} == {"all-gather", "all-reduce", "reduce-scatter"}
    width = 2 if axis == "fsdp" else 4  # compute dtype; the parameters themselves
    assert total["all-gather"] == pytest.approx(width * parameters, rel=0.02)
    assert total["reduce-scatter"] + total["all-reduce"] == pytest.approx(2 * parameters, rel=0.02)
    # Which of the two carries how much is the compiler's choice: it goes by the size of the parts.


@needs_libtpu
def test_a_sharded_state_takes_less_room():
    def arguments(*flags: str) -> float:
        found = facts(*SMALL, *flags)
        return found["bytes"]["arguments"] / (4 * found["parameters"])

    # In parameters: three quarters of all three, or one and two quarters; and what is not split.
    assert 0.75 < arguments("--config.parallel.fsdp=4") < 0.9
    assert 1.5 < arguments("--config.parallel.shard_optimizer") < 1.65


@needs_libtpu
def test_what_does_not_fit_is_said_within_seconds():
    code, output, errors = run("--config=configs/large.py", "--topology=v5e:1x1")
    assert (code, errors) == (3, "")
    assert "does not fit, " in output and " of 15.75 GiB" in output


@needs_libtpu
def test_people_get_the_same_in_lines():
    lines = describe(facts(*TINY))
    for part in ("4 chips, 4 devices", "mesh: data 4", "parameters: 1,543,825", "\nfits, 15."):
        assert part in lines
    assert "bound, not a prediction" in lines


@needs_libtpu
def test_memory_of_the_chips_is_what_the_compiler_says():
    for name, chip in CHIPS.items():
        topology = f"{name}:2x2" + "x1" * (chip.axes - 2)
        output, _ = script(f"""
import jax, jax.numpy as jnp
from electra_jax.training.ahead_of_time import find_devices
devices = find_devices({topology!r}, 1)[1]
sharding = jax.sharding.SingleDeviceSharding(devices[0])
x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32, sharding=sharding)
try:
    jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile()
except jax.errors.JaxRuntimeError as error:
    print(len(devices), error)
""")
        assert f"available HBM ({chip.memory:.2f}G)" in output, name
        assert output.startswith(f"{4 * chip.devices} "), name


@needs_libtpu
def test_the_mesh_follows_network_and_slices():
    code = """
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.ahead_of_time import find_devices
from electra_jax.config import get_config

def mesh(topology, slices, fsdp):
    fields = get_config().parallel
    fields.fsdp = fsdp
    return make_mesh(fields, find_devices(topology, slices)[1]).devices

for line in (mesh("v6e:16x16", 1, 8)[:, :, 0], mesh("v5p:4x4x8", 1, 8)[:, :, 0]):
    for row in line:  # along one axis of the network
        assert max(len({d.coords[i] for d in row}) for i in range(3)) == 8
assert [d.slice_index for d in mesh("v5e:2x2", 2, 2)[:, 0, 0]] == [0, 0, 1, 1]
try:
    mesh("v5e:2x2", 2, 8)
except Exception as error:
    print(error)
"""
    expected = "config.parallel.data is 1; allowed: a multiple of the number of slices, 2\n"
    assert script(code) == (expected, "")


# Mistakes


@pytest.mark.parametrize(
    "topology",
    [None, "", "v5e", "v5litepod:2x2", "v9:2x2", "v5e:2", "v4:2x2", "v5e:2x2x1", "cpu:1"],
)
def test_unknown_topologies_are_refused_with_what_is_allowed(topology):
    with pytest.raises(UserError, match=r"--topology is .*; allowed: v3:XxY, v4:XxYxZ, v5e:XxY, "):
        find_devices(topology, 1)


@needs_libtpu
def test_topologies_that_do_not_fit():
    code, _, errors = run("--config=configs/tiny.py", "--topology=v5e:3x5")
    assert code == 2 and errors.startswith("error: --topology is 'v5e:3x5': ")
    code, _, errors = run(*TINY, "--config.parallel.fsdp=3")
    assert code == 2 and "the number of devices, 4" in errors


def test_missing_compiler_says_what_to_install(command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, error = command(compile.main, f"--config={ROOT}/configs/tiny.py", TINY[1])
    assert code == 2 and "pip install 'jax[tpu]'" in error


def test_a_vocabulary_can_be_given(tmp_path):
    data = get_config().data
    assert vocab_size(data) == 30522
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##s\n")
    data.vocab = str(tmp_path / "vocab.txt")
    assert vocab_size(data) == 7


# Text of compiled programs

LOOP = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %turns = s32[]{:T(128)} constant(24)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%count, %turns), direction=LT
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0:T(128)} get-tuple-element(%state), index=1
  %y = f32[8]{0:T(128)S(1)} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[], f32[8]) tuple(%count, %y)
}

ENTRY %main (p: bf16[4,2]) -> bf16[4,8] {
  %p = bf16[4,2]{1,0:T(8,128)(2,1)} parameter(0)
  %state = (s32[], f32[8]) tuple(%zero, %x0)
  %loop = (s32[], f32[8]{0}) while(%state), condition=%condition, body=%body
  ROOT %g = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, dimensions={1}
}
"""


def test_collectives_in_a_loop_count_once_for_every_turn():
    assert collectives(LOOP) == {
        "all-gather": {"count": 1, "bytes": 4 * 8 * 2},
        "all-reduce": {"count": 24, "bytes": 24 * 8 * 4},
    }


def test_the_larger_side_counts():
    text = """
ENTRY %main (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  %q = bf16[2,3]{1,0} parameter(1)
  %both = (f32[16]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%p, %q), to_apply=%add
  ROOT %s = f32[4]{0} reduce-scatter(%p), dimensions={0}
}
"""
    assert collectives(text) == {
        "all-reduce": {"count": 1, "bytes": 64 + 12},
        "reduce-scatter": {"count": 1, "bytes": 64},
    }


def test_what_is_begun_and_ended_counts_once():
    text = """
%part.1 (p: f32[4]) -> f32[16] {
  %p = f32[4]{0} parameter(0)
  ROOT %g.1 = f32[16]{0} all-gather(%p), channel_id=1, frontend_attributes={chain_id="7"}
}

%part.2 (q: f32[4]) -> f32[16] {
  %q = f32[4]{0} parameter(0)
  ROOT %g.2 = f32[16]{0} all-gather(%q), channel_id=1, frontend_attributes={chain_id="7"}
}

ENTRY %main (x: f32[4]) -> f32[16] {
  %x = f32[4]{0} parameter(0)
  %begun = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=2
  %ended = f32[4]{0} collective-permute-done(%begun)
  %a = f32[16]{0} fusion(%x), kind=kCustom, calls=%part.1
  ROOT %b = f32[16]{0} fusion(%a), kind=kCustom, calls=%part.2
}
"""
    assert collectives(text) == {
        "all-gather": {"count": 1, "bytes": 64},
        "collective-permute": {"count": 1, "bytes": 16},
    }


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[]", 4), ("bf16[2,3]{1,0}", 12), ("pred[5]", 5), ("(u8[3], f32[2,2])", 19), ("s4[8]", 8)],
)
def test_bytes_of_shapes(shape, size):
    assert bytes_of(shape) == size
