"""Arrays of rows through a compiled network, in order and with flat memory."""

import collections
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from electra_jax.data import loader
from electra_jax.modeling.electra import Params
from electra_jax.parallel import Predict

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Arrays whose first axis is the row, as rows for `loader`. `input_ids` is one of them."""

    arrays: Arrays

    def __len__(self) -> int:
        return len(self.arrays["input_ids"])

    @property
    def groups(self) -> np.ndarray:
        """All rows are one group."""
        return np.array([0, len(self)])

    def batch(self, indices: np.ndarray) -> Arrays:
        """The rows at `indices`; -1 stands for a row of padding, whose labels count nowhere."""
        is_row = indices >= 0
        batch = {}
        for name, x in self.arrays.items():
            batch[name] = x[np.where(is_row, indices, 0)]
            batch[name][~is_row] = -1 if name == "label" and x.ndim == 2 else 0
        return batch


def predict_rows(
    predict: Predict,
    params: Params,
    rows: loader.Rows,
    batch_size: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Arrays | None:
    """The outputs for all rows, in order; None where `is_stopped` has said so.

    Args:
      rows: at least one.
      is_stopped: is asked before every batch.
    """
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
