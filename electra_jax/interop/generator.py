"""A generator that another run has trained (`config.generator.init_from`)."""

from pathlib import Path

import jax
import numpy as np

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.params import Params, by_path, path_name
from electra_jax.training.checkpoint import restore_params


def generator_weights(run: Path, tokenizer: Tokenizer, structure: Params) -> dict[str, np.ndarray]:
    """The generator in the newest checkpoint of a run, by the paths it has in `structure`.

    A run of masked language modeling has a generator, too: all of it.

    Args:
      run: its directory.
      tokenizer: what the run must have been trained with.
      structure: shapes of the model that is to have the generator.

    Raises:
      UserError: there is no checkpoint, no generator in it, its tokens are others, or it does not
        have the shapes of that in `structure`.
    """
    where = f"config.generator.init_from is {str(run)!r}"
    _, params = restore_params(run / "checkpoints")
    if "generator" not in params:
        raise UserError(f"{where}, but the run there has no generator")
    if tokenizers.load(run / "tokenizer").hash != tokenizer.hash:
        raise UserError(f"{where}, but the run there has another tokenizer than config.data gives")
    paths = jax.tree.map_with_path(lambda path, _: path_name(path), structure)
    theirs, ours = (by_path(network_of(tree, "generator")) for tree in (params, paths))
    shapes = {name: by_path(structure)[path].shape for name, path in ours.items()}
    for name in sorted(theirs.keys() | shapes.keys()):
        found = theirs[name].shape if name in theirs else "missing"
        needed = shapes.get(name, "missing")
        if found != needed:
            raise UserError(
                "config.generator.init_from is a run whose generator does not fit: "
                f"{name} is {found} there, {needed} here"
            )
    return {ours[name]: x for name, x in theirs.items()}
