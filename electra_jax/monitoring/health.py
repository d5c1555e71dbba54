"""Whether a run looks wrong, in words.

A loss that jumps is wrong at any time. What an objective says of its networks, see
`Objective.symptoms`, is asked from a third of the run on, in long runs some warm-ups after the
first: healthy networks, too, know nothing for a while at first.
"""

import collections
from collections.abc import Sequence

from electra_jax.objectives import Objective

PADDING = 0.2  # share of the tokens in a row
WINDOWS = 10  # that a spike is compared with

Values = dict[str, float]


class Health:
    """Says each thing once, and again if it has gone and come back.

    The objective says what may be wrong with its networks, and which of its metrics jump. From the
    step `begin` on the networks should have learned something.
    """

    def __init__(self, objective: Objective, begin: int):
        self.objective, self.begin = objective, begin
        self.jumps = [f"train/{name}" for name, x in objective.metrics.items() if x.jumps]
        self.windows: collections.deque[tuple[int, Values]] = collections.deque(maxlen=WINDOWS + 1)
        self.evaluations: list[tuple[int, Values]] = []
        self.said: set[str] = set()

    def warnings(self, step: int, values: Values) -> list[str]:
        """What is new about the metrics of a window, or of an evaluation, at `step`."""
        is_evaluation = any(name.startswith("eval/") for name in values)
        (self.evaluations if is_evaluation else self.windows).append((step, values))
        windows = [row for _, row in self.windows]
        symptoms = {name: spike(name, windows) for name in self.jumps}
        if step >= self.begin:
            logged = (*self.evaluations, *self.windows)
            symptoms |= self.objective.symptoms([row for at, row in logged if at >= self.begin])
        new = [text for name, text in symptoms.items() if text and name not in self.said]
        self.said = (self.said - symptoms.keys()) | {name for name in symptoms if symptoms[name]}
        return new


def begin_of(num_steps: int, warmup_steps: int, switch_step: int) -> int:
    """The step from which on networks that learn should have learned something.

    The discriminator's training begins with `switch_step`.
    """
    return switch_step + min((num_steps - switch_step) // 3, 5 * max(warmup_steps, 1000))


def spike(name: str, windows: Sequence[Values]) -> str:
    """A sentence if a loss is far above all the windows before it and their spread."""
    *before, value = [window[name] for window in windows if name in window] or [0.0]
    if len(before) < WINDOWS:
        return ""
    highest, lowest = max(before), min(before)
    if value <= max(highest + 3 * (highest - lowest), 1.2 * highest):
        return ""
    return (
        f"{name} has jumped to {value:.3g}; it was {lowest:.3g} to {highest:.3g} in the windows "
        "before. If it does not come back, a smaller config.optimizer.learning_rate or a longer "
        "config.optimizer.warmup_steps may help"
    )


def padding(share: float, length: int) -> str:
    """A sentence if much of the work is done on padding."""
    if share <= PADDING:
        return ""
    return (
        f"{share:.0%} of all tokens are padding, and cost as much as others; "
        f"config.data.layout = 'packed' or a config.data.sequence_length below {length} wastes less"
    )
