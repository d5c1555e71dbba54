"""Devices: the mesh, which array lies where, and the step compiled for them.

The mesh has three axes. `data` splits the batch and repeats the parameters; `fsdp` splits the batch
and the parameters; `tensor` splits heads, feed-forward width and the parameters that belong to
them. Which axis of a parameter is split is read from `RULES` by its path. The collectives over
`data` and `fsdp` are written down in `on_own_rows`; XLA adds those over `tensor`.

`jax.pmap` is the other carrier of the same step: data parallel only, written per device.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from ml_collections import ConfigDict

from electra_jax.errors import UserError
from electra_jax.modeling.electra import Params, path_name
from electra_jax.objectives import Objective
from electra_jax.objectives.base import Batch, Sums
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
    (
        r"(projection|baseline|head/copy|head/start|(head|end|answerable)/(dense|output))/kernel$",
        P("fsdp", None),
    ),
    (
        r"(projection|baseline|head/copy|head/start|(head|end|answerable)/(dense|output)|head)/bias$",
        P(),
    ),
    (r"norm/(scale|bias)$", P()),
    (r"^step$", P()),
)

ROWS = ("data", "fsdp")  # mesh axes that split the batch
BATCH = P(ROWS)


def make_mesh(parallel: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The `(data, fsdp, tensor)` mesh; -1 for `data` takes all devices that are left.

    Neighbours in the mesh are neighbours in the TPU's network. Where there are several slices,
    `data` alone goes across them.

    Raises:
      UserError: the slices do not divide `data`.
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
    if slices == 1:
        place = mesh_utils.create_device_mesh
    else:
        place = functools.partial(
            mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=(slices, 1, 1)
        )
    placed = place((data // slices, fsdp, tensor), devices=devices, allow_split_physical_axes=True)
    return Mesh(placed, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def partition_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, shard_optimizer: bool = False
) -> PartitionSpec:
    """How the array `name` is split; raises KeyError where no rule matches.

    Args:
      shard_optimizer: split moments over `data`, too: ZeRO-1 (Rajbhandari et al., SC 2020).
    """
    spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
    if spec is None:
        raise KeyError(f"no sharding rule for {name}")
    divides = lambda axis, size: size % mesh.shape[axis] == 0  # noqa: E731
    axes = [
        axis if axis and divides(axis, size) else None
        for axis, size in itertools.zip_longest(spec, shape)
    ]
    if shard_optimizer and name.startswith("opt_state/"):
        whole = [
            i
            for i, (axis, size) in enumerate(zip(axes, shape, strict=True))
            if (axis is None or mesh.shape[axis] == 1) and divides("data", size)
        ]
        if whole:
            axes[max(whole, key=lambda i: shape[i])] = "data"
    return P(*axes)


def shardings(
    tree: TrainState | Params, mesh: Mesh, shard_optimizer: bool = False
) -> TrainState | Params:
    """A tree of `NamedSharding`s for a state, or for parameters alone."""

    def sharding(path: tuple, x: jax.ShapeDtypeStruct | Array) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(path_name(path), x.shape, mesh, shard_optimizer))

    return jax.tree.map_with_path(sharding, tree)


def on_own_rows(objective: Objective, stored: Params, scattered: Params) -> Objective:
    """`objective`, with sums that every device takes over its own rows.

    The devices along `data` and `fsdp` meet three times, all in the compute dtype: parameters are
    gathered before use, all at once; their gradients are added up and scattered after it; and the
    sums are added up. Left to itself, XLA splits the activations as it finds the parameters split,
    and exchanges them in every layer. Every device's rows draw a dropout of their own.

    Args:
      stored: a `NamedSharding` for each parameter.
      scattered: likewise, for its gradient.
    """
    dtype = objective.dtype
    mesh = jax.tree.leaves(stored)[0].mesh
    stored_specs, scattered_specs = (
        jax.tree.map(lambda x: P(*(axis if axis in ROWS else None for axis in x.spec)), tree)
        for tree in (stored, scattered)
    )

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def gather(part: Array, x: Array, part_spec: PartitionSpec, spec: PartitionSpec) -> Array:
        """The whole of `x`. The gradient of `part`, the same in another layout, is that of `x`."""
        x = jax.lax.pcast(x.astype(dtype), tuple(a for a in ROWS if a not in spec), to="varying")
        for axis in set(spec) - {None}:
            x = jax.lax.all_gather(x, axis, axis=tuple(spec).index(axis), tiled=True)
        return x

    def scatter(part_spec: PartitionSpec, spec: PartitionSpec, _: None, gradient: Array):
        for axis in reversed(ROWS):  # what is added over `data` is then a part already
            if axis in part_spec:
                place = tuple(part_spec).index(axis)
                gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=place, tiled=True)
            else:
                gradient = jax.lax.psum(gradient, axis)
        return gradient.astype("float32"), None

    gather.defvjp(lambda *arguments: (gather(*arguments), None), scatter)

    class OnOwnRows(type(objective)):
        def sums(self, params, batch, masked, key, dropout_key, evaluation, step=None):
            def sums_of_own_rows(parts, params, batch, masked, key, dropout_key, step):
                params = jax.tree.map(gather, parts, params, scattered_specs, stored_specs)
                if dropout_key is not None:
                    dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(ROWS))
                sums = objective.sums(params, batch, masked, key, dropout_key, evaluation, step)
                return jax.lax.psum(sums, ROWS)

            return jax.shard_map(
                sums_of_own_rows,
                mesh=mesh,
                in_specs=(scattered_specs, stored_specs, BATCH, BATCH, P(), P(), P()),
                out_specs=P(),
                axis_names={*ROWS},
            )(params, jax.lax.stop_gradient(params), batch, masked, key, dropout_key, step)

    return OnOwnRows(**vars(objective))


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A compiled function whose last argument is a seed, together with that seed.

    As a constant in it, each seed would need a compilation of its own.

    Attributes:
      seed: uint32, [], or [T] for T trials at once.
      sharding: puts the seed on every device.
    """

    compiled: Callable
    seed: np.ndarray
    sharding: NamedSharding

    @functools.cached_property
    def placed(self) -> Array:
        """The seed on the devices. Those that are only compiled for can hold none."""
        with jax.transfer_guard("allow"):  # see `place`
            return jax.make_array_from_process_local_data(self.sharding, self.seed)

    def __call__(self, *arguments):
        """Calls the function, with the seed."""
        return self.compiled(*arguments, self.placed)

    def lower(self, *arguments) -> jax.stages.Lowered:
        """The function for arguments of these shapes, ready to be compiled."""
        seed = jax.ShapeDtypeStruct(self.seed.shape, self.seed.dtype, sharding=self.sharding)
        return self.compiled.lower(*arguments, seed)


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of a run, compiled for its devices.

    Attributes:
      abstract_state: shapes, dtypes and shardings: what a checkpoint is restored into.
      init: makes the state of step 0 in place.
      train_step: (state, placed batch) to (state, sums). Its input state is consumed.
      eval_step: (params, placed batch) to sums.
      place: this process's rows of a batch to arrays on the devices.
      share: which rows of a batch these are: (i, n) stands for the i-th of n equal parts.
    """

    abstract_state: TrainState
    init: Seeded
    train_step: Seeded
    eval_step: Seeded
    place: Callable[[dict[str, np.ndarray]], Batch]
    share: tuple[int, int]

    def with_seed(self, seed: int) -> "Program":
        """That of another run: what is compiled for one is compiled for both."""
        functions = {
            name: dataclasses.replace(getattr(self, name), seed=np.asarray(seed, np.uint32))
            for name in ("init", "train_step", "eval_step")
        }
        return dataclasses.replace(self, **functions)


def make_program(
    mesh: Mesh,
    objective: Objective,
    optimizer: OptimizerConfig,
    seed: int,
    num_microbatches: int = 1,
    api: str = "jit",
    shard_optimizer: bool = False,
) -> Program:
    """Compile-ready functions for `mesh`, carried by `jax.jit` or by `jax.pmap`."""
    init = functools.partial(init_state, objective, optimizer)
    state = jax.eval_shape(init, np.asarray(seed, np.uint32))
    if api == "pmap":  # its own mesh has one axis; any other would be compiled for once more
        mesh = jax.make_mesh(
            (mesh.size,), ("data",), axis_types=(AxisType.Auto,), devices=list(mesh.devices.flat)
        )
        rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        layout = jax.tree.map(lambda _: everywhere, state)
    else:
        rows, everywhere = NamedSharding(mesh, BATCH), NamedSharding(mesh, P())
        layout = shardings(state, mesh, shard_optimizer)
        if mesh.shape["data"] * mesh.shape["fsdp"] > 1:
            moments = layout.opt_state[1]["mu"]
            objective = on_own_rows(objective, layout.params, moments)
    train = functools.partial(
        train_step,
        objective=objective,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
    )
    evaluate = functools.partial(eval_step, objective=objective)
    if api == "pmap":
        pmap = functools.partial(
            jax.pmap, axis_name="data", in_axes=(None, 0, None), devices=list(mesh.devices.flat)
        )
        train = pmap(
            functools.partial(train, axis_name="data"), out_axes=(None, None), donate_argnums=0
        )
        evaluate = pmap(functools.partial(evaluate, axis_name="data"), out_axes=None)
    else:
        train = jax.jit(
            train,
            in_shardings=(layout, rows, everywhere),
            out_shardings=(layout, everywhere),
            donate_argnums=0,
        )
        evaluate = jax.jit(
            evaluate,
            in_shardings=(layout.params, rows, everywhere),
            out_shardings=everywhere,
        )
    seeded = functools.partial(Seeded, seed=np.asarray(seed, np.uint32), sharding=everywhere)
    return Program(
        abstract_state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            layout,
        ),
        init=seeded(jax.jit(init, out_shardings=layout)),
        train_step=seeded(train),
        eval_step=seeded(evaluate),
        place=functools.partial(place, sharding=rows, per_device=api == "pmap"),
        share=share_of_rows(rows),
    )


def program_of(
    config: ConfigDict, mesh: Mesh, objective: Objective, optimizer: OptimizerConfig
) -> Program:
    """`make_program` as a run's configuration wants it."""
    return make_program(
        mesh,
        objective,
        optimizer,
        config.seed,
        config.num_microbatches,
        config.parallel.api,
        config.parallel.shard_optimizer,
    )


