"""The dtype of activations."""

import jax
import jax.numpy as jnp


def compute_dtype(name: str) -> jnp.dtype:
    """What `config.model.dtype` stands for on this machine."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)
