"""The paper's counting against the totals that its program prints (spec 7.11), to their digits."""

import dataclasses

import paper_flops
import pytest
import tiny
from test_config import recipe

from electra_jax.checks import objective_for
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.settings import field

VOCAB = 30522


def changed_recipe(name: str, changes: dict):
    config = recipe(name)
    for path, value in changes.items():
        section, _, leaf = path.rpartition(".")
        setattr(field(config, section) if section else config, leaf, value)
    return config


def sized(*sizes: int) -> EncoderConfig:
    names = ("vocab_size", "embedding_size", "hidden_size", "num_layers", "num_heads")
    return tiny.encoder(**dict(zip((*names, "intermediate_size"), sizes, strict=True)))


@pytest.mark.parametrize(
    ("name", "changes", "total"),
    [
        ("bert_small", {}, "1.419e+18"),
        ("bert_base", {}, "6.428e+19"),
        ("bert_large", {"batch_size": 256, "num_train_steps": 1_000_000}, "1.917e+20"),
        ("small", {}, "1.294e+18"),
        ("small", {"generator.width": 0.5}, "1.424e+18"),
        ("small", {"generator.width": 1.0}, "1.920e+18"),
        ("base", {}, "6.425e+19"),
        ("base", {"num_train_steps": 4_000_000}, "3.355e+20"),
        ("large", {}, "7.118e+20"),
        ("large_plus", {}, "3.114e+21"),
        ("small_plus", {"generator.width": 0.25}, "2.40e+19"),
        ("small_plus", {}, "3.60e+19"),
    ],
)
def test_totals_of_recipes(name, changes, total):
    flops = paper_flops.train_flops(changed_recipe(name, changes), VOCAB)
    digits = len(total) - len("1.e+18")
    assert f"{flops:.{digits}e}" == total


@pytest.mark.parametrize(
    ("sizes", "batch_size", "steps", "output_share", "total"),
    [
        ((40_000, 768, 768, 12, 12, 3072), 128, 960_800, 1.0, "3.969e+19"),  # GPT
        ((50_265, 1024, 1024, 24, 16, 4096), 8000, 500_000, None, "3.187e+21"),  # RoBERTa
        ((30_000, 128, 4096, 12, 64, 16_384), 4096, 1_500_000, None, "3.114e+22"),  # ALBERT-xxl
    ],
)
def test_totals_of_others(sizes, batch_size, steps, output_share, total):
    config = sized(*sizes)
    share = paper_flops.OUTPUT_SHARE if output_share is None else output_share
    per_token = paper_flops.encoder(config, 512) + share * paper_flops.masked_lm_head(config)
    assert f"{2 * batch_size * steps * 512 * per_token:.3e}" == total


def test_total_of_t5():
    """T5-11B has heads wider than its layers, and a decoder that attends twice."""
    config = sized(32_000, 1024, 1024, 24, 128, 65_536)
    attention = paper_flops.attention(config, 512, 128 * 128)
    around = paper_flops.feed_forward(config) * 24 + paper_flops.embeddings(config, 512)
    encoder, decoder = 24 * attention + around, 24 * 2 * attention + around
    per_token = encoder + decoder + paper_flops.masked_lm_head(config)
    assert f"{2 * 2048 * 1_000_000 * 512 * per_token:.3e}" == "4.582e+22"


@pytest.mark.parametrize(
    ("name", "flops"), [("small", "3.68e+09"), ("base", "2.86e+10"), ("large", "8.75e+10")]
)
def test_inference(name, flops):
    assert (
        f"{paper_flops.inference_flops(objective_for(recipe(name), VOCAB).model, 128):.2e}" == flops
    )


def test_counts_follow_what_is_run():
    """Of the small model: which parts each objective and algorithm has."""

    def flops(**changes):
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        return paper_flops.train_flops(changed_recipe("small", changes), VOCAB) / (
            2 * 128 * 128 * 1_000_000
        )

    config = recipe("small")
    model = objective_for(config, VOCAB).model
    generator, main = paper_flops.step_flops_per_token(model, 128)
    detection = paper_flops.replaced_token_head(model.main)
    word = paper_flops.masked_lm_head(model.main)
    assert flops() == flops(objective="electra_15") == pytest.approx(generator + main)
    assert flops(generator__kind="unigram") == pytest.approx(main)
    assert flops(generator__kind="frozen", generator__sharing="gdes") == pytest.approx(
        generator / 2 + main
    )
    assert flops(objective="all_tokens_mlm") == pytest.approx(generator + main - detection + word)
    assert flops(objective="replace_mlm") == pytest.approx(
        generator + main - detection + 0.15625 * word
    )
    stages = {"algorithm": "two_stage", "generator__sharing": "gdes", "generator__width": 1.0}
    whole = flops(**stages, generator__mle_steps=400_000)
    full = dataclasses.replace(model, generator=model.discriminator)
    generator, main = paper_flops.step_flops_per_token(full, 128)
    assert whole == pytest.approx(0.4 * generator + 0.6 * (generator / 2 + main))
