"""A generator that another run has trained (`config.generator.init_from`)."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from electra_jax.checkpoint import restore_params
from electra_jax.data import tokenizer as tokenizers
from electra_jax.data.tokenizer import Tokenizer
from electra_jax.errors import UserError
from electra_jax.modeling.electra import Params, path_name, tower_embeddings
from electra_jax.step import TrainState


def generator_of(run: Path, tokenizer: Tokenizer) -> Params:
    """`{"embeddings", "encoder", "head"}` of the generator in the newest checkpoint of a run.

    A run of masked language modelling has one, too: all of it.

    Args:
      run: its directory.
      tokenizer: what the run must have been trained with.

    Raises:
      UserError: there is no checkpoint, no generator in it, or its tokens are others.
    """
    where = f"config.generator.init_from is {str(run)!r}"
    _, params = restore_params(run / "checkpoints")
    if "generator" not in params:
        raise UserError(f"{where}, but the run there has no generator")
    if tokenizers.load(run / "tokenizer").hash != tokenizer.hash:
        raise UserError(f"{where}, but the run there has another tokenizer than config.data gives")
    own = params["generator"]
    return {
        "embeddings": tower_embeddings(params, "generator"),
        "encoder": own["encoder"] if "encoder" in own else params["discriminator"]["encoder"],
        "head": own["head"],
    }


def with_generator(state: TrainState, generator: Params) -> TrainState:
    """`state` with the weights of `generator_of`, which go where those were that they replace.

    Raises:
      UserError: they do not have the shapes of the generator in `state`.
    """
    own = {name: generator[name] for name in ("encoder", "head")}
    params = state.params | {"generator": state.params["generator"] | own}
    if "embeddings" in params["generator"]:
        params["generator"]["embeddings"] = generator["embeddings"]
    else:
        params["embeddings"] = generator["embeddings"]
    found, wanted = shapes(params), shapes(state.params)
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise UserError(
                "config.generator.init_from is a run whose generator does not fit: "
                f"{name} is {found.get(name, 'missing')} there, {wanted.get(name, 'missing')} here"
            )
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, state.params)
    return dataclasses.replace(state, params=placed)


def shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """By path."""
    return {path_name(path): np.shape(x) for path, x in jax.tree.leaves_with_path(params)}
