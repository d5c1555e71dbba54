"""The small parts that every tower is made of: initialisers, dropout, dense and normalisation.

Shape names used in all annotations: B batch, L length, P masked positions, E embedding width,
H hidden width, F feed-forward width, A attention heads, D head width, V vocabulary,
N layers (stacked parameters carry it in front).
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

DENSE_OUTPUT = "dense_output"  # by this name a remat policy finds the products with parameters
LAYER_NORM_EPSILON = 1e-12  # spec 1.4: BERT's value, far below Flax's default of 1e-6

PRNGKey = Key[Array, ""]

# Spec 1.5: layers that the original code created without an initialiser got the framework's.
glorot_uniform = nnx.initializers.glorot_uniform()


def truncated_normal(stddev: float) -> nnx.Initializer:
    """Normal draws cut at two sigma and not rescaled, as BERT's (spec 1.5)."""
    return nnx.initializers.truncated_normal(stddev)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dense_product(x: Array, kernel: Array, num_axes: int) -> Array:
    """Contracts the last `num_axes` axes of `x` with the first of `kernel`."""
    inner = tuple(range(x.ndim - num_axes, x.ndim)), tuple(range(num_axes))
    return jax.lax.dot_general(x, kernel, (inner, ((), ())))


def _dense_product_forward(x, kernel, num_axes):
    return _dense_product(x, kernel, num_axes), (x, kernel)


def _dense_product_backward(num_axes, operands, gradient):
    x, kernel = operands
    rows = tuple(range(x.ndim - num_axes))
    outer = tuple(range(len(rows), gradient.ndim)), tuple(range(num_axes, kernel.ndim))
    x_gradient = jax.lax.dot_general(gradient, kernel, (outer, ((), ())))
    over_rows = ((rows, rows), ((), ()))
    if x.size <= gradient.size:
        return x_gradient, jax.lax.dot_general(x, gradient, over_rows)
    transposed = jax.lax.dot_general(gradient, x, over_rows)
    num_outer = len(outer[1])
    order = (*range(num_outer, kernel.ndim), *range(num_outer))
    return x_gradient, transposed.transpose(order)


_dense_product.defvjp(_dense_product_forward, _dense_product_backward)


def dense_product(x: Array, kernel: Array, dimension_numbers: tuple, **_: None) -> Array:
    """`jax.lax.dot_general` for dense layers, with its own order in the kernel's gradient.

    XLA for CPU copies the first operand of that product into another order, and computes what the
    copy needs inside it, element by element. So the smaller operand comes first: x^T g where a
    layer widens, (g^T x)^T where it narrows. Autodiff always takes the latter.
    """
    return checkpoint_name(_dense_product(x, kernel, len(dimension_numbers[0][0])), DENSE_OUTPUT)


def dense(
    in_features: int | tuple[int, ...],
    out_features: int | tuple[int, ...],
    kernel_init: nnx.Initializer,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A linear map from the trailing `in_features` axes to `out_features` axes, with bias."""
    num_axes = len(in_features) if isinstance(in_features, tuple) else 1
    return nnx.LinearGeneral(
        in_features,
        out_features,
        axis=tuple(range(-num_axes, 0)),
        kernel_init=kernel_init,
        dtype=dtype,
        dot_general=dense_product,
        rngs=rngs,
    )


def layer_norm(features: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer normalisation with float32 two-pass statistics, whatever the compute dtype."""
    return nnx.LayerNorm(
        features, epsilon=LAYER_NORM_EPSILON, dtype=dtype, use_fast_variance=False, rngs=rngs
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float32_einsum(
    subscripts: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """A product of two arrays with a float32 result, whatever their dtype.

    Its gradient is rounded to the operands' dtype, so that in bfloat16 the two products of the
    backward pass run at full speed like the forward one. Autodiff alone would make them float32.
    """
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _float32_einsum_forward(subscripts, x, y):
    return float32_einsum(subscripts, x, y), (x, y)


def _float32_einsum_backward(subscripts, operands, gradient):
    x, y = operands
    gradient = gradient.astype(x.dtype)
    x_axes, y_axes, axes = subscripts.replace("->", ",").split(",")
    return (
        jnp.einsum(f"{axes},{y_axes}->{x_axes}", gradient, y),
        jnp.einsum(f"{axes},{x_axes}->{y_axes}", gradient, x),
    )


float32_einsum.defvjp(_float32_einsum_forward, _float32_einsum_backward)


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
