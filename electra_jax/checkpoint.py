"""Checkpoints: Orbax behind four verbs, `save`, `restore`, `latest_step` and `close`.

Saving is asynchronous and atomic: what lies under a step's number is whole. A checkpoint holds the
train state and the hash of the token store it was trained on; the run's configuration and tokenizer
lie beside the checkpoints in the run directory.
"""

from pathlib import Path

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

from electra_jax.config import BEST_METRICS
from electra_jax.errors import UserError
from electra_jax.step import TrainState


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: made when missing.
      store_hash: of the token store; a checkpoint made with another one is refused.
      keep: number of newest checkpoints that stay.
      keep_best: name of a metric whose best checkpoint stays as well, or "".
    """

    def __init__(self, directory: Path, store_hash: str, keep: int, keep_best: str = ""):
        policies = [preservation.LatestN(keep)]
        if keep_best:
            policies.append(
                preservation.BestN(
                    get_metric_fn=lambda metrics: metrics[keep_best],
                    reverse=not BEST_METRICS[keep_best],
                    n=1,
                )
            )
        self.store_hash = store_hash
        self.manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preservation.AnyPreservationPolicy(policies)
            ),
        )

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
        restored = self.manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state),
                provenance=ocp.args.JsonRestore(),
            ),
        )
        found = restored.provenance["store_hash"]
        if found != self.store_hash:
            raise UserError(
                f"{self.manager.directory}/{step} was trained on the token store {found[:12]}, but "
                f"config.data gives the store {self.store_hash[:12]}; use another --workdir"
            )
        return restored.state

    def close(self) -> None:
        """Wait for what is being saved."""
        self.manager.close()
