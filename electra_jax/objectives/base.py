"""What an objective is, to the loop, the step and the devices."""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Num, PyTree

from electra_jax.modeling.encoders.base import Context
from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.params import Params, param_infos
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.schedules import Scalar, Step

Batch = dict[str, Num[Array, "B ..."]]
Sums = dict[str, Float[Array, "..."]]
Logged = Sequence[Mapping[str, float]]
Symptoms = Iterator[tuple[str, str]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What an objective computes the sums of some rows from, beside the parameters."""

    batch: Batch
    masked: PyTree  # what `Objective.mask` has drawn for these rows
    sample_key: PRNGKey  # the same for all rows of a step: each folds its number into it
    dropout_key: PRNGKey | None = None  # of these rows; None switches dropout off
    step: Step = None
    is_evaluation: bool = dataclasses.field(default=False, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """There are none beside those that all objectives share."""


class Objective(abc.ABC):
    """A pure loss over parameters, a batch and keys. Subclasses are frozen dataclasses.

    What changes during training is a function of the step counter, inside the one compiled step:
    so resuming is exact and nothing is compiled again. Evaluation has no step: it is always that
    of the end. `Settings` is a section with the objective's own fields of `config.loss`.
    """

    Settings: ClassVar[type] = NoSettings

    @property
    @abc.abstractmethod
    def dtype(self) -> DTypeLike:
        """The dtype of activations and matrix products."""

    @property
    @abc.abstractmethod
    def metrics(self) -> Mapping[str, Metric]:
        """What can be measured, by the names in `sums`, in the order in which it is shown."""

    @abc.abstractmethod
    def network(self, rngs: nnx.Rngs) -> nnx.Module:
        """A new network whose parameters are drawn from `rngs`."""

    @abc.abstractmethod
    def flops_per_token(self, length: int) -> float:
        """Operations for one token of a training step on rows of `length` tokens."""

    @abc.abstractmethod
    def loss_weights(self, step: Step) -> dict[str, Scalar]:
        """Weight of each mean loss in the total at `step`."""

    @abc.abstractmethod
    def mask(self, batch: Batch, key: PRNGKey) -> PyTree:
        """What is drawn for the rows of `batch` before the network runs."""

    @abc.abstractmethod
    def denominators(self, batch: Batch, masked: PyTree) -> dict[str, Float[Array, ""]]:
        """For each loss term, the weight that its sum is divided by."""

    @abc.abstractmethod
    def sums(self, params: Params, inputs: Inputs) -> Sums:
        """Metrics as `[sum, weight]` pairs, loss terms among them.

        Sums over rows only: parts of a batch can be added up. The step divides by denominators of
        the global batch, so no number depends on how the batch was split.
        """

    # One stage and no symptoms, unless a subclass says otherwise

    @property
    def switch_step(self) -> int:
        """The step that the second stage begins with, or 0."""
        return 0

    def second_stage(self, params: Params) -> Params:
        """What the second stage begins with, from what the first has ended with."""
        return params

    def is_trained(self, name: str, step: Step) -> bool | Bool[Array, ""]:
        """Whether the parameter `name` moves at `step`."""
        return True

    def symptoms(self, logged: Logged) -> Symptoms:
        """What may be wrong with the training: a name, and a sentence, or "" where all is well.

        Args:
          logged: metrics of the newest windows (`train/NAME`) and of all evaluations (`eval/NAME`)
            since networks should have learned something, the newest last.
        """
        return iter(())

    # What follows

    @property
    def loss_terms(self) -> dict[str, float]:
        """Weight of each mean loss in the total at the end of training."""
        return self.loss_weights(None)

    def init(self, key: PRNGKey) -> Params:
        """Fresh float32 parameters."""
        return nnx.to_pure_dict(nnx.state(self.network(nnx.Rngs(params=key))))

    def structure(self) -> Params:
        """Shapes and dtypes of the parameters: costs no memory at any size."""
        return jax.tree.map(lambda x: x, _structure(self)[1])  # the caller's own

    def param_infos(self) -> Params:
        """What each parameter says of itself, see `modeling.params.ParamInfo`."""
        return jax.tree.map(lambda x: x, _structure(self)[2])

    def bind(self, params: Params) -> nnx.Module:
        """The network with `params` cast, once, to the compute dtype."""
        cast = jax.tree.map(lambda x: x.astype(self.dtype), params)
        return nnx.merge(_structure(self)[0], cast)


@functools.lru_cache
def _structure(objective: Objective) -> tuple[nnx.GraphDef, Params, Params]:
    graph, state = nnx.split(nnx.eval_shape(lambda: objective.network(nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state), param_infos(state)


def is_real(batch: Batch) -> Array:
    """True for tokens, False for padding; bool [B, L]."""
    return batch["segment_ids"] > 0


def context(batch: Batch) -> Context:
    """What both networks read beside the ids."""
    return Context(batch["segment_ids"], batch["position_ids"], batch["token_type_ids"])


def pair(values: Float[Array, "*dims"], weights: Float[Array, "*dims"]) -> Float[Array, "2"]:
    """`[weighted sum, weight]`: divide the one by the other for the mean."""
    return jnp.stack([(values * weights).sum(), weights.sum()])


def binary_cross_entropy(
    logits: Float[Array, "*dims"], labels: Float[Array, "*dims"]
) -> Float[Array, "*dims"]:
    """Negative log-probabilities of `labels`, ones and zeros."""
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
