"""The functions of a run, compiled for its devices by `jax.jit` or by `jax.pmap`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array
from ml_collections import ConfigDict

from electra_jax.modeling.params import path_name
from electra_jax.objectives import Objective
from electra_jax.objectives.base import Batch, Sums
from electra_jax.sharding.mesh import BATCH, ROWS, P, place, share_of_rows
from electra_jax.sharding.rows import gathered
from electra_jax.sharding.rules import shardings
from electra_jax.training.optimizer import AdamState, OptimizerConfig
from electra_jax.training.step import TrainState, eval_step, init_state, train_step


@dataclasses.dataclass(frozen=True)
class SeededFunction:
    """A compiled function whose last argument is a seed, together with that seed.

    As a constant in it, each seed would need a compilation of its own.
    """

    compiled: Callable
    seed: np.ndarray  # uint32, [], or [T] for T trials at once
    sharding: NamedSharding  # puts the seed on every device

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
      eval_step: (params, placed batch) to sums. Several trials at once have none.
      place: this process's rows of a batch to arrays on the devices.
      share: which rows of a batch these are: (i, n) stands for the i-th of n equal parts.
    """

    abstract_state: TrainState
    init: SeededFunction
    train_step: SeededFunction
    eval_step: SeededFunction | None
    place: Callable[[dict[str, np.ndarray]], Batch]
    share: tuple[int, int]

    def with_seed(self, seed: int) -> "Program":
        """That of another run: what is compiled for one is compiled for both."""
        functions = {
            name: dataclasses.replace(function, seed=np.asarray(seed, np.uint32))
            for name in ("init", "train_step", "eval_step")
            if (function := getattr(self, name))
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
    init, seed = functools.partial(init_state, objective, optimizer), np.asarray(seed, np.uint32)
    state, devices = jax.eval_shape(init, seed), list(mesh.devices.flat)
    if api == "pmap":  # its own mesh has one axis; any other would be compiled for once more
        mesh = jax.make_mesh((mesh.size,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
        rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        layout = jax.tree.map(lambda _: everywhere, state)
        carried = {"axes": ("data",)}
    else:
        rows, everywhere = NamedSharding(mesh, BATCH), NamedSharding(mesh, P())
        params, moments = (
            shardings(objective.param_infos(), state.params, mesh, over_data)
            for over_data in (False, shard_optimizer)  # sharded moments alone: ZeRO-1
        )
        opt_state = (
            AdamState(moments, moments)
            if isinstance(part, AdamState)
            else jax.tree.map(lambda _: everywhere, part)
            for part in state.opt_state
        )
        layout = TrainState(everywhere, params, tuple(opt_state))
        carried = {}
        if mesh.shape["data"] * mesh.shape["fsdp"] > 1:
            carried = {"sums_of": gathered(objective.sums, objective.dtype, params, moments)}
    train = functools.partial(
        train_step,
        objective=objective,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        **carried,
    )
    evaluate = functools.partial(eval_step, objective=objective, **carried)
    if api == "pmap":
        pmap = functools.partial(
            jax.pmap, axis_name="data", in_axes=(None, 0, None), devices=devices
        )
        train = pmap(train, out_axes=(None, None), donate_argnums=0)
        evaluate = pmap(evaluate, out_axes=None)
    else:
        train = _jit_train(train, layout, rows)
        evaluate = jax.jit(
            evaluate, in_shardings=(layout.params, rows, everywhere), out_shardings=everywhere
        )
    placed = functools.partial(place, sharding=rows, per_device=api == "pmap")
    return _program(init, train, evaluate, seed, layout, placed, share_of_rows(rows))


def program_of(
    config: ConfigDict, mesh: Mesh, objective: Objective, optimizer: OptimizerConfig
) -> Program:
    """`make_program` as a run's configuration wants it."""
    how = config.num_microbatches, config.parallel.api, config.parallel.shard_optimizer
    return make_program(mesh, objective, optimizer, config.seed, *how)


def make_trials_program(
    mesh: Mesh,
    objective: Objective,
    optimizer: OptimizerConfig,
    seeds: Sequence[int],
    num_microbatches: int = 1,
) -> Program:
    """As `make_program`, for several seeds T at once: small tasks leave an accelerator idle.

    State and batches have an axis of trials in front; sums are those of all. Each trial computes
    what it would alone, with data parallelism only.
    """
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, ROWS))
    init = jax.vmap(functools.partial(init_state, objective, optimizer))
    step = functools.partial(
        train_step, objective=objective, optimizer=optimizer, num_microbatches=num_microbatches
    )

    def train(state: TrainState, batch: Batch, seeds: Array) -> tuple[TrainState, Sums]:
        state, sums = jax.vmap(step)(state, batch, seeds)
        return state, jax.tree.map(lambda x: x.sum(axis=0), sums)

    seeds = np.array(seeds, np.uint32)
    layout = jax.tree.map(lambda _: everywhere, jax.eval_shape(init, seeds))
    placed = functools.partial(place, sharding=rows, per_device=False)
    share = share_of_rows(NamedSharding(mesh, BATCH))
    return _program(init, _jit_train(train, layout, rows), None, seeds, layout, placed, share)


def _jit_train(train: Callable, layout: TrainState, rows: NamedSharding) -> Callable:
    return jax.jit(
        train,
        in_shardings=(layout, rows, layout.step),
        out_shardings=(layout, layout.step),
        donate_argnums=0,
    )


def _program(
    init: Callable,
    train: Callable,
    evaluate: Callable | None,
    seed: np.ndarray,
    layout: TrainState,
    place: Callable[[dict[str, np.ndarray]], Batch],
    share: tuple[int, int],
) -> Program:
    seeded = functools.partial(SeededFunction, seed=seed, sharding=layout.step)
    return Program(
        abstract_state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(init, seed),
            layout,
        ),
        init=seeded(jax.jit(init, out_shardings=layout)),
        train_step=seeded(train),
        eval_step=evaluate and seeded(evaluate),
        place=place,
        share=share,
    )


def with_params(state: TrainState, loaded: dict[str, np.ndarray]) -> TrainState:
    """`state` with the parameters in `loaded`, by path, in the place of its own."""

    def placed(path: tuple, x: Array) -> Array:
        value = loaded.get(path_name(path))
        if value is None:
            return x
        value = np.broadcast_to(value, x.shape)  # of several trials, to each
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])

    return dataclasses.replace(state, params=jax.tree.map_with_path(placed, state.params))
