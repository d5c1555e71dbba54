"""How many parameters there are, as published and by hand, and what they start from."""

import math

import jax
import numpy as np
import pytest
import tiny

from electra_jax.checks import objective_for
from electra_jax.config import get_config
from electra_jax.modeling.electra import structure


def count(tree: dict) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def sized(hidden, layers, embedding, width, sharing="embeddings", objective="electra") -> dict:
    config = get_config()
    config.objective = objective
    config.model.update(hidden_size=hidden, num_layers=layers, embedding_size=embedding)
    config.generator.update(width=width, sharing=sharing)
    return structure(objective_for(config, 30522).model)[1]


@pytest.mark.parametrize(
    ("size", "total", "electra", "shared", "discriminator_head", "generator", "lm_head"),
    [  # spec 1.8, read off the original's checkpoints
        ((256, 12, 128, 0.25), 14_196_219, 13_483_008, 3_972_864, 66_049, 608_064, 39_098),
        ((256, 12, 128, 1.0), 23_122_875, 13_483_008, 3_972_864, 66_049, 9_510_144, 63_674),
        ((768, 12, 768, 1 / 3), 119_386_427, 108_891_648, 23_837_184, 591_361, 9_673_984, 229_434),
        (
            (1024, 24, 1024, 0.25),
            354_655_291,
            334_092_288,
            31_782_912,
            1_050_625,
            19_216_640,
            295_738,
        ),
    ],
    ids=["small", "small, generator 1.0", "base", "large"],
)
def test_parameter_counts_equal_the_original(
    size, total, electra, shared, discriminator_head, generator, lm_head
):
    params = sized(*size)
    assert count(params["embeddings"]) == shared
    assert count(params["embeddings"]) + count(params["discriminator"]["encoder"]) == electra
    assert count(params["discriminator"]["head"]) == discriminator_head
    assert count(params["generator"]["encoder"]) == generator
    assert count(params["generator"]["head"]) == lm_head
    assert count(params) == total


# Of the small model by hand: V = 30522, E = 128, H = 256, and 64 for the small generator.
EMBEDDINGS = (30522 + 512 + 2 + 2) * 128
PROJECTION = 128 * 256 + 256
ENCODER = PROJECTION + 12 * (4 * (256 * 256 + 256) + 2 * 256 * 1024 + 1024 + 256 + 2 * 2 * 256)
RTD_HEAD = 256 * 256 + 256 + 256 + 1
SMALL_ENCODER = 12 * (4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 2 * 2 * 64)


def test_untied_embeddings_count():
    params = sized(256, 12, 128, 0.25, sharing="none")
    own_embeddings = (30522 + 512 + 2 + 2) * 64  # as wide as the generator: no projection
    lm_head = 64 * 64 + 64 + 2 * 64 + 30522
    assert "projection" not in params["generator"]["encoder"]
    assert count(params["generator"]) == own_embeddings + SMALL_ENCODER + lm_head
    assert count(params) == EMBEDDINGS + ENCODER + RTD_HEAD + count(params["generator"])


def test_fully_tied_count():
    params = sized(256, 12, 128, 1.0, sharing="all")
    lm_head = 256 * 128 + 128 + 2 * 128 + 30522
    assert count(params["generator"]) == lm_head
    assert count(params) == EMBEDDINGS + ENCODER + RTD_HEAD + lm_head


def test_masked_language_model_count():
    params = sized(256, 12, 128, 1.0, objective="mlm")
    lm_head = 256 * 128 + 128 + 2 * 128 + 30522
    assert params.keys() == {"embeddings", "generator"}
    assert count(params) == EMBEDDINGS + ENCODER + lm_head


def test_initialization_is_the_original_one():
    """Spec 1.5: truncated normal but for two Glorot layers, biases 0, scales 1."""
    objective = tiny.objective(
        vocab_size=1000, embedding_size=32, hidden_size=64, intermediate_size=256
    )
    params = jax.jit(objective.init)(jax.random.key(0))
    glorot = {  # limit sqrt(6 / (fan_in + fan_out))
        "discriminator/encoder/projection/kernel": math.sqrt(6 / (32 + 64)),
        "discriminator/head/output/kernel": math.sqrt(6 / (64 + 1)),
    }
    normal = 0
    for name, x in tiny.flat(params).items():
        if name.endswith("scale"):
            assert (x == 1).all(), name
        elif name.endswith("bias"):
            assert (x == 0).all(), name
        elif name in glorot:
            assert 0.9 * glorot[name] < np.abs(x).max() <= glorot[name], name
            assert abs(x.std() - glorot[name] / math.sqrt(3)) < 0.15 * glorot[name], name
        else:
            normal += 1
            assert np.abs(x).max() <= 0.04, name
            if x.size >= 1000:
                assert abs(x.std() - 0.0176) < 4 * 0.0176 / math.sqrt(x.size), name
    assert set(glorot) <= tiny.flat(params).keys()
    assert normal == 3 + 2 * 4 + 2  # tables; four stacked kernels of two encoders; two heads
    kernels = params["discriminator"]["encoder"]["layers"]["up"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])  # each layer has a draw of its own
