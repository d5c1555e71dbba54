"""Attention for all encoders: who may see whom, and the weighted sum of what is seen."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from electra_jax.modeling import layers
from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.products import float32_einsum

IMPLEMENTATIONS = ("exact",)
MASKED_SCORE = -1e9  # added to the scores of keys that a query may not attend to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Which tokens of a row belong together, worked out once for all layers.

    Attributes:
      ids: the segments of a row are numbered from 1; 0 is padding.
      bias: 0 where query and key have the same id, `MASKED_SCORE` elsewhere; what `exact` adds to
        the scores.
    """

    ids: Int[Array, "B L"]
    bias: Float[Array, "B 1 L L"]

    @classmethod
    def of(cls, ids: Int[Array, "B L"]) -> "Segments":
        """The segments with these ids."""
        same = ids[:, :, None] == ids[:, None, :]
        return cls(ids, jnp.where(same, 0.0, MASKED_SCORE)[:, None])


def attend(
    query: Float[Array, "B L A D"],
    key: Float[Array, "B L A D"],
    value: Float[Array, "B L A D"],
    segments: Segments,
    *,
    window: int | Int[Array, ""] | None = None,
    bias: Float[Array, "#B #A L L"] | None = None,
    dropout: float = 0.0,
    dropout_key: PRNGKey | None = None,
    implementation: str = "exact",
) -> Float[Array, "B L A D"]:
    """softmax(query key^T / sqrt(D) + bias) value, over the keys that each query may see.

    Args:
      segments: a query sees the keys of its own segment. Padding sees itself, so that every query
        has a key; nothing else sees it.
      window: a query sees keys that are at most so far from it, to either side.
      bias: added to the scores.
      dropout: rate at which probabilities are dropped.
      dropout_key: seeds dropout; None switches it off.
      implementation: one of `IMPLEMENTATIONS`. `exact` has all scores at once, and adds them up and
        normalizes them in float32.

    Returns:
      A vector for each query and head, in the dtype of `value`.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=}; allowed: {', '.join(IMPLEMENTATIONS)}")
    scores = float32_einsum("bqad,bkad->baqk", query / math.sqrt(query.shape[-1]), key)
    if bias is not None:
        scores += bias
    scores += segments.bias
    if window is not None:
        place = jnp.arange(query.shape[1])
        is_near = jnp.abs(place[:, None] - place[None, :]) <= window
        scores += jnp.where(is_near, 0.0, MASKED_SCORE)[None, None]
    weights = layers.dropout(jax.nn.softmax(scores).astype(value.dtype), dropout, dropout_key)
    return jnp.einsum("baqk,bkad->bqad", weights, value)
