"""What an objective is, to the loop, the step and the devices."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num, PyTree

from electra_jax.modeling.electra import Context
from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.schedules import Step

Batch = dict[str, Num[Array, "B ..."]]
Sums = dict[str, Float[Array, "..."]]


@runtime_checkable
class Objective(Protocol):
    """A pure loss over parameters, a batch and keys.

    What changes during training is a function of the step counter, inside the one compiled step:
    so resuming is exact and nothing is compiled again. Evaluation has no step: it is always that
    of the end.
    """

    @property
    def dtype(self) -> DTypeLike:
        """Of the computation."""
        ...

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """What can be measured, by the names in `sums`, in the order in which it is shown."""
        ...

    def symptoms(self, logged: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
        """What may be wrong with the training: a name, and a sentence, or "" where all is well.

        Asked from when on networks should have learned something, see `monitoring.health`.

        Args:
          logged: since then, metrics of the newest windows of training (`train/NAME`), and of all
            evaluations (`eval/NAME`), each the newest last.
        """
        ...

    @property
    def loss_terms(self) -> dict[str, float]:
        """Weight of each mean in the total loss at the end of training."""
        ...

    def loss_weights(self, step: Step) -> dict[str, float | Float[Array, ""]]:
        """The same at `step`."""
        ...

    @property
    def switch_step(self) -> int:
        """The step that a second stage begins with, or 0."""
        ...

    def second_stage(self, params: Params) -> Params:
        """What the second stage begins with, from what the first has ended with."""
        ...

    def is_trained(self, name: str, step: Step) -> bool | Bool[Array, ""]:
        """Whether the parameter `name` moves at `step`."""
        ...

    def init(self, key: PRNGKey) -> Params:
        """Fresh parameters."""
        ...

    def structure(self) -> Params:
        """Shapes and dtypes of the parameters."""
        ...

    def mask(self, batch: Batch, key: PRNGKey) -> PyTree:
        """What is drawn before the networks run, for the rows of `batch`."""
        ...

    def totals(self, batch: Batch, masked: PyTree) -> dict[str, Float[Array, ""]]:
        """For each loss term, the weight that its sum is divided by."""
        ...

    def sums(
        self,
        params: Params,
        batch: Batch,
        masked: PyTree,
        key: PRNGKey,
        dropout_key: PRNGKey | None,
        evaluation: bool,
        step: Step = None,
    ) -> Sums:
        """Metrics as `[sum, weight]` pairs, loss terms among them.

        Sums over rows only: parts of a batch can be added up. The step divides by totals of the
        global batch, so no number depends on how the batch was split.
        """
        ...


def is_real(batch: Batch) -> Array:
    """True for tokens, False for padding; bool [B, L]."""
    return batch["piece_ids"] > 0


def context(batch: Batch) -> Context:
    """What both towers read beside the ids."""
    return Context(batch["piece_ids"], batch["position_ids"], batch["token_type_ids"])


def pair(values: Float[Array, "*dims"], weights: Float[Array, "*dims"]) -> Float[Array, "2"]:
    """`[weighted sum, weight]`: divide the one by the other for the mean."""
    return jnp.stack([(values * weights).sum(), weights.sum()])


def binary_cross_entropy(
    logits: Float[Array, "*dims"], labels: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Negative log-probabilities of `labels`, ones and zeros."""
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
