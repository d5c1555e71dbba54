"""What looks wrong is said, and healthy runs are left in peace."""

import math

import pytest
import tiny

from electra_jax.monitoring import health
from electra_jax.monitoring.health import Health, begin_of, padding

# Every hundredth step of configs/tiny.py on one CPU: losses, recall; at its evaluations: AUC,
# the generator's loss and accuracy. A third of the run is step 800.
MLM = [8.13, 6.22, 5.72, 5.51, 5.40, 5.30, 5.16, 5.11, 5.07, 4.98, 4.92, 4.91]
MLM += [4.84, 4.83, 4.76, 4.70, 4.69, 4.65, 4.63, 4.60, 4.61, 4.57, 4.57, 4.56]
RTD = [0.396, 0.351, 0.351, 0.346, 0.341, 0.336, 0.327, 0.322, 0.318, 0.311, 0.304, 0.301]
RTD += [0.298, 0.296, 0.293, 0.290, 0.286, 0.283, 0.280, 0.277, 0.277, 0.275, 0.274, 0.270]
RECALL = [0.0998, 0.0042, 0.002, 0.0005, 0.0002, 0.0014, 0.0097, 0.0198, 0.0205, 0.0298, 0.0369]
RECALL += [0.043, 0.0548, 0.0549, 0.0621, 0.0696, 0.0798, 0.0892, 0.0968, 0.1071, 0.1029, 0.1093]
RECALL += [0.1084, 0.1262]
EVALUATIONS = {
    400: (0.5914, 5.4288, 0.2022),
    800: (0.6804, 5.0639, 0.2489),
    1200: (0.7275, 4.848, 0.2726),
    1600: (0.7537, 4.6694, 0.2894),
    2000: (0.7812, 4.5699, 0.3004),
    2400: (0.7888, 4.5244, 0.305),
}


def said(**changes) -> list[str]:
    """What is said of the run above, with some of its numbers in place of others."""
    watch = Health(tiny.objective(vocab_size=8192), begin=begin_of(2400, 300, 0)).warnings
    curves = {"mlm_loss": MLM, "rtd_loss": RTD, "rtd_recall": RECALL} | changes
    evaluations = curves.pop("evaluations", EVALUATIONS)
    sentences = []
    for place in range(24):
        step = 100 * (place + 1)
        sentences += watch(step, {f"train/{name}": x[place] for name, x in curves.items()})
        if step in evaluations:
            names = ("eval/rtd_auc", "eval/mlm_loss", "eval/mlm_accuracy")
            sentences += watch(step, dict(zip(names, evaluations[step], strict=True)))
    return sentences


def test_nothing_is_said_of_a_healthy_run():
    assert said() == []


def test_a_discriminator_that_finds_nothing():
    (sentence,) = said(rtd_recall=[0.0] * 24)
    assert "finds no replaced token (recall 0.00%)" in sentence
    assert "config.loss.discriminator_weight" in sentence


def test_what_has_gone_and_comes_back_is_said_again():
    assert len(said(rtd_recall=[0.0] * 14 + [0.1] + [0.0] * 9)) == 2


@pytest.mark.parametrize("area", [0.5, 0.46, 0.54])
def test_a_discriminator_that_is_no_better_than_chance(area):
    found = {step: (area, *rest) for step, (_, *rest) in EVALUATIONS.items()}
    (sentence,) = said(evaluations=found)
    assert f"by chance (AUC {area:.3f})" in sentence


def test_a_generator_that_outruns_its_discriminator():
    found = EVALUATIONS | {2000: (0.69, 4.57, 0.3), 2400: (0.65, 4.52, 0.31)}
    (sentence,) = said(evaluations=found)
    assert "from 0.754 to 0.690" in sentence
    assert "from 28.9% to 30.0%" in sentence
    found = EVALUATIONS | {2000: (0.69, 4.57, 0.28), 2400: (0.65, 4.52, 0.27)}
    assert said(evaluations=found) == []  # both get worse: another matter


def test_a_generator_that_learns_nothing():
    guessing = math.log(8192)
    found = {step: (area, guessing, 0.0) for step, (area, *_) in EVALUATIONS.items()}
    (sentence,) = said(evaluations=found)
    assert "guessing (loss 9.01; guessing has 9.01)" in sentence
    for steps, is_said in ((None, True), (500, True), (0, False)):  # 0: frozen at random
        objective = tiny.objective(vocab_size=8192, loss={"generator_steps": steps})
        found = Health(objective, begin=800).warnings(800, {"eval/mlm_loss": guessing})
        assert bool(found) == is_said


@pytest.mark.parametrize("name, losses", [("mlm_loss", MLM), ("rtd_loss", RTD)])
def test_a_loss_that_jumps(name, losses):
    spiked = losses.copy()
    spiked[14] = losses[0] * 1.3
    (sentence,) = said(**{name: spiked})
    assert f"train/{name} has jumped to {spiked[14]:.3g}" in sentence
    noisy = [x * (1.05 if i % 2 else 0.95) for i, x in enumerate(losses)]
    assert said(**{name: noisy}) == []


def test_networks_are_given_time():
    assert begin_of(2400, 300, 0) == 800
    assert begin_of(1_000_000, 10_000, 0) == 50_000
    assert begin_of(1_000_000, 0, 0) == 5000
    assert begin_of(900, 10, 300) == 500  # the discriminator begins at 300


def test_padding():
    assert padding(health.PADDING, 128) == ""
    assert padding(0.55, 128).startswith("55% of all tokens are padding")
