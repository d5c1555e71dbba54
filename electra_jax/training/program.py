"""The functions of a run, compiled for its devices by `jax.jit` or by `jax.pmap`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array
from ml_collections import ConfigDict

from electra_jax.modeling.params import Params, path_name
from electra_jax.objectives import Objective
from electra_jax.objectives.base import Batch, Sums
from electra_jax.sharding.mesh import BATCH, ROWS, P, place, share_of_rows
from electra_jax.sharding.rows import gathered
from electra_jax.sharding.rules import shardings
from electra_jax.training.optimizer import AdamState, OptimizerConfig
from electra_jax.training.step import TrainState, eval_step, init_state, train_step


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
      eval_step: (params, placed batch) to sums. Several trials at once have none.
      place: this process's rows of a batch to arrays on the devices.
      share: which rows of a batch these are: (i, n) stands for the i-th of n equal parts.
    """

    abstract_state: TrainState
    init: Seeded
    train_step: Seeded
    place: Callable[[dict[str, np.ndarray]], Batch]
    share: tuple[int, int]
    eval_step: Seeded | None = None

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
    init = functools.partial(init_state, objective, optimizer)
    state = jax.eval_shape(init, np.asarray(seed, np.uint32))
    if api == "pmap":  # its own mesh has one axis; any other would be compiled for once more
        mesh = jax.make_mesh(
            (mesh.size,), ("data",), axis_types=(AxisType.Auto,), devices=list(mesh.devices.flat)
        )
        rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        layout = jax.tree.map(lambda _: everywhere, state)
        carried = {"axes": ("data",)}
    else:
        rows, everywhere = NamedSharding(mesh, BATCH), NamedSharding(mesh, P())
        params, moments = (
            shardings(objective.param_infos(), state.params, mesh, over_data)
            for over_data in (False, shard_optimizer)  # sharded moments alone: ZeRO-1
        )
        layout = TrainState(everywhere, params, optimizer_layout(state, moments, everywhere))
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
            jax.pmap, axis_name="data", in_axes=(None, 0, None), devices=list(mesh.devices.flat)
        )
        train = pmap(train, out_axes=(None, None), donate_argnums=0)
        evaluate = pmap(evaluate, out_axes=None)
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
    what it would alone, with data parallelism only.
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
        place=functools.partial(place, sharding=rows, per_device=False),
        share=share_of_rows(NamedSharding(mesh, BATCH)),
    )


def optimizer_layout(
    state: TrainState, moments: Params, everywhere: NamedSharding
) -> optax.OptState:
    """The layout of the optimizer's state: `moments` for Adam's, `everywhere` for all else."""
    is_adam = lambda x: isinstance(x, AdamState)  # noqa: E731
    return jax.tree.map(
        lambda x: AdamState(moments, moments) if is_adam(x) else everywhere,
        state.opt_state,
        is_leaf=is_adam,
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
