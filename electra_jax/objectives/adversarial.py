"""Adversarial ELECTRA: the generator learns to mislead the discriminator (spec 7.4).

The discriminator's loss cannot be differentiated through a sampled token, so the generator follows
a policy gradient (REINFORCE, Williams, 1992). A sample's reward is the discriminator's loss on it,
as if what it says of other tokens did not depend on it. A baseline, learned from the generator's
states, is taken off to lower the variance.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from electra_jax.modeling.layers import split_key
from electra_jax.modeling.params import Params
from electra_jax.objectives import base, masking
from electra_jax.objectives.base import Batch, Inputs, Sums, context, pair
from electra_jax.objectives.corruption import require_second_stage
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.masking import Masked, TokenCounts, Vocabulary
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.mlm import mlm_sums
from electra_jax.objectives.schedules import Scalar, Step, at
from electra_jax.settings import Config, not_allowed


@dataclasses.dataclass(frozen=True)
class AdversarialTokenDetection(ReplacedTokenDetection):
    """Replaced token detection against a generator that is rewarded for the discriminator's loss.

    In `warmup_steps` updates, the first, the generator learns by maximum likelihood, as in joint
    training. Discriminator and baseline learn in all updates.
    """

    warmup_steps: int = 0

    metrics: ClassVar[dict[str, Metric]] = {
        **ReplacedTokenDetection.metrics,
        "loss": Metric("loss", console="loss", figure=None),  # that of a policy is no measure
        "policy_loss": Metric("policy loss", "nats", figure=None),
        "reward": Metric("reward", "nats", console="reward", figure="Policy gradient"),
        "baseline_loss": Metric("baseline's loss", "nats", figure="Policy gradient"),
    }

    @classmethod
    def arguments(
        cls, config: Config, tokenizer: Vocabulary, token_counts: TokenCounts
    ) -> dict[str, Any]:
        """See `MaskedLanguageModel.arguments`."""
        if config.masking.mode != "clean":
            raise not_allowed(config, "masking.mode", "'clean'", "algorithm")
        require_second_stage(config)
        arguments = super().arguments(config, tokenizer, token_counts)
        arguments["model"] = dataclasses.replace(arguments["model"], baseline=True)
        return arguments | {"warmup_steps": config.generator.mle_steps}

    def loss_weights(self, step: Step) -> dict[str, Scalar]:
        """The generator learns by likelihood, and after the warm-up by its policy's rewards."""
        weights = super().loss_weights(step)
        likelihood = policy = weights.pop("mlm_loss")
        weights |= {"policy_loss": policy, "baseline_loss": policy}
        if not self.warmup_steps or step is None:
            return weights
        is_warm = step >= self.warmup_steps
        return weights | {
            "mlm_loss": jnp.where(is_warm, 0.0, likelihood),
            "policy_loss": jnp.where(is_warm, policy, 0.0),
        }

    def denominators(self, batch: Batch, masked: Masked) -> dict[str, Float[Array, ""]]:
        """Number of predictions of either network; of samples, for policy and baseline."""
        found = super().denominators(batch, masked)
        return found | dict.fromkeys(("policy_loss", "baseline_loss"), found["mlm_loss"])

    def sums(self, params: Params, inputs: Inputs) -> Sums:
        """Metrics of replaced token detection, `reward`, and the losses of policy and baseline."""
        batch, masked, step = inputs.batch, inputs.masked, inputs.step
        keys = split_key(inputs.dropout_key)
        model = self.bind(params)
        states = model.generator_states(
            masked.masked_ids, context(batch), masked.masked_positions, keys[0]
        )
        logits = model.propose(states)
        samples, corrupted_ids = self.corrupt(logits, batch, masked, inputs.sample_key, step)
        discriminator_logits = model.discriminate(corrupted_ids, context(batch), keys[1])

        is_replaced = (corrupted_ids != batch["input_ids"]).astype(jnp.float32)
        losses = base.binary_cross_entropy(discriminator_logits, is_replaced)
        rewards = jnp.take_along_axis(losses, masked.masked_positions, axis=1)
        policy = masking.proposal_logits(
            logits, masked.labels, at(self.temperature, step), self.disallow_correct
        )
        baseline = model.generator.baseline(jax.lax.stop_gradient(states))[..., 0]
        sampled_right = (samples == masked.labels).astype(jnp.float32)
        return (
            mlm_sums(logits, masked)
            | {"sampled_mlm_accuracy": pair(sampled_right, masked.weights)}
            | self.detection_sums(discriminator_logits, corrupted_ids, inputs)
            | policy_sums(policy, samples, rewards, baseline.astype(jnp.float32), masked.weights)
        )


def policy_sums(
    logits: Float[Array, "B P Vpad"],
    samples: Int[Array, "B P"],
    rewards: Float[Array, "B P"],
    baseline_logits: Float[Array, "B P"],
    weights: Float[Array, "B P"],
) -> Sums:
    """What is minimized so that the mean reward of samples grows.

        baseline       b = -log sigmoid(baseline_logit)
        policy_loss    -(reward - b) log p(sample), differentiated through log p alone
        baseline_loss  cross-entropy of sigmoid(baseline_logit) toward exp(-reward), which is the
                       probability of the discriminator's right answer

    Args:
      logits: of the distribution that was sampled from.
    """
    rewards = jax.lax.stop_gradient(rewards)
    baseline = jax.nn.softplus(-baseline_logits)
    advantage = rewards - jax.lax.stop_gradient(baseline)
    sample_logit = jnp.take_along_axis(logits, samples[..., None], axis=-1)[..., 0]
    log_probability = sample_logit - jax.nn.logsumexp(logits, axis=-1)
    target = jnp.exp(-rewards)
    baseline_loss = target * baseline + (1 - target) * jax.nn.softplus(baseline_logits)
    return {
        "policy_loss": pair(-advantage * log_probability, weights),
        "baseline_loss": pair(baseline_loss, weights),
        "reward": pair(rewards, weights),
    }
