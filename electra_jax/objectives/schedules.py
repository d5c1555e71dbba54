"""Numbers that change during training, as functions of the step counter alone."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from electra_jax.settings import Config, field, not_allowed


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A straight line from `start`, at step 0, to `end`, from step `steps` on."""

    start: float
    end: float
    steps: int


Schedule = float | Ramp
Scalar = float | Float[Array, ""]
Step = Int[Array, ""] | None  # None: when all schedules and stages have come to their end


def from_config(config: Config, name: str) -> Schedule:
    """The schedule of the setting `name`: a ramp where `NAME_start` is given."""
    end, start = field(config, name), field(config, f"{name}_start")
    if start is None:
        return end
    steps, most = config.ramp_steps, config.num_train_steps
    if not steps:
        raise not_allowed(config, f"{name}_start", "None", "ramp_steps")
    if steps > most:
        raise not_allowed(config, "ramp_steps", f"at most config.num_train_steps = {most}")
    return Ramp(start, end, steps)


def at(schedule: Schedule, step: Step) -> Scalar:
    """The number that counts at `step`. It is an array only where it changes."""
    if not isinstance(schedule, Ramp):
        return schedule
    if step is None:
        return schedule.end
    done = jnp.minimum(step, schedule.steps) / schedule.steps
    return schedule.start + (schedule.end - schedule.start) * done
