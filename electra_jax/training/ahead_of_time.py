"""The train step compiled for TPUs that are not there: memory, collectives, bounds of time."""

import dataclasses
import importlib.util
import os
import re

import jax
from jax.experimental import topologies

from electra_jax.errors import UserError
from electra_jax.objectives.base import Batch
from electra_jax.training.program import Program

GIB = 2**30
TPU = {
    "JAX_PLATFORMS": "cpu",  # a TPU that is there stays free for others
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask a cloud what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilations side by side
    "TPU_ACCELERATOR_TYPE": "v4-8",  # any: only keeps libtpu from warning that it knows none
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# libtpu 0.0.42 overflows the stacks of its threads, of 64 KiB, when it compiles ELECTRA-Small.
LIBTPU_FLAGS = "--fibers_default_thread_stack_size=1048576"


@dataclasses.dataclass(frozen=True)
class Chip:
    """What is published, or told by libtpu 0.0.42, of a kind of TPU."""

    axes: int  # of its network
    memory: float  # GiB that programs may use on one device
    bandwidth: float  # of this memory in bytes/s
    devices: int = 1  # cores that JAX sees as devices of their own


CHIPS = {
    "v3": Chip(2, 15.48, 900e9 / 2, devices=2),
    "v4": Chip(3, 30.75, 1200e9),
    "v5e": Chip(2, 15.75, 819e9),
    "v5p": Chip(3, 95.74, 2765e9),
    "v6e": Chip(2, 31.25, 1638e9),
}


class DoesNotFitError(Exception):
    """The compiler gave up: `needed` of `available` bytes."""

    def __init__(self, needed: float, available: float):
        super().__init__(f"{needed} of {available} bytes")
        self.needed, self.available = needed, available


def find_devices(topology: str | None, num_slices: int) -> tuple[Chip, list[jax.Device]]:
    """The devices of a topology, good for compiling only."""
    allowed = ", ".join(f"{name}:{'x'.join('XYZ'[: chip.axes])}" for name, chip in CHIPS.items())
    name, _, sizes = (topology or "").partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d+" + r"x\d+" * (CHIPS[name].axes - 1), sizes):
        raise UserError(f"--topology is {topology!r}; allowed: {allowed}, such as v5e:16x16")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("the compiler for TPUs, libtpu, is missing: pip install 'jax[tpu]'")
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ.update(TPU, LIBTPU_INIT_ARGS=f"{LIBTPU_FLAGS} {given}".strip())
    jax.config.update("jax_platforms", "cpu")
    x, y, *_ = map(int, sizes.split("x"))
    try:
        found = topologies.get_topology_desc(
            topology,
            "tpu",
            num_slices=num_slices,
            chips_per_host_bounds=(min(x, 2), min(y, 2), 1),
            **({"chip_config_name": "megacore"} if name == "v4" else {}),  # one device a chip
        )
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--topology is {topology!r}: {error}") from error
    return CHIPS[name], list(found.devices)


def compile_step(program: Program, batch: Batch) -> jax.stages.Compiled:
    """The training step for batches of these shapes; DoesNotFitError where memory ran out."""
    try:
        return program.train_step.lower(program.abstract_state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        sizes = [
            float(number) * 1024 ** "BKMGT".index(unit)
            for number, unit in re.findall(r"\b(\d+(?:\.\d+)?)([BKMGT])\b", str(error))
        ]
        if not str(error).startswith("RESOURCE_EXHAUSTED") or len(sizes) < 2:
            raise
        # "... (589.36G) exceeds available HBM (15.75G)", or "Used 16.49G of 15.75G hbm."
        raise DoesNotFitError(*sizes[:2]) from error


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that one device needs, by kind. What is updated in place counts once."""
    sizes = compiled.memory_analysis()
    return {
        "arguments": sizes.argument_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
    }


def bounds(flops: float, sizes: dict[str, int], peak: float, chip: Chip) -> dict[str, float]:
    """What the published peaks allow at best.

    All matrix products at the peak; or the state read once and written once at full bandwidth,
    whichever takes longer. The other traffic of memory and network is left out: it depends on
    what the compiler keeps on the chip, and its counts are not to be trusted in loops.
    """
    seconds = max(flops / peak, 2 * sizes["arguments"] / chip.bandwidth)
    return {"seconds_bound": seconds, "mfu_bound": flops / peak / seconds}
