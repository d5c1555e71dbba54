"""Compile the training step of a recipe for TPUs that are not there: does it fit, what is sent?

    python -m electra_jax.compile --config=configs/large.py --topology=v5e:16x16
    python -m electra_jax.compile --config=configs/large.py --topology=v4:4x4x8 \\
        --config.parallel.fsdp=8 --config.model.remat=full

No TPU, no data and no token store are needed, only libtpu: pip install 'jax[tpu]'. What is compiled
is the very program that `electra_jax.main` runs there. Often used are

    --topology=v5p:4x4x4              chips: v3:XxY, v4:XxYxZ, v5e:XxY, v5p:XxYxZ, v6e:XxY
    --num_slices=2                    so many of them, joined by a slower network
    --json                            print one JSON object
    --config.FIELD=VALUE              as in training

Exit codes: 0 it fits; 2 a mistake in the configuration or the flags; 3 it does not fit.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections import defaultdict

import jax
import numpy as np
from absl import flags
from jax.experimental import topologies
from ml_collections import ConfigDict

from electra_jax import cli, parallel
from electra_jax.config import validate
from electra_jax.data import tokenizer as tokenizers
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.data.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.flops import peak_flops, train_flops_per_token
from electra_jax.objectives import make_objective
from electra_jax.optimizer import OptimizerConfig

GIB = 2**30
DOES_NOT_FIT = 3

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


# The command


def main() -> None:
    """Compile the recipe, print what comes out, and exit."""
    values = cli.recipe_flags()
    topology = flags.DEFINE_string(
        "topology", None, "chips, such as v5e:16x16 or v4:4x4x8", flag_values=values
    )
    slices = flags.DEFINE_integer(
        "num_slices", 1, "number of such slices", lower_bound=1, flag_values=values
    )
    as_json = flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)
    config, _ = cli.parse_with_recipe(values, __doc__)
    facts = examine(config, topology.value, slices.value)
    print(json.dumps(facts, indent=1) if as_json.value else describe(facts))
    sys.exit(0 if facts["fits"] else DOES_NOT_FIT)


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
    mesh = parallel.make_mesh(config.parallel, devices)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = parallel.program_of(config, mesh, objective, optimizer)
    length = config.data.sequence_length
    per_token = train_flops_per_token(
        objective.model,
        length,
        objective.masking.max_predictions(length),
        objective.generator_passes,
    )
    facts = {
        "topology": topology,
        "num_slices": num_slices,
        "chips": len(devices) // chip.devices,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": sum(x.size for x in jax.tree.leaves(program.abstract_state.params)),
        "flops_per_device": per_token * config.batch_size * length / len(devices),
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


def describe(facts: dict) -> str:
    """The lines that a person reads."""
    gib = lambda size: f"{size / GIB:,.2f} GiB"  # noqa: E731
    free = facts["bytes_available"] - facts["bytes_needed"]
    kinds = "".join(f"\n  {kind}: {gib(size)}" for kind, size in facts.get("bytes", {}).items())
    lines = [
        f"{facts['topology']} x {facts['num_slices']}: {facts['chips']} chips, "
        f"{facts['devices']} devices",
        "mesh: " + ", ".join(f"{axis} {size}" for axis, size in facts["mesh"].items()),
        f"parameters: {facts['parameters']:,}",
        f"a device needs {gib(facts['bytes_needed'])} of {gib(facts['bytes_available'])}{kinds}",
        f"fits, {gib(free)} free" if facts["fits"] else f"does not fit, {gib(-free)} too much",
        f"matrix products: {facts['flops_per_device'] / 1e12:,.3f} TFLOP a device and step",
    ]
    if "collectives" in facts:
        lines += [
            f"{kind}: {entry['count']} a step, {entry['bytes'] / 1e6:,.2f} MB"
            for kind, entry in facts["collectives"].items()
        ] or ["no collectives"]
        lines.append(
            f"bound, not a prediction: a step takes at least {facts['seconds_bound'] * 1e3:,.3f} "
            f"ms, MFU is at most {facts['mfu_bound']:.0%}"
        )
    lines.append(f"compiled in {facts['compile_seconds']:.0f} s")
    return "\n".join(lines)


# Devices and vocabulary


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


# The compiled step


def compile_step(program: parallel.Program, config: ConfigDict) -> jax.stages.Compiled:
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


KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BEGINNING = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)")
SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.-]+)")


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Collectives by kind, with `count` and `bytes` of one device in one run of a program.

    What stands in a loop counts once for every turn: the turns are read from the condition of the
    loop, a counter from 0 that is compared with a constant. A collective that the compiler has
    taken apart, to go on beside other work, is one: its parts have one `chain_id`.
    Bytes are those of what goes in; of an all-gather, of what comes out.

    Args:
      hlo: text of the optimised module.
    """
    sizes, constants, caller, found = {}, defaultdict(list), {}, {}
    computation = ""
    for line in re.sub(r"/\*.*?\*/|\{[^{}=]*\}(?= |,|\))", "", hlo).splitlines():
        if match := BEGINNING.match(line):
            computation = match[1]
        elif match := INSTRUCTION.match(line):
            name, shape, operation, operands, attributes = match.groups()
            sizes[name] = bytes_of(shape)
            if operation == "constant" and operands.isdecimal():
                constants[computation].append(int(operands))
            called = CALLED.findall(attributes)
            turns_of = called[0] if operation == "while" else None
            for callee in called:
                caller[callee] = computation, turns_of
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                given = sum(sizes[x.split("%")[-1]] for x in operands.split(", "))
                if kind == "all-gather":  # one that is only begun repeats its operands
                    given = sizes[name] - given * operation.endswith("-start")
                chain = re.search(r'chain_id="\d+"', attributes)
                key = chain[0] if chain else name
                found.setdefault(key, (kind, given, computation))

    def times(computation: str) -> int:
        if computation not in caller:
            return 1
        outer, condition = caller[computation]
        turns = constants[condition][0] if condition and constants[condition] else 1
        return turns * times(outer)

    totals: dict[str, dict[str, int]] = {}
    for kind, size, computation in found.values():
        entry = totals.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += times(computation)
        entry["bytes"] += times(computation) * size
    return dict(sorted(totals.items()))


def bytes_of(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, written as in HLO: `bf16[2,3]`."""
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * max(8, int(bits or 8)) // 8
        for _, bits, sizes in SHAPE.findall(shape)
    )


if __name__ == "__main__":
    cli.run(main)
