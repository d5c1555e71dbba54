"""Looking into traced functions: tests count what a program does without compiling it."""

import math
from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def matrix_products(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, int]]:
    """Every `dot_general`, inside loops and calls too, and how often it runs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation, 1
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            for product, inner_times in matrix_products(inner):
                yield product, times * inner_times


def operations(product: JaxprEqn) -> int:
    """2 for each multiply-add."""
    (contracted, _), _ = product.params["dimension_numbers"]
    shape = product.invars[0].aval.shape
    return 2 * product.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
