"""Outputs of rows through a compiled network, in order and with flat memory."""

import collections
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from electra_jax.data import loader
from electra_jax.data.features import Arrays
from electra_jax.modeling.params import Params
from electra_jax.objectives.base import Batch
from electra_jax.sharding.mesh import BATCH, P, place, share_of_rows


class Predict:
    """`outputs`, compiled for `mesh`: (parameters, this process's rows) to what comes out.

    Rows come back in any order, everywhere; `row` among the outputs says which is which.
    """

    def __init__(
        self,
        mesh: Mesh,
        outputs: Callable[[Params, Batch], dict[str, Array]],
        compiler_options: dict[str, int] | None = None,
    ):
        self.rows, everywhere = NamedSharding(mesh, BATCH), NamedSharding(mesh, P())
        self.share = share_of_rows(self.rows)  # which rows of a batch are this process's

        def with_rows(params: Params, batch: Batch) -> dict[str, Array]:
            return outputs(params, batch) | {"row": batch["row"]}

        self.compiled = jax.jit(
            with_rows, out_shardings=everywhere, compiler_options=compiler_options
        )

    def __call__(self, params: Params, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Places the rows, and starts to compute."""
        return self.compiled(params, place(batch, self.rows, per_device=False))


def predict_rows(
    predict: Predict,
    params: Params,
    rows: loader.Rows,
    batch_size: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Arrays | None:
    """The outputs for all rows, in order; None where `is_stopped`, asked for a batch, says so."""
    part, parts = predict.share
    found, running = [], collections.deque()
    for batch in loader.eval_batches(
        rows, batch_size=batch_size, process_index=part, process_count=parts
    ):
        if is_stopped():
            return None
        running.append(predict(params, batch))
        if len(running) > 4:  # the device always has work, and memory stays flat
            found.append(jax.device_get(running.popleft()))
    found += jax.device_get(list(running))
    order = np.argsort(np.concatenate([outputs["row"] for outputs in found]))[: len(rows)]
    return {
        name: np.concatenate([outputs[name] for outputs in found])[order]
        for name in found[0]
        if name != "row"
    }
