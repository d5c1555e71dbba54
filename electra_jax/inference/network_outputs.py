"""What the networks of a pre-training run make of a text, token by token.

Pure functions of parameters and a batch, to be compiled by `prediction.Predict`. The report's
gallery, the samples for TensorBoard and `electra_jax.predict` show what comes out of them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from electra_jax.modeling.params import Params
from electra_jax.objectives import masking
from electra_jax.objectives.base import Batch, context
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.schedules import at
from electra_jax.training.step import evaluation_inputs

Outputs = dict[str, Array]


def corrupted(
    objective: ReplacedTokenDetection, seed: int, top_k: int, params: Params, batch: Batch
) -> Outputs:
    """The text with the generator's samples in it, and the discriminator's logits.

    Masks and samples are those of the evaluation: they depend on the seed of the run, on the row's
    number and on its tokens.

    Returns:
      `shown_ids`, what the discriminator reads, its `logits`, and `loss_mask`, all
      [B, L]; `positions` [B, P] that the generator was asked about and their `weights`, 0 for slots
      not in use; `proposals` [B, P, top_k], the best first, and their `probabilities`.
    """
    model = objective.bind(params)
    inputs = evaluation_inputs(objective, batch, seed)
    masked = inputs.masked
    logits = objective.generator_logits(model, batch, masked, None)
    _, shown_ids = objective.corrupt(logits, batch, masked, inputs.sample_key, None)
    sampled_from = masking.proposal_logits(
        logits, masked.labels, at(objective.temperature, None), objective.disallow_correct
    )
    return {
        "shown_ids": shown_ids,
        "logits": model.discriminate(shown_ids, context(batch), None),
        "loss_mask": objective.loss_mask(batch, masked),
        "positions": masked.masked_positions,
        "weights": masked.weights,
        **best(sampled_from, top_k),
    }


def detected(objective: ReplacedTokenDetection, params: Params, batch: Batch) -> Outputs:
    """The discriminator's `logits` [B, L] for the text as it is."""
    logits = objective.bind(params).discriminate(batch["input_ids"], context(batch), None)
    return {"logits": logits}


def filled(objective: MaskedLanguageModel, top_k: int, params: Params, batch: Batch) -> Outputs:
    """The generator's `proposals` [B, P, K] and their `probabilities` at `positions` [B, P]."""
    positions = batch["positions"]
    logits = objective.bind(params).generate(batch["input_ids"], context(batch), positions, None)
    return best(logits, top_k)


def embedded(objective: MaskedLanguageModel, pooling: str, params: Params, batch: Batch) -> Outputs:
    """`sums` of states [B, H] of the network that is kept, and how many there are, `weights` [B].

    The states are those of all tokens of a row, or of [CLS] alone.
    """
    model, ids = objective.bind(params), batch["input_ids"]
    if objective.model.discriminator:
        states = model.discriminator_states(ids, context(batch), None)
    else:
        everywhere = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        states = model.generator_states(ids, context(batch), everywhere, None)
    is_counted = (batch["segment_ids"] > 0).at[:, 1:].min(pooling == "mean")
    weights = is_counted.astype(jnp.float32)
    sums = jnp.einsum("blh,bl->bh", states.astype(jnp.float32), weights)
    return {"sums": sums, "weights": weights.sum(axis=1)}


def best(logits: Float[Array, "B P Vpad"], top_k: int) -> Outputs:
    """The `top_k` most probable tokens, the best first, and their probabilities."""
    found, ids = jax.lax.top_k(logits, top_k)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return {"proposals": ids, "probabilities": jnp.exp(found - normalizer)}
