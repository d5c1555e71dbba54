"""Sums of steps on their way from the device to means of a window.

The loop never waits for the device. Each step's sums stay there until the step after the window's
last one has been dispatched; then the whole window is fetched at once.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from electra_jax.objectives import metrics
from electra_jax.objectives.base import Sums

OWN = ("learning_rate", "grad_norm", "tokens")  # no metrics of an objective: without a prefix


class Window:
    """Collects the sums of each step, and adds up a window of them at a time.

    Updates that are not finite are skipped, and `log` is told; where more than `max_skipped` in a
    row are, fetching raises FloatingPointError, which names the step.

    Args:
      loss_terms: weights that make up the total loss.
      saved: what `to_save` has returned before the run was interrupted.
    """

    def __init__(
        self,
        loss_terms: dict[str, float],
        max_skipped: int,
        log: Callable[[str], None],
        saved: dict | None = None,
    ):
        self.loss_terms, self.max_skipped, self.log = loss_terms, max_skipped, log
        self.open: list[tuple[int, Sums]] = []
        self.complete: list[tuple[int, Sums]] = []
        saved = saved or {"totals": {}, "skipped_in_a_row": 0}
        self.totals = {name: np.asarray(total) for name, total in saved["totals"].items()}
        self.skipped_in_a_row: int = saved["skipped_in_a_row"]

    def add(self, step: int, sums: Sums) -> None:
        """Collect the sums of a step just dispatched."""
        self.open.append((step, sums))

    def close(self) -> None:
        """Steps from here on belong to the next window."""
        self.complete, self.open = self.open, []

    def take(self) -> tuple[int, dict[str, float]] | None:
        """Fetch and check the complete window: its last step and its metrics, or None."""
        if not self.complete:
            return None
        step, (complete, self.complete) = self.complete[-1][0], (self.complete, [])
        self._fetch(complete)
        skipped = self.totals.pop("skipped_updates")[0]
        values, self.totals = metrics.summarize(self.totals, self.loss_terms), {}
        if not values.keys() & self.loss_terms.keys():  # all were skipped
            del values["loss"]
        own = {name: values.pop(name) for name in OWN if name in values}
        values = {f"train/{name}": value for name, value in values.items()} | own
        if self.max_skipped:
            values["skipped_updates"] = float(skipped)
        return step, values

    def catch_up(self) -> None:
        """Fetch and check the steps of the window that is open, once `take` has been called."""
        steps, self.open = self.open, []
        self._fetch(steps)

    def to_save(self) -> dict:
        """What a resumed run needs in order to go on with the open window, after `catch_up`."""
        totals = {name: total.tolist() for name, total in self.totals.items()}
        return {"totals": totals, "skipped_in_a_row": self.skipped_in_a_row}

    def _fetch(self, steps: list[tuple[int, Sums]]) -> None:
        for step, sums in jax.device_get(steps):
            is_skipped = bool(bad := not_finite(sums))
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_skipped else 0
            if self.skipped_in_a_row > self.max_skipped:
                after = f" after {self.max_skipped} skipped updates" if self.max_skipped else ""
                refuse_not_finite(step, sums, after)
            if is_skipped:
                self.log(f"warning: step {step}: {', '.join(bad)} not finite; update skipped")
                sums = {name: sums[name] for name in ("learning_rate", "tokens")}
            counted = {"skipped_updates": np.array([is_skipped, 1])}
            self.totals = add_up([self.totals, sums | counted])


def not_finite(values: dict[str, np.ndarray | float]) -> list[str]:
    """The names of those that are NaN or infinite."""
    return [name for name, value in values.items() if not np.isfinite(value).all()]


def refuse_not_finite(step: int, values: dict[str, np.ndarray | float], after: str = "") -> None:
    """Raises FloatingPointError where some of the metrics of a step are NaN or infinite."""
    if bad := not_finite(values):
        raise FloatingPointError(
            f"step {step}: {', '.join(bad)} not finite{after}; all checkpoints are from before "
            "this step"
        )


def add_up(sums: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Totals by name, in float64."""
    totals: dict[str, np.ndarray] = {}
    for one in sums:
        for name, value in one.items():
            totals[name] = totals.get(name, 0) + np.asarray(value, np.float64)
    return totals
