"""What a head is: the layers on an encoder, their losses, and what comes out of them."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy

from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.layers import PRNGKey
from electra_jax.objectives.base import Batch, Sums, pair
from electra_jax.objectives.metrics import Metric

STYLES = ("original", "huggingface")
LOSS = Metric("Loss", "nats", better="lower", console="loss")

Hidden = Float[Array, "B L H"]  # the states of the encoder
Outputs = dict[str, Array]  # float32 or int32, a row for each row of the batch


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """What Hugging Face has of a head: a key of `Naming.parts`, and a `problem_type` if any."""

    part: str
    problem_type: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(ABC):
    """What is predicted, and the layers that do so. Their parameters lie below `head/`."""

    labels: tuple[str, ...] = ()  # names of what is predicted, if any; a label's place is its id
    style: str = "original"  # `huggingface`: as the classes of `transformers`, if they are others

    loss_terms: ClassVar[Mapping[str, float]] = {"loss": 1.0}  # weight of each mean in the total
    metrics: ClassVar[Mapping[str, Metric]] = {"loss": LOSS}  # of the sums, and of the total `loss`
    inputs: ClassVar[tuple[str, ...]] = ()  # features that `outputs` reads beside the encoder's
    # Fields of the head that the training data decide; those of `config.data` then keep them.
    from_data: ClassVar[tuple[str, ...]] = ("labels",)
    huggingface: ClassVar[HuggingFace | None] = None  # the counterpart of the style `huggingface`

    @abstractmethod
    def layers(self, encoder: EncoderConfig, rngs: nnx.Rngs) -> nnx.Module:
        """Fresh layers on an encoder of these sizes; they compute in its dtype."""

    @abstractmethod
    def sums(self, layers: Any, hidden: Hidden, batch: Batch, key: PRNGKey | None) -> Sums:
        """The loss terms and other metrics as `[sum, weight]` pairs.

        Args:
          layers: what `layers` has made, with parameters.
          key: seeds dropout; None switches it off.
        """

    @abstractmethod
    def outputs(self, layers: Any, hidden: Hidden, batch: Batch) -> Outputs:
        """What a task makes predictions of."""

    def weights(self, batch: Batch) -> Array:
        """What the loss is a mean over: 1 for each row of the data, 0 for rows of padding."""
        return (batch["segment_ids"] > 0).any(axis=-1).astype(jnp.float32)


def label_sums(
    logits: Float[Array, "*dims C"], labels: Int[Array, "*dims"], weights: Float[Array, "*dims"]
) -> Sums:
    """Loss and accuracy of one label out of C."""
    is_right = (logits.argmax(axis=-1) == labels).astype(jnp.float32)
    return {
        "loss": pair(cross_entropy(logits, labels), weights),
        "accuracy": pair(is_right, weights),
    }