def make_trials_program(
    mesh: Mesh,
    objective: Objective,
    optimizer: OptimizerConfig,
    seeds: Sequence[int],
    num_microbatches: int = 1,
) -> Program:
    """As `make_program`, for several seeds T at once: small tasks leave an accelerator idle.

    State and batches have an axis of trials in front; sums are those of all. Each trial computes
    what it would alone, with data parallelism only. There is no evaluation step.
    """
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, ROWS))
    init = jax.vmap(functools.partial(init_state, objective, optimizer))
    step = functools.partial(
        train_step, objective=objective, optimizer=optimizer, num_microbatches=num_microbatches
    )
    key_seeds = np.array(seeds, np.uint32)

    def train(state: TrainState, batch: Batch, seeds: Array) -> tuple[TrainState, Sums]:
        state, sums = jax.vmap(step)(state, batch, seeds)
        return state, jax.tree.map(lambda x: x.sum(axis=0), sums)

    def evaluate(params: Params, batch: Batch, seeds: Array) -> Sums:
        raise NotImplementedError

    seeded = functools.partial(Seeded, seed=key_seeds, sharding=everywhere)
    return Program(
        abstract_state=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            jax.eval_shape(init, key_seeds),
        ),
        init=seeded(jax.jit(init, out_shardings=everywhere)),
        train_step=seeded(
            jax.jit(
                train,
                in_shardings=(everywhere, rows, everywhere),
                out_shardings=everywhere,
                donate_argnums=0,
            )
        ),
        eval_step=seeded(evaluate),
        place=functools.partial(place, sharding=rows, per_device=False),
        share=share_of_rows(NamedSharding(mesh, BATCH)),
    )


