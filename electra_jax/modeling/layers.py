"""The small parts that every network is made of: initializers, dropout, dense and normalization.

Shape names used in all annotations: B batch, L length, P masked positions, E embedding width,
H hidden width, F feed-forward width, A attention heads, D head width, V vocabulary,
N layers (stacked parameters carry it in front).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from electra_jax.modeling.params import ParamInfo
from electra_jax.modeling.products import dense_product

LAYER_NORM_EPSILON = 1e-12  # spec 1.4: BERT's value, far below Flax's default of 1e-6

PRNGKey = Key[Array, ""]

# Spec 1.5: layers that the original code created without an initializer got the framework's.
glorot_uniform = nnx.initializers.glorot_uniform()


def truncated_normal(stddev: float) -> nnx.Initializer:
    """Normal draws cut at two sigma and not rescaled, as BERT's (spec 1.5)."""
    return nnx.initializers.truncated_normal(stddev)


def dense(
    in_features: int | tuple[int, ...],
    out_features: int | tuple[int, ...],
    kernel_init: nnx.Initializer,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
    axes: tuple[str | None, ...] = ("embed", None),
    depth: str = "output",
    bias: bool = True,
) -> nnx.LinearGeneral:
    """A linear map from the trailing `in_features` axes to `out_features` axes.

    Args:
      axes, depth: those of the kernel, see `ParamInfo`.
    """
    num_axes = len(in_features) if isinstance(in_features, tuple) else 1
    # A bias along the width is too small to be worth gathering.
    bias_axes = tuple(axis if axis != "embed" else None for axis in axes[num_axes:])
    return nnx.LinearGeneral(
        in_features,
        out_features,
        axis=tuple(range(-num_axes, 0)),
        use_bias=bias,
        kernel_init=kernel_init,
        dtype=dtype,
        dot_general=dense_product,
        rngs=rngs,
        kernel_metadata={"info": ParamInfo(axes, depth=depth)},
        bias_metadata={"info": ParamInfo(bias_axes, decays=False, depth=depth)},
    )


def layer_norm(
    features: int,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
    depth: str = "output",
    bias: bool = True,
    epsilon: float = LAYER_NORM_EPSILON,
) -> nnx.LayerNorm:
    """Layer normalization with float32 two-pass statistics, whatever the compute dtype."""
    metadata = {"info": ParamInfo((None,), decays=False, depth=depth)}
    return nnx.LayerNorm(
        features,
        epsilon=epsilon,
        dtype=dtype,
        use_bias=bias,
        use_fast_variance=False,
        rngs=rngs,
        scale_metadata=metadata,
        bias_metadata=metadata,
    )


@jax.checkpoint  # the backward pass needs x alone, not the values in between
def gelu(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """The exact erf form (spec 1.4), not the tanh approximation that JAX defaults to.

    `jax.nn.gelu(approximate=False)` goes through erfc, which costs several times more on CPU.
    """
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


def dropout(x: Float[Array, "*dims"], rate: float, key: PRNGKey | None) -> Float[Array, "*dims"]:
    """Inverted dropout; `key=None` means evaluation.

    One hash yields four bytes and a byte decides one element, so the rate is rounded to a
    multiple of 1/256; kept values are divided by the exact kept fraction and stay unbiased.
    """
    threshold = round(256 * rate)
    if key is None or threshold == 0:
        return x
    *leading, last = x.shape
    words = jax.random.bits(key, (*leading, -(-last // 4)), jnp.uint32)
    noise = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*leading, -1)[..., :last]
    return jnp.where(noise >= threshold, x / (1 - threshold / 256), 0)


def split_key(key: PRNGKey | None, number: int = 2) -> Key[Array, " number"] | tuple[None, ...]:
    """Several keys for dropout out of one; None stays None."""
    return (None,) * number if key is None else jax.random.split(key, number)
