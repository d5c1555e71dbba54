"""A generator that another run has trained (`config.generator.init_from`)."""

from pathlib import Path

import jax
import numpy as np

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.params import Params, path_name
from electra_jax.training.checkpoint import restore_params


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
    return network_of(params, "generator")


def generator_weights(run: Path, tokenizer: Tokenizer, structure: Params) -> dict[str, np.ndarray]:
    """Those of `generator_of` by the paths that they have in a model of `structure`.

    Raises:
      UserError: as `generator_of`, or they do not have the shapes of the generator in `structure`.
    """
    generator = generator_of(run, tokenizer)
    own = {"generator": {name: generator[name] for name in ("encoder", "head")}}
    if "embeddings" in structure["generator"]:
        own["generator"]["embeddings"] = generator["embeddings"]
    else:
        own["embeddings"] = generator["embeddings"]
    weights, all_paths = by_path(own), by_path(structure)
    replaced = tuple(f"generator/{name}/" for name in own["generator"])
    wanted = {name for name in all_paths if name.startswith(replaced)} | {*weights}
    for name in sorted(wanted):
        found, needed = (
            np.shape(tree[name]) if name in tree else "missing" for tree in (weights, all_paths)
        )
        if found != needed:
            raise UserError(
                "config.generator.init_from is a run whose generator does not fit: "
                f"{name} is {found} there, {needed} here"
            )
    return weights


def by_path(params: Params) -> dict[str, np.ndarray | jax.ShapeDtypeStruct]:
    """Leaves of a tree by their path."""
    return {path_name(path): x for path, x in jax.tree.leaves_with_path(params)}
