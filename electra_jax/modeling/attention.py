"""Attention for all encoders: who may see whom, and the weighted sum of what is seen."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from electra_jax.modeling import layers
from electra_jax.modeling.layers import PRNGKey
from electra_jax.modeling.products import float32_einsum

IMPLEMENTATIONS = ("exact",)
MASKED_SCORE = -1e9  # added to the scores of keys that a query may not attend to


def attend(
    query: Float[Array, "B L A D"],
    key: Float[Array, "B L A D"],
    value: Float[Array, "B L A D"],
    segment_ids: Int[Array, "B L"],
    *,
    window: int | Int[Array, ""] | None = None,
    bias: Float[Array, "#B #A L L"] | None = None,
    dropout: float = 0.0,
    dropout_key: PRNGKey | None = None,
    implementation: str = "exact",
) -> Float[Array, "B L A D"]:
    """softmax(query key^T / sqrt(D) + bias) value, over the keys that each query may see.

    Args:
      segment_ids: a query sees the keys of its own segment. Segments in a row are numbered from 1.
        Padding, 0, sees itself, so that every query has a key; nothing else sees it.
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
    scores += jnp.where(visible(segment_ids, window), 0.0, MASKED_SCORE)[:, None]
    weights = layers.dropout(jax.nn.softmax(scores).astype(value.dtype), dropout, dropout_key)
    return jnp.einsum("baqk,bkad->bqad", weights, value)


def visible(
    segment_ids: Int[Array, "B L"], window: int | Int[Array, ""] | None
) -> Bool[Array, "B L L"]:
    """For each query, by rows, the keys that it may attend to."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    if window is None:
        return same
    place = jnp.arange(segment_ids.shape[1])
    return same & (jnp.abs(place[:, None] - place[None, :]) <= window)[None]
