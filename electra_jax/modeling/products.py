"""Matrix products with gradients of their own: the same numbers, faster than by autodiff."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

DENSE_OUTPUT = "dense_output"  # by this name a remat policy finds the products with parameters


def dense_product(x: Array, kernel: Array, dimension_numbers: tuple, **_: None) -> Array:
    """`jax.lax.dot_general` for dense layers, with its own order in the kernel's gradient.

    XLA for CPU copies the first operand of that product into another order, and computes what the
    copy needs inside it, element by element. So the smaller operand comes first: x^T g where a
    layer widens, (g^T x)^T where it narrows. Autodiff always takes the latter.
    """
    return checkpoint_name(_dense_product(x, kernel, len(dimension_numbers[0][0])), DENSE_OUTPUT)


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
