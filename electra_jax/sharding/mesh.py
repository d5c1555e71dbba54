"""The mesh of devices, and how the rows of a batch lie on it.

The mesh has three axes. `data` splits the batch and repeats the parameters; `fsdp` splits the batch
and the parameters; `tensor` splits heads, feed-forward width and the parameters that belong to
them.
"""

import collections
import functools

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from electra_jax.errors import UserError
from electra_jax.modeling.params import Params
from electra_jax.objectives.base import Batch

P = PartitionSpec
ROWS = ("data", "fsdp")  # mesh axes that split the batch
BATCH = P(ROWS)


def make_mesh(parallel: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The `(data, fsdp, tensor)` mesh; -1 for `data` takes all devices that are left.

    Neighbors in the mesh are neighbors in the TPU's network. Where there are several slices, `data`
    alone goes across them: UserError where they do not divide it.
    """
    devices = devices or jax.devices()
    fsdp, tensor = parallel.fsdp, parallel.tensor
    data = len(devices) // (fsdp * tensor) if parallel.data == -1 else parallel.data
    # On a GPU a slice is a host, and any axis may go across.
    is_tpu = devices[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
    if data % slices:
        raise UserError(
            f"config.parallel.data is {data}; allowed: a multiple of the number of slices, {slices}"
        )
    place = mesh_utils.create_device_mesh
    if slices > 1:
        across = (slices, 1, 1)
        place = functools.partial(mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=across)
    placed = place((data // slices, fsdp, tensor), devices=devices, allow_split_physical_axes=True)
    return Mesh(placed, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def everywhere(mesh: Mesh, params: Params) -> Params:
    """`params` on every device of `mesh`, whole."""
    return jax.device_put(params, NamedSharding(mesh, P()))


def check_topology(
    parallel: ConfigDict, batch_size: int, num_microbatches: int, num_devices: int
) -> None:
    """Raises UserError where mesh, api, batch and devices do not fit each other."""
    fixed = parallel.fsdp * parallel.tensor
    wanted = fixed * (1 if parallel.data == -1 else parallel.data)
    if num_devices % fixed or (parallel.data != -1 and wanted != num_devices):
        raise UserError(
            "config.parallel.data, config.parallel.fsdp and config.parallel.tensor are "
            f"{parallel.data}, {parallel.fsdp} and {parallel.tensor}; allowed: a product that is "
            f"the number of devices, {num_devices}"
        )
    if parallel.api == "pmap" and fixed != 1:
        raise UserError(
            "config.parallel.api = 'pmap' is data parallel only: it needs config.parallel.fsdp = 1 "
            f"and config.parallel.tensor = 1, found {parallel.fsdp} and {parallel.tensor}"
        )
    if parallel.api == "pmap" and parallel.shard_optimizer:
        raise UserError(
            "config.parallel.shard_optimizer is True; allowed: False with config.parallel.api = "
            "'pmap', which keeps whole moments on every device"
        )
    splits = num_devices // parallel.tensor
    if batch_size % (splits * num_microbatches):
        raise UserError(
            f"config.batch_size is {batch_size}; allowed: a multiple of "
            f"{splits * num_microbatches} ({splits} devices that split the batch x "
            f"config.num_microbatches = {num_microbatches})"
        )


def share_of_rows(sharding: NamedSharding) -> tuple[int, int]:
    """The part of a batch that the devices of this process hold: (i, n) for the i-th of n.

    On a TPU the rows of a process lie apart in the batch, as its chips do in the network. Nothing
    depends on the order of rows, so each process has its part as if they lay together. Processes
    that `tensor` goes across hold the same rows: all of them, or else UserError is raised.
    """
    num_rows = sharding.mesh.size  # of a batch that every mesh divides
    held = collections.defaultdict(set)
    for device, (rows,) in sharding.devices_indices_map((num_rows,)).items():
        held[device.process_index] |= {*range(*rows.indices(num_rows))}
    shares = sorted({frozenset(rows) for rows in held.values()}, key=min)
    if any(len(share) * len(shares) != num_rows for share in shares):
        raise UserError(
            "config.parallel.tensor gives processes some rows together and others alone; allowed: "
            "a number that divides the devices of a process, or is a multiple of them"
        )
    return shares.index(frozenset(held[jax.process_index()])), len(shares)


def place(batch: dict[str, np.ndarray], sharding: NamedSharding, per_device: bool) -> Batch:
    """Put this host's rows on its devices, which `sharding` splits the first axis over.

    `per_device` leads with an axis of devices, [devices, B / devices, ...], as `jax.pmap` wants.
    """
    if per_device:
        local = len(sharding.addressable_devices)
        batch = {name: x.reshape(local, -1, *x.shape[1:]) for name, x in batch.items()}
    # With several processes, JAX calls this an implicit transfer.
    with jax.transfer_guard("allow"):
        return {
            name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()
        }
