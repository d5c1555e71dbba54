"""Numbers that change during training, as functions of the step counter alone."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from electra_jax.errors import UserError
from electra_jax.settings import Config, field


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A straight line from `start`, at step 0, to `end`, from step `steps` on."""

    start: float
    end: float
    steps: int


Schedule = float | Ramp
Step = Int[Array, ""] | None  # None: when all schedules and stages have come to their end


def from_config(config: Config, name: str) -> Schedule:
    """The schedule of the setting `name`: a ramp where `NAME_start` is given.

    Raises:
      UserError: the ramp has no length, or none that fits the run.
    """
    end, start = field(config, name), field(config, f"{name}_start")
    if start is None:
        return end
    if not config.ramp_steps:
        raise UserError(
            f"config.{name}_start is {start}, which has no effect with config.ramp_steps = 0; say "
            "in how many updates it is left behind"
        )
    if config.ramp_steps > config.num_train_steps:
        raise UserError(
            f"config.ramp_steps is {config.ramp_steps}; allowed: at most config.num_train_steps = "
            f"{config.num_train_steps}, or else the values that it leads to are never reached"
        )
    return Ramp(start, end, config.ramp_steps)


def at(schedule: Schedule, step: Step) -> float | Float[Array, ""]:
    """The number that counts at `step`. It is an array only where it changes."""
    if not isinstance(schedule, Ramp):
        return schedule
    if step is None:
        return schedule.end
    done = jnp.minimum(step, schedule.steps) / schedule.steps
    return schedule.start + (schedule.end - schedule.start) * done
