"""Arrays in memory as rows for the loader."""

from dataclasses import dataclass

import numpy as np

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
