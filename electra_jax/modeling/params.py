"""Parameters: nested dicts of float32 arrays, and their names."""

import jax

Params = dict  # a nested dict of float32 arrays


def path_name(path: tuple) -> str:
    """`discriminator/encoder/layers/up/kernel` for a key path into a tree of parameters."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
