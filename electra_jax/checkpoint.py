"""Checkpoints: Orbax behind three verbs, `save`, `restore` and `latest_step`.

Saving is asynchronous and atomic: what lies under a step's number is whole. A checkpoint holds the
train state and the hash of the token store it was trained on; the run's configuration and tokenizer
lie beside the checkpoints in the run directory.
"""

import math
from pathlib import Path

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from electra_jax.config import BEST_METRICS
from electra_jax.errors import UserError
from electra_jax.step import TrainState


class Checkpoints:
    """The checkpoints of one run. Leaving the `with` block waits for what is being saved.

    Args:
      directory: made when missing.
      store_hash: of the token store; a checkpoint made with another one is refused.
      keep: number of newest checkpoints that stay.
      keep_best: name of a metric whose best checkpoint stays as well, or "".
    """

    def __init__(self, directory: Path, store_hash: str, keep: int, keep_best: str = ""):
        def score(metrics: dict[str, float]) -> float:
            sign = 1 if BEST_METRICS[keep_best] else -1
            return sign * metrics[keep_best] if keep_best in metrics else -math.inf

        policies = [preservation.LatestN(keep)]
        if keep_best:
            policies.append(
                preservation.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
            )
        self.store_hash = store_hash
        self.manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation.AnyPreservationPolicy(policies),
                best_fn=score if keep_best else None,  # or else Orbax does not store metrics
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        self.manager.close()

    def latest_step(self) -> int | None:
        """The newest whole checkpoint, or None."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, metrics: dict[str, float]) -> None:
        """Start to save; returns when `state` may change again."""
        self.manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                provenance=ocp.args.JsonSave({"store_hash": self.store_hash}),
            ),
            metrics=metrics,
        )

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """The state of `step`, laid out as `abstract_state` says.

        Raises:
          UserError: the checkpoint was trained on another token store.
        """
        provenance = self._read(step, "provenance", ocp.args.JsonRestore())
        if provenance["store_hash"] != self.store_hash:
            raise UserError(
                f"{self.manager.directory / str(step)} was trained on the token store "
                f"{provenance['store_hash'][:12]}, but config.data gives the store "
                f"{self.store_hash[:12]}; use another --workdir"
            )
        return self._read(step, "state", ocp.args.StandardRestore(abstract_state))

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs):
        return self.manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
