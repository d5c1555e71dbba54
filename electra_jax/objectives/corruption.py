"""What ELECTRA and its relatives share: a generator corrupts text, a discriminator reads it.

    input_ids --mask--> masked_ids --generator--> logits --Gumbel sample--> corrupted_ids
    corrupted_ids --discriminator--> what the objective asks of it

Both losses are minimized together, or one after the other. Samples are integers, so no gradient of
the discriminator's loss reaches the generator, save through what both share.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from electra_jax.errors import UserError
from electra_jax.modeling.electra import Electra, ElectraConfig
from electra_jax.modeling.heads import PADDED_LOGIT, VOCAB_BLOCK
from electra_jax.modeling.layers import PRNGKey, split_key
from electra_jax.modeling.params import Params
from electra_jax.objectives import masking, networks, schedules
from electra_jax.objectives.base import Batch, Inputs, Sums, context, pair
from electra_jax.objectives.masking import Masked, MaskingConfig, TokenCounts, Vocabulary
from electra_jax.objectives.metrics import Metric
from electra_jax.objectives.mlm import MaskedLanguageModel, mlm_sums, require_weight
from electra_jax.objectives.schedules import Scalar, Schedule, Step, at
from electra_jax.settings import Config, field, not_allowed

REPLACED = {
    "replaced_fraction": Metric(
        "replaced tokens", console="replaced", figure="Detection of replaced tokens"
    )
}


@dataclasses.dataclass(frozen=True)
class CorruptedText(MaskedLanguageModel):
    """The generator's half. Subclasses say what the discriminator is to do.

    With `frequencies`, which sum to anything, tokens are proposed by them at every position, and no
    network does so. With `generator_steps` the generator trains alone for so many updates, and is
    frozen after them, when all else trains; None: both train in all updates.
    """

    discriminator_weight: Schedule = 50.0  # multiplies the discriminator's mean loss
    temperature: Schedule = 1.0  # divides the generator's logits before sampling, not in its loss
    disallow_correct: bool = False  # never sample the original token
    frequencies: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    generator_steps: int | None = None

    discriminator_term: ClassVar[str]  # name of the discriminator's loss
    head: ClassVar[type]  # of the discriminator: a module, see `modeling.heads`
    metrics: ClassVar[dict[str, Metric]] = MaskedLanguageModel.metrics | {
        "sampled_mlm_accuracy": Metric("MLM accuracy, sampled", figure="Accuracy"),
    }

    @property
    def measured(self) -> Mapping[str, Metric]:
        """Those of `metrics` that this one measures: frequencies have no loss."""
        of_network = ("mlm_loss", "mlm_accuracy") if self.frequencies else ()
        return {name: x for name, x in self.metrics.items() if name not in of_network}

    @property
    def trains_generator(self) -> bool:
        """Whether a network learns to predict masked tokens."""
        return not self.frequencies and self.generator_steps != 0

    @classmethod
    def arguments(
        cls, config: Config, tokenizer: Vocabulary, token_counts: TokenCounts
    ) -> dict[str, Any]:
        """See `MaskedLanguageModel.arguments`."""
        kind, sharing, generator = config.generator.kind, "embeddings", None
        discriminator = networks.encoder(config.model, tokenizer.vocab_size)
        if is_network := kind in ("learned", "frozen"):
            generator = networks.generator(config, discriminator)
            sharing = config.generator.sharing
            if config.generator.init_from and sharing == "all":
                raise not_allowed(config, "generator.init_from", "''", "generator.sharing")
        arguments = {
            "model": ElectraConfig(discriminator, generator, sharing, cls.head),
            "masking": MaskingConfig.from_config(config, tokenizer, is_network),
            "discriminator_weight": schedules.from_config(config, "loss.discriminator_weight"),
            "disallow_correct": config.generator.disallow_correct,
        }
        weights = ["loss.discriminator_weight"]
        is_two_stage = kind == "learned" and config.algorithm == "two_stage"
        if kind == "learned" and not (is_two_stage and not config.generator.mle_steps):
            arguments["mlm_weight"] = schedules.from_config(config, "loss.generator_weight")
            weights.insert(0, "loss.generator_weight")
        require_weight(config, *weights)
        if kind == "uniform":
            arguments["frequencies"] = (1.0,) * tokenizer.vocab_size
        else:
            arguments["temperature"] = schedules.from_config(config, "generator.temperature")
        if kind == "unigram":
            arguments["frequencies"] = tuple(map(float, token_counts))
        elif kind == "frozen":
            require_two_tables(config, "generator.kind")
            arguments["generator_steps"] = 0
        elif is_two_stage:
            require_two_stages(config, arguments["model"])
            arguments["generator_steps"] = config.generator.mle_steps
        return arguments

    @abc.abstractmethod
    def loss_mask(self, batch: Batch, masked: Masked) -> Bool[Array, "B L"]:
        """The positions that the discriminator's loss is the mean over."""

    @abc.abstractmethod
    def discriminator_sums(
        self, model: Electra, corrupted_ids: Int[Array, "B L"], inputs: Inputs, key: PRNGKey | None
    ) -> Sums:
        """The discriminator's loss and metrics; `key` seeds its dropout."""

    # Stages

    @property
    def switch_step(self) -> int:
        """The step that the generator is frozen at, or 0."""
        return self.generator_steps or 0

    def loss_weights(self, step: Step) -> dict[str, Scalar]:
        """Those of both networks, as far as they learn at `step`."""
        weights = {self.discriminator_term: at(self.discriminator_weight, step)}
        if not self.trains_generator:
            return weights
        weights = super().loss_weights(step) | weights
        if not self.generator_steps:
            return weights
        if step is None:
            return weights | {"mlm_loss": 0.0}
        is_first = step < self.generator_steps
        return {
            term: jnp.where(is_first == (term == "mlm_loss"), weight, 0.0)
            for term, weight in weights.items()
        }

    def is_trained(self, name: str, step: Step) -> bool | Bool[Array, ""]:
        """Whether the parameter `name` moves at `step`."""
        if self.generator_steps is None:
            return True
        of_generator = name.startswith("generator/") or (
            self.model.sharing == "gdes" and name.startswith("embeddings/")
        )
        if not self.generator_steps:
            return not of_generator
        return (step < self.generator_steps) == of_generator

    def second_stage(self, params: Params) -> Params:
        """The discriminator begins with the generator's encoder and embeddings (spec 7.4)."""
        generator = params["generator"]
        discriminator = params["discriminator"] | {"encoder": generator["encoder"]}
        if self.model.sharing == "none":
            params = params | {"embeddings": generator["embeddings"]}
        else:  # its tables are the generator's as long as the residual ones are zero
            norm = params["embeddings"]["norm"]
            discriminator["embeddings"] = discriminator["embeddings"] | {"norm": norm}
        return params | {"discriminator": discriminator}

    @property
    def generator_passes(self) -> int:
        """A frozen generator has no backward pass; of two stages, the second is counted."""
        return 3 if self.generator_steps is None else 1

    # Sums

    def denominators(self, batch: Batch, masked: Masked) -> dict[str, Float[Array, ""]]:
        """Number of predictions of the generator and of the discriminator."""
        return super().denominators(batch, masked) | {
            self.discriminator_term: self.loss_mask(batch, masked).sum(dtype=jnp.float32)
        }

    def sums(self, params: Params, inputs: Inputs) -> Sums:
        """Metrics of both networks; without a step, those of the last stage."""
        batch, masked, step = inputs.batch, inputs.masked, inputs.step
        keys = split_key(inputs.dropout_key)

        def generator_alone(params: Params) -> Sums:
            sums = mlm_sums(
                self.generator_logits(self.bind(params), batch, masked, keys[0]), masked
            )
            # Not a constant: both branches must vary over the same devices.
            nothing = 0 * masked.weights.sum()
            others = jax.eval_shape(both, params).items()
            return {
                name: sums[name] if name in sums else jnp.zeros(x.shape, x.dtype) + nothing
                for name, x in others
            }

        def both(params: Params) -> Sums:
            model = self.bind(params)
            logits = self.generator_logits(model, batch, masked, keys[0])
            if self.generator_steps is not None:
                logits = jax.lax.stop_gradient(logits)
            samples, corrupted_ids = self.corrupt(logits, batch, masked, inputs.sample_key, step)
            sums = {} if self.frequencies else mlm_sums(logits, masked)
            sampled_right = (samples == masked.labels).astype(jnp.float32)
            sums["sampled_mlm_accuracy"] = pair(sampled_right, masked.weights)
            return sums | self.discriminator_sums(model, corrupted_ids, inputs, keys[1])

        if not self.generator_steps or step is None:
            return both(params)
        return jax.lax.cond(step < self.generator_steps, generator_alone, both, params)

    def generator_logits(
        self, model: Electra, batch: Batch, masked: Masked, key: PRNGKey | None
    ) -> Float[Array, "B P Vpad"]:
        """What the generator says, be it a network or a table of frequencies."""
        if self.frequencies:
            logits = frequency_logits(self.frequencies)
            return jnp.broadcast_to(logits, (*masked.masked_positions.shape, len(logits)))
        return model.generate(masked.masked_ids, context(batch), masked.masked_positions, key)

    def corrupt(
        self,
        logits: Float[Array, "B P Vpad"],
        batch: Batch,
        masked: Masked,
        key: PRNGKey,
        step: Step,
    ) -> tuple[Int[Array, "B P"], Int[Array, "B L"]]:
        """Samples, and the text with the samples in it."""
        samples = masking.sample_replacements(
            logits,
            masked.labels,
            masking.row_keys(key, batch["row"]),
            at(self.temperature, step),
            self.disallow_correct,
        )
        return samples, masking.corrupt(self.masking.mode, batch["input_ids"], masked, samples)


