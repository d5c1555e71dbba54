"""Numbers that change during training, as functions of the step counter alone."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A straight line from `start`, at step 0, to `end`, from step `steps` on."""

    start: float
    end: float
    steps: int


Schedule = float | Ramp
Step = Int[Array, ""] | None  # None: when all schedules and stages have come to their end


def at(schedule: Schedule, step: Step) -> float | Float[Array, ""]:
    """The number that counts at `step`. It is an array only where it changes."""
    if not isinstance(schedule, Ramp):
        return schedule
    if step is None:
        return schedule.end
    done = jnp.minimum(step, schedule.steps) / schedule.steps
    return schedule.start + (schedule.end - schedule.start) * done