@dataclasses.dataclass(frozen=True)
class Predict:
    """A compiled function: (parameters, this process's rows) to what comes out, everywhere.

    Rows come back in any order; `row` among the outputs says which is which.
    """

    compiled: Callable[[Params, Batch], dict[str, Array]]
    sharding: NamedSharding  # of the rows

    @property
    def share(self) -> tuple[int, int]:
        """Which rows of a batch are this process's, see `Program.share`."""
        return share_of_rows(self.sharding)

    def __call__(self, params: Params, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Places the rows, and starts to compute."""
        return self.compiled(params, place(batch, self.sharding, per_device=False))


def make_predict(
    mesh: Mesh,
    outputs: Callable[[Params, Batch], dict[str, Array]],
    compiler_options: dict[str, int] | None = None,
) -> Predict:
    """Compiles `outputs`, a function of parameters and a batch, for `mesh`."""

    def with_rows(params: Params, batch: Batch) -> dict[str, Array]:
        return outputs(params, batch) | {"row": batch["row"]}

    compiled = jax.jit(
        with_rows, out_shardings=NamedSharding(mesh, P()), compiler_options=compiler_options
    )
    return Predict(compiled, NamedSharding(mesh, BATCH))


def everywhere(mesh: Mesh, params: Params) -> Params:
    """`params` on every device of `mesh`, whole."""
    return jax.device_put(params, NamedSharding(mesh, P()))


def with_params(state: TrainState, loaded: dict[str, np.ndarray]) -> TrainState:
    """`state` with the parameters in `loaded`, by path, in the place of its own."""

    def placed(path: tuple, x: Array) -> Array:
        value = loaded.get(path_name(path))
        if value is None:
            return x
        value = np.broadcast_to(value, x.shape)  # of several trials, to each
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])

    return dataclasses.replace(state, params=jax.tree.map_with_path(placed, state.params))


def share_of_rows(sharding: NamedSharding) -> tuple[int, int]:
    """The part of a batch that the devices of this process hold: (i, n) for the i-th of n.

    On a TPU the rows of a process lie apart in the batch, as its chips do in the network. Nothing
    depends on the order of rows, so each process has its part as if they lay together. Processes
    that `tensor` goes across hold the same rows.

    Raises:
      UserError: processes hold some rows together and others alone.
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
    """Put this host's rows on its devices.

    Args:
      sharding: splits the first axis.
      per_device: lead with an axis of devices, [devices, B / devices, ...], as `jax.pmap` wants.
    """
    if per_device:
        local = len(sharding.addressable_devices)
        batch = {name: x.reshape(local, -1, *x.shape[1:]) for name, x in batch.items()}
    # With several processes, JAX calls this an implicit transfer.
    with jax.transfer_guard("allow"):
        return {
            name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()
        }
