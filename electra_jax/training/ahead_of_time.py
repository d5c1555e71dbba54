"""The train step compiled for TPUs that are not there: memory, collectives, bounds of time."""

import dataclasses
import importlib.util
import os
import re
import time

import jax
import numpy as np
from jax.experimental import topologies
from ml_collections import ConfigDict

from electra_jax.config import validate
from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.modeling.flops import peak_flops
from electra_jax.objectives import make_objective
from electra_jax.sharding.collectives import collectives
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import Program, program_of

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
    """Attributes:
    axes: of its network.
    memory: GiB that programs may use on one device, as libtpu 0.0.42 says when they are too large.
    bandwidth: of this memory in bytes/s, as published.
    devices: cores that JAX sees as devices of their own.
    """

    axes: int
    memory: float
    bandwidth: float
    devices: int = 1


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


def examine(config: ConfigDict, topology: str | None, num_slices: int = 1) -> dict:
    """What is known of the training step of `config` once it is compiled for `topology`.

    Returns:
      `topology`, `chips`, `devices`, `mesh`, `parameters`, `flops_per_device` (of matrix products
      in one step), `bytes_available`, `bytes_needed`, `fits`, `compile_seconds`. When the compiler
      gave up, `bytes_needed` is what it names, which can leave out some of it, and the following
      are missing: `bytes` (by kind, of one device), `collectives` (by kind, `count` and `bytes` of
      one device and step), `seconds_bound` and `mfu_bound`.

    Raises:
      UserError: libtpu is missing, or `topology` or `config` make no sense.
    """
    chip, devices = find_devices(topology, num_slices)
    config = config.copy_and_resolve_references()
    if config.model.dtype == "auto":
        config.model.dtype = "bfloat16"  # what it means on a TPU
    validate(config, len(devices))
    tokenizer = find_tokenizer(config.data)
    counts = np.ones(tokenizer.vocab_size, np.int64)  # of what, does not matter here
    objective = make_objective(config, tokenizer, counts)
    mesh = make_mesh(config.parallel, devices)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = program_of(config, mesh, objective, optimizer)
    num_tokens = config.batch_size * config.data.sequence_length
    flops = objective.flops_per_token(config.data.sequence_length) * num_tokens
    facts = {
        "topology": topology,
        "num_slices": num_slices,
        "chips": len(devices) // chip.devices,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": sum(x.size for x in jax.tree.leaves(program.abstract_state.params)),
        "flops_per_device": flops / len(devices),
    }
    started = time.monotonic()
    try:
        compiled = compile_step(program, config)
    except DoesNotFitError as error:
        needed, available = error.needed, error.available
    else:
        facts["bytes"] = memory(compiled)
        facts["collectives"] = collectives(compiled.as_text())
        needed, available = sum(facts["bytes"].values()), chip.memory * GIB
        facts |= bounds(facts["flops_per_device"], facts["bytes"], peak_flops(devices[0]), chip)
    return facts | {
        "bytes_needed": needed,
        "bytes_available": available,
        "fits": needed <= available,
        "compile_seconds": time.monotonic() - started,
    }


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


def find_tokenizer(data: ConfigDict) -> Tokenizer:
    """The given vocabulary, or one of as many made-up words as a trained one would aim at."""
    settings = {
        "special_tokens": data.special_tokens,
        "lower_case": data.lower_case,
        "strip_accents": data.strip_accents,
        "max_word_chars": data.max_word_chars,
    }
    if data.vocab:
        return tokenizers.from_file(data.vocab, **settings)
    words = (f"word {i}" for i in range(data.vocab_size - len(data.special_tokens)))
    return WordPiece([*data.special_tokens, *words], **settings)


def compile_step(program: Program, config: ConfigDict) -> jax.stages.Compiled:
    """The training step, compiled.

    Raises:
      DoesNotFitError: the compiler ran out of the device's memory.
    """
    rows, length = (config.batch_size,), (config.data.sequence_length,)
    if config.parallel.api == "pmap":
        devices = program.abstract_state.step.sharding.mesh.size
        rows = devices, config.batch_size // devices
    tokens = ("input_ids", "piece_ids", "position_ids", "token_type_ids")
    batch = {name: jax.ShapeDtypeStruct(rows + length, np.int32) for name in tokens}
    batch["row"] = jax.ShapeDtypeStruct(rows, np.int32)
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