def require_two_tables(config: Config, cause: str) -> None:
    """Raises UserError where the discriminator would train tables of a frozen generator."""
    if config.generator.sharing not in ("none", "gdes"):
        raise not_allowed(config, "generator.sharing", "'none' or 'gdes'", cause)


def require_second_stage(config: Config) -> None:
    """Raises UserError where the run ends before its second stage."""
    end = config.num_train_steps
    if config.generator.mle_steps >= end:
        raise not_allowed(
            config, "generator.mle_steps", f"less than config.num_train_steps = {end}"
        )


def require_two_stages(config: Config, model: ElectraConfig) -> None:
    """Raises UserError where the generator cannot be trained first and then copied (spec 7.4)."""
    require_two_tables(config, "algorithm")
    require_second_stage(config)
    first = config.generator.mle_steps
    if not first:
        return
    for name in ("generator.temperature_start", "loss.discriminator_weight_start"):
        if field(config, name) is not None and config.ramp_steps <= first:
            causes = "ramp_steps", "generator.mle_steps"
            raise not_allowed(config, name, "None, as its ramp ends in the first stage,", *causes)
    own = model.generator
    if model.sharing == "gdes":  # tables of one width are shared
        own = dataclasses.replace(own, embedding_size=model.discriminator.embedding_size)
    if own != model.discriminator:
        raise UserError(
            "config.algorithm = 'two_stage' copies the generator into the discriminator: it needs "
            "config.generator.width = 1 and config.generator.depth = 1, the default of "
            "config.model.num_heads and config.model.intermediate_size and, where "
            "config.generator.sharing = 'none', config.model.embedding_size = "
            "config.model.hidden_size"
        )


def frequency_logits(frequencies: tuple[float, ...]) -> Float[np.ndarray, " Vpad"]:
    """Logarithms of shares; `PADDED_LOGIT` for tokens that are never proposed and for padding."""
    total = math.fsum(frequencies)
    logits = [math.log(x / total) if x else PADDED_LOGIT for x in frequencies]
    padding = -len(logits) % VOCAB_BLOCK
    return np.array(logits + [PADDED_LOGIT] * padding, np.float32)
