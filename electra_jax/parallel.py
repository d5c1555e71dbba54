"""Devices: the mesh, which array lies where, and the step compiled for them.

The mesh has three axes. `data` splits the batch and repeats the parameters; `fsdp` splits the batch
and the parameters; `tensor` splits heads, feed-forward width and the parameters that belong to
them. Which axis of a parameter is split is read from `RULES` by its path; XLA adds the collectives.

`jax.pmap` is the other carrier of the same step: data parallel only, written per device.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from electra_jax.modeling.electra import Params, path_name
from electra_jax.objectives import Objective
from electra_jax.objectives.mlm import Batch, Sums
from electra_jax.optimizer import OptimizerConfig
from electra_jax.step import TrainState, eval_step, init_state, train_step

P = PartitionSpec

# Path (of a parameter, or of its moments in the optimiser's state) to the split of its axes. Every
# path matches exactly one. Axes that a mesh axis does not divide stay whole.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embeddings/(word|position|token_type)$", P(None, "fsdp")),
    (r"layers/attention/qkv/kernel$", P(None, "fsdp", None, "tensor", None)),  # [N, H, 3, A, D]
    (r"layers/attention/qkv/bias$", P(None, None, "tensor", None)),  # [N, 3, A, D]
    (r"layers/attention/out/kernel$", P(None, "tensor", None, "fsdp")),  # [N, A, D, H]
    (r"layers/up/kernel$", P(None, "fsdp", "tensor")),  # [N, H, F]
    (r"layers/up/bias$", P(None, "tensor")),  # [N, F]
    (r"layers/down/kernel$", P(None, "tensor", "fsdp")),  # [N, F, H]
    (r"layers/(attention/out|down)/bias$", P()),
    (r"(projection|head/dense|head/output)/kernel$", P("fsdp", None)),
    (r"(projection|head/dense|head/output|head)/bias$", P()),
    (r"norm/(scale|bias)$", P()),
    (r"^step$", P()),
)

BATCH = P(("data", "fsdp"))


def make_mesh(parallel: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The `(data, fsdp, tensor)` mesh; -1 for `data` takes all devices that are left."""
    devices = devices or jax.devices()
    data = parallel.data
    if data == -1:
        data = len(devices) // (parallel.fsdp * parallel.tensor)
    return jax.make_mesh(
        (data, parallel.fsdp, parallel.tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices,
    )


def partition_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How the array `name` is split; raises KeyError where no rule matches."""
    spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
    if spec is None:
        raise KeyError(f"no sharding rule for {name}")
    return P(
        *(
            axis if axis and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, shape, strict=False)
        )
    )


def shardings(tree: TrainState | Params, mesh: Mesh) -> TrainState | Params:
    """A tree of `NamedSharding`s for a state, or for parameters alone."""
    return jax.tree.map_with_path(
        lambda path, x: NamedSharding(mesh, partition_spec(path_name(path), x.shape, mesh)), tree
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of a run, compiled for its devices.

    Attributes:
      abstract_state: shapes, dtypes and shardings: what a checkpoint is restored into.
      init: makes the state of step 0 in place.
      train_step: (state, placed batch) to (state, sums). Its input state is consumed.
      eval_step: (params, placed batch) to sums.
      place: this host's rows of a batch to arrays on the devices.
    """

    abstract_state: TrainState
    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Sums]]
    eval_step: Callable[[Params, Batch], Sums]
    place: Callable[[dict[str, np.ndarray]], Batch]


def make_program(
    mesh: Mesh,
    objective: Objective,
    optimizer: OptimizerConfig,
    seed: int,
    num_microbatches: int = 1,
    api: str = "jit",
) -> Program:
    """Compile-ready functions for `mesh`, carried by `jax.jit` or by `jax.pmap`."""
    init = functools.partial(init_state, objective, optimizer, seed)
    state = jax.eval_shape(init)
    if api == "pmap":  # its own mesh has one axis; any other would be compiled for once more
        mesh = jax.make_mesh(
            (mesh.size,), ("data",), axis_types=(AxisType.Auto,), devices=list(mesh.devices.flat)
        )
        rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        layout = jax.tree.map(lambda _: everywhere, state)
    else:
        rows, everywhere = NamedSharding(mesh, BATCH), NamedSharding(mesh, P())
        layout = shardings(state, mesh)
    train = functools.partial(
        train_step,
        objective=objective,
        optimizer=optimizer,
        seed=seed,
        num_microbatches=num_microbatches,
    )
    evaluate = functools.partial(eval_step, objective=objective, seed=seed)
    if api == "pmap":
        pmap = functools.partial(
            jax.pmap, axis_name="data", in_axes=(None, 0), devices=list(mesh.devices.flat)
        )
        train = pmap(
            functools.partial(train, axis_name="data"), out_axes=(None, None), donate_argnums=0
        )
        evaluate = pmap(functools.partial(evaluate, axis_name="data"), out_axes=None)
    else:
        train = jax.jit(
            train,
            in_shardings=(layout, rows),
            out_shardings=(layout, everywhere),
            donate_argnums=0,
        )
        evaluate = jax.jit(evaluate, in_shardings=(layout.params, rows), out_shardings=everywhere)
    return Program(
        abstract_state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            layout,
        ),
        init=jax.jit(init, out_shardings=layout),
        train_step=train,
        eval_step=evaluate,
        place=functools.partial(place, sharding=rows, per_device=api == "pmap"),
    )


def place(batch: dict[str, np.ndarray], sharding: NamedSharding, per_device: bool) -> Batch:
    """Put this host's rows on its devices.

    Args:
      sharding: splits the first axis.
      per_device: lead with an axis of devices, [devices, B / devices, ...], as `jax.pmap` wants.
    """
    if per_device:
        local = len(sharding.addressable_devices)
        batch = {name: x.reshape(local, -1, *x.shape[1:]) for name, x in batch.items()}
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}
