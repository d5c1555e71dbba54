"""Whether a pre-training run looks wrong, in words.

What counts as wrong is far from what healthy runs do, the smallest among them: their discriminator,
too, calls no token replaced for a while at first. So what is asked of a network is asked from
a third of the run on, in long runs some warm-ups after the first.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator

NO_RECALL = 1e-3  # share of the replaced tokens that are found
RECALLS = 3  # windows in a row
NO_AUC = 0.05  # distance from 0.5
OUTRUN = 0.05  # how far the AUC is below its best
LEARNS_NOTHING = 0.95  # of the loss of guessing
PADDING = 0.2  # share of the tokens in a row
WINDOWS = 10  # that a spike is compared with


@dataclasses.dataclass(eq=False)
class Watch:
    """Says each thing once, and again if it has gone and come back.

    Args:
      vocab_size: guessing has its logarithm as a loss.
      begin: step from which on the networks should have learnt something.
      trains_generator: whether that is one of them.
    """

    vocab_size: int
    begin: int
    trains_generator: bool = True

    def __post_init__(self):
        self.windows: dict[str, collections.deque] = {
            name: collections.deque(maxlen=WINDOWS)
            for name in ("train/mlm_loss", "train/rtd_loss", "train/reconstruction_loss")
        }
        self.recalls: collections.deque = collections.deque(maxlen=RECALLS)
        self.best: tuple[float, float] = (0.0, 0.0)  # AUC and accuracy of the generator then
        self.said: set[str] = set()

    def __call__(self, step: int, values: dict[str, float]) -> list[str]:
        """What is new about the metrics of a window, or of an evaluation, at `step`."""
        found = dict(self.symptoms(step, values))
        new = [sentence for kind, sentence in found.items() if sentence and kind not in self.said]
        self.said = (self.said - found.keys()) | {kind for kind in found if found[kind]}
        return new

    def symptoms(self, step: int, values: dict[str, float]) -> Iterator[tuple[str, str]]:
        """What was looked at, and what is wrong with it, or ""."""
        for name, before in self.windows.items():
            if name in values:
                yield name, spike(name, step, values[name], list(before))
                before.append(values[name])
        if step < self.begin:
            return
        if "train/rtd_recall" in values:
            self.recalls.append(values["train/rtd_recall"])
            yield "recall", no_recall(step, list(self.recalls))
        if "eval/rtd_auc" in values:
            now = values["eval/rtd_auc"], values.get("eval/mlm_accuracy", 0.0)
            yield "chance", no_better_than_chance(step, now[0])
            yield "outrun", outrun(step, now, self.best)
            self.best = max(self.best, now)
        if "eval/mlm_loss" in values and self.trains_generator:
            yield "guessing", guessing(step, values["eval/mlm_loss"], self.vocab_size)


def no_recall(step: int, recalls: list[float]) -> str:
    """A sentence if some windows in a row have had no recall."""
    if len(recalls) < RECALLS or max(recalls) >= NO_RECALL:
        return ""
    return (
        f"the discriminator still finds no replaced token at step {step:,} (recall "
        f"{max(recalls):.2%}): it calls every token original. A larger "
        "config.loss.discriminator_weight or config.optimizer.learning_rate, or a smaller "
        "config.generator.width, may help"
    )


def no_better_than_chance(step: int, area: float) -> str:
    """A sentence if the AUC is about a half."""
    if abs(area - 0.5) >= NO_AUC:
        return ""
    return (
        f"the discriminator tells replaced tokens from others no better than by chance at step "
        f"{step:,} (AUC {area:.3f}); is config.loss.discriminator_weight too small?"
    )


def outrun(step: int, now: tuple[float, float], best: tuple[float, float]) -> str:
    """A sentence if the generator gets better and the discriminator worse.

    Args:
      now, best: AUC of the discriminator and accuracy of the generator, now and when the former
        was highest.
    """
    if now[0] >= best[0] - OUTRUN or now[1] <= best[1]:
        return ""
    return (
        f"the generator outruns the discriminator: the AUC has fallen from {best[0]:.3f} to "
        f"{now[0]:.3f} at step {step:,}, while the generator's accuracy has risen from "
        f"{best[1]:.1%} to {now[1]:.1%}; a smaller config.generator.width may help"
    )


def guessing(step: int, loss: float, vocab_size: int) -> str:
    """A sentence if a generator is no better than one that knows nothing."""
    of_guessing = math.log(vocab_size)
    if loss <= LEARNS_NOTHING * of_guessing:
        return ""
    return (
        f"the generator predicts tokens no better than by guessing at step {step:,} (loss "
        f"{loss:.2f}; guessing has {of_guessing:.2f}): it learns nothing. Are "
        "config.loss.generator_weight and config.optimizer.learning_rate as they should be?"
    )


def begin_of(num_steps: int, warmup_steps: int, switch_step: int) -> int:
    """The step from which on networks that learn should have learnt something.

    Args:
      switch_step: with which the discriminator's training begins.
    """
    return switch_step + min((num_steps - switch_step) // 3, 5 * max(warmup_steps, 1000))


def spike(name: str, step: int, value: float, before: list[float]) -> str:
    """A sentence if a loss is far above all the windows before it and their spread."""
    if len(before) < WINDOWS:
        return ""
    highest, lowest = max(before), min(before)
    if value <= max(highest + 3 * (highest - lowest), 1.2 * highest):
        return ""
    return (
        f"{name} has jumped to {value:.3g} at step {step:,}; it was {lowest:.3g} to {highest:.3g} "
        "in the windows before. If it does not come back, a smaller config.optimizer.learning_rate "
        "or a longer config.optimizer.warmup_steps may help"
    )


def padding(share: float, length: int) -> str:
    """A sentence if much of the work is done on padding."""
    if share <= PADDING:
        return ""
    return (
        f"{share:.0%} of all tokens are padding, and cost as much as others; "
        f"config.data.layout = 'packed' or a config.data.sequence_length below {length} wastes less"
    )
