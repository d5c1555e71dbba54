"""What of a configuration of pre-training goes together, and the objective that it describes."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from ml_collections import ConfigDict

from electra_jax.config import settings
from electra_jax.errors import UserError
from electra_jax.objectives import Objective, make_objective
from electra_jax.objectives.metrics import sign_of
from electra_jax.settings import Config, RecordedConfig, check_values, field, not_allowed
from electra_jax.sharding.mesh import check_topology


def validate(config: ConfigDict, num_devices: int) -> None:
    """Check every value alone, and those that do not go together.

    Raises:
      UserError: names the fields, what was found and what is allowed.
    """
    check_values(config, settings())
    check_topology(config.parallel, config.batch_size, config.num_microbatches, num_devices)
    refuse_without_effect(config)
    check_best(config.checkpoint, config.eval_every_steps)
    if config.checkpoint.keep_best:
        sign_of(objective_for(config).measured, config.checkpoint.keep_best)
    most = config.model.max_positions
    if config.data.sequence_length > most:
        allowed = f"at most config.model.max_positions = {most}"
        raise not_allowed(config, "data.sequence_length", allowed)
    if config.data.strip_accents and not config.data.lower_case:
        raise not_allowed(config, "data.strip_accents", "False", "data.lower_case")
    if config.init_from and config.generator.sharing == "gdes":
        raise not_allowed(config, "init_from", "''", "generator.sharing")


def check_best(checkpoint: ConfigDict, eval_every_steps: int) -> None:
    """Raises UserError where the best checkpoint could be one that is never saved."""
    if checkpoint.keep_best and checkpoint.every_steps % eval_every_steps:
        raise UserError(
            f"config.checkpoint.every_steps is {checkpoint.every_steps}; with "
            "config.checkpoint.keep_best it must be a multiple of config.eval_every_steps = "
            f"{eval_every_steps}"
        )


def objective_for(config: Config, vocab_size: int | None = None) -> Objective:
    """The objective of `config` for any vocabulary, by default as large as one trained here."""
    size = vocab_size or config.data.vocab_size
    tokens = SimpleNamespace(
        vocab_size=size, cls_id=2, sep_id=3, mask_id=4, starts_word=np.ones(size, bool)
    )
    return make_objective(config, tokens, np.ones(size, int))


# Settings that decide what is trained; all others always have an effect.
DECIDING = ("model.", "generator.", "masking.", "loss.", "algorithm", "ramp_steps", "init_")


def refuse_without_effect(config: ConfigDict) -> None:
    """Raises UserError where no objective reads a setting that is not at its default."""
    read = settings_read(config, set())
    for name, one in settings().items():
        value = field(config, name)
        if name.startswith(DECIDING) and name not in read and value != one.default:
            cause = next(causes(config, name), None)
            because = f" with config.{cause} = {field(config, cause)!r}" if cause else ""
            raise UserError(
                f"config.{name} is {value!r}, which has no effect{because}; leave it at "
                f"{one.default!r}"
            )


def settings_read(config: ConfigDict, read: set[str]) -> set[str]:
    """Adds the settings that the objective of `config` depends on to `read`, which is returned."""
    read |= {"init_from"} | ({"init_missing", "init_resize"} if config.init_from else set())
    objective_for(RecordedConfig(config, read))
    return read


def causes(config: ConfigDict, name: str) -> Iterator[str]:
    """The settings of which another value alone would have `name` read, the most telling first."""
    deciding = {x: one for x, one in settings().items() if x.startswith(("objective", *DECIDING))}
    for other in sorted(deciding, key=lambda x: (bool(deciding[x].check.choices), "." not in x)):
        current, one = field(config, other), deciding[other]
        switched_on = () if current else (one.type(1),)  # what is off, such as 0, None or ""
        for value in one.check.choices or switched_on:
            changed, read = config.copy_and_resolve_references(), set()
            changed.update_from_flattened_dict({other: value})
            with contextlib.suppress(UserError):  # other mistakes; what was read before is known
                settings_read(changed, read)
            if name in read and other != name:
                yield other
