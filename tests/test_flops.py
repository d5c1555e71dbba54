from unittest import mock

import jax
import pytest
import tiny
from jaxprs import matrix_products, operations

from electra_jax.checks import objective_for
from electra_jax.config import get_config
from electra_jax.modeling.flops import peak_flops, train_flops_per_token
from electra_jax.objectives.base import Inputs


@pytest.mark.parametrize(
    ("hidden", "layers", "embedding", "generator", "length", "predictions", "gigaflops"),
    [  # worked out by hand for the published sizes
        (256, 12, 128, 0.25, 128, 19, "0.070"),
        (768, 12, 768, 1 / 3, 128, 19, "0.611"),
        (768, 12, 768, 1 / 3, 512, 79, "0.668"),
        (1024, 24, 1024, 0.25, 512, 130, "2.170"),
    ],
)
def test_published_sizes(hidden, layers, embedding, generator, length, predictions, gigaflops):
    config = get_config()
    config.model.update(hidden_size=hidden, num_layers=layers, embedding_size=embedding)
    config.generator.width = generator
    model = objective_for(config, vocab_size=30522).model
    assert f"{train_flops_per_token(model, length, predictions) / 1e9:.3f}" == gigaflops


@pytest.mark.parametrize(
    ("kind", "sharing", "embedding"),
    [
        ("electra", "embeddings", 8),
        ("electra", "embeddings", 32),
        ("electra", "none", 8),
        ("electra", "all", 8),
        ("electra", "gdes", 8),
        ("mlm", "embeddings", 8),
        ("electra_15", "embeddings", 8),
        ("replace_mlm", "embeddings", 8),
        ("adversarial", "embeddings", 8),
    ],
)
def test_formula_equals_the_matrix_products_of_a_training_step(kind, sharing, embedding):
    objective = tiny.objective(
        kind, sharing, vocab_size=384, embedding_size=embedding, dropout=0.1, attention_dropout=0.1
    )
    batch = jax.device_put(tiny.packed(3, vocab_size=384))
    key = jax.random.key(0)
    masked = objective.mask(batch, key)

    def loss(params):
        sums = objective.sums(params, Inputs(batch, masked, key, key))
        return sum(sums[term][0] for term in objective.loss_terms)

    program = jax.make_jaxpr(jax.grad(loss))(objective.structure())
    counted = sum(times * operations(dot) for dot, times in matrix_products(program.jaxpr))
    predictions = masked.masked_positions.shape[1]
    per_token = train_flops_per_token(objective.model, tiny.LENGTH, predictions)
    assert counted == pytest.approx(per_token * 3 * tiny.LENGTH, rel=1e-12)


def test_what_is_not_run_does_not_count():
    def flops(kind: str, passes: int = 3) -> float:
        model = tiny.objective(kind, full_size=True).model
        return train_flops_per_token(model, tiny.LENGTH, 4, passes)

    electra, bert = flops("electra"), flops("mlm")
    assert flops("electra", passes=1) == pytest.approx(electra - 2 / 3 * bert)
    words = flops("replace_mlm") - bert  # at 4 of 32 positions
    assert flops("replace_mlm") == pytest.approx(2 * bert)
    head = 2 * 32 * 8 + 2 * 8 * tiny.VOCAB
    every = words + 3 * head * 28 / 32 + 3 * 2 * 32  # and the gate
    assert flops("all_tokens_mlm") == pytest.approx(every)  # without a generator


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v4", 275e12),
        ("cpu", None),
    ],
)
def test_peaks_by_device_kind(kind, peak):
    assert peak_flops(mock.Mock(spec=jax.Device, device_kind=kind)) == peak
