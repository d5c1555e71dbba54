"""The training step of a configuration, compiled for TPUs that are not there."""

import time

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.checks import objective_for, validate
from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import SETTINGS
from electra_jax.modeling.flops import peak_flops
from electra_jax.objectives.base import Batch
from electra_jax.sharding.collectives import collectives
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.ahead_of_time import (
    GIB,
    DoesNotFitError,
    bounds,
    compile_step,
    find_devices,
    memory,
)
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import Program, program_of


def examine(config: ConfigDict, topology: str | None, num_slices: int = 1) -> dict:
    """What is known of the training step of `config` once it is compiled for `topology`, as JSON.

    `flops_per_device` counts the matrix products of one step. Where the compiler gave up,
    `bytes_needed` is what it names, which can leave out some of it, and the following are missing:
    `bytes` (by kind, of one device), `collectives` (by kind, `count` and `bytes` of one device and
    step), `seconds_bound` and `mfu_bound`. Raises UserError where libtpu is missing, or `topology`
    or `config` make no sense.
    """
    chip, devices = find_devices(topology, num_slices)
    config = config.copy_and_resolve_references()
    if config.model.dtype == "auto":
        config.model.dtype = "bfloat16"  # what it means on a TPU
    validate(config, len(devices))
    objective = objective_for(config, vocab_size(config.data))
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
        compiled = compile_step(program, abstract_batch(program, config))
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


def vocab_size(data: ConfigDict) -> int:
    """That of the given vocabulary, or what a trained one aims at."""
    if not data.vocab:
        return data.vocab_size
    return tokenizers.from_file(data.vocab, **{name: data[name] for name in SETTINGS}).vocab_size


def abstract_batch(program: Program, config: ConfigDict) -> Batch:
    """The shapes of a batch of `config`, as the step of `program` takes it."""
    rows, length = (config.batch_size,), (config.data.sequence_length,)
    if config.parallel.api == "pmap":
        devices = program.abstract_state.step.sharding.mesh.size
        rows = devices, config.batch_size // devices
    tokens = ("input_ids", "segment_ids", "position_ids", "token_type_ids")
    batch = {name: jax.ShapeDtypeStruct(rows + length, np.int32) for name in tokens}
    return batch | {"row": jax.ShapeDtypeStruct(rows, np.int32)}
