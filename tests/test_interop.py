import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from safetensors.numpy import load_file

from electra_jax.errors import UserError
from electra_jax.finetune.heads.sentence import Classification, Regression
from electra_jax.finetune.heads.span import Spans
from electra_jax.interop.export import file_tensors
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.source import Network, read_source
from electra_jax.modeling.electra import Electra, ElectraConfig, network_of, structure
from electra_jax.modeling.encoders.base import Context, EncoderConfig, encode
from electra_jax.modeling.encoders.bert import NAMING
from electra_jax.modeling.layers import gelu
from electra_jax.objectives.electra import rtd_sums
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.mlm import mlm_sums

TOWERS = ("discriminator", "generator")


def layout(part: str) -> HuggingFaceLayout:
    return HuggingFaceLayout(NAMING, part)


@functools.cache
def parameters(kind: str = "electra", sharing: str = "embeddings") -> dict:
    """Random numbers in every place, biases too."""
    rng = np.random.default_rng(0)
    shapes = tiny.objective(kind, sharing).structure()
    return jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), shapes)


class Oracle:
    """A tower of Hugging Face's with its input and output, and our model with the same weights."""

    def __init__(self, directory, tower: str):
        configs = {name: read_config(directory / f"{name}.config.json") for name in TOWERS}
        self.graph, shapes = structure(ElectraConfig(**configs))
        self.tower = tower
        self.tensors = load_file(directory / f"{tower}.safetensors")
        params = layout(tower).params(self.tensors, network_of(shapes, tower))
        self.params = jax.tree.map(jnp.asarray, params)
        (other,) = set(TOWERS) - {tower}
        self.rest = {other: jax.tree.map(lambda x: jnp.zeros(x.shape), shapes[other])}
        with np.load(directory / "io.npz") as io:
            self.inputs = {name: jnp.int32(io[name]) for name in io if io[name].ndim == 2}
            prefix = f"gelu/{tower}/"
            self.outputs = {
                name.removeprefix(prefix): io[name] for name in io if name.startswith(prefix)
            }
        norms = json.loads((directory / "grad_norms.json").read_text())
        self.grad_norms = norms[f"gelu/{tower}/grad_norms"]
        self.is_real = self.inputs["attention_mask"] > 0
        self.ids = self.inputs["input_ids"]
        self.masked = slots(self.ids, self.inputs["mlm_labels"])
        self.context = Context(
            segment_ids=self.inputs["attention_mask"],
            position_ids=jnp.broadcast_to(jnp.arange(16), (4, 16)),
            token_type_ids=self.inputs["token_type_ids"],
        )

    def bind(self, params) -> Electra:
        own = {self.tower: {"encoder": params["encoder"], "head": params["head"]}}
        return nnx.merge(self.graph, {"embeddings": params["embeddings"]} | own | self.rest)

    def loss(self, params) -> jax.Array:
        if self.tower == "discriminator":
            logits = self.bind(params).discriminate(self.ids, self.context, None)
            sums = rtd_sums(logits, self.inputs["rtd_labels"] == 1, self.is_real)
            return sums["rtd_loss"][0] / sums["rtd_loss"][1]
        positions = self.masked.masked_positions
        logits = self.bind(params).generate(self.ids, self.context, positions, None)
        sums = mlm_sums(logits, self.masked)
        return sums["mlm_loss"][0] / sums["mlm_loss"][1]


def slots(ids: jax.Array, labels: jax.Array) -> Masked:
    """Slots for the labels that are not -100; rows with fewer have slots of weight 0."""
    chosen = labels != -100
    num_slots = int(chosen.sum(axis=1).max())
    positions = jnp.argsort(~chosen, axis=1, stable=True)[:, :num_slots]
    weights = jnp.take_along_axis(chosen, positions, axis=1).astype(jnp.float32)
    labels = jnp.take_along_axis(labels, positions, axis=1)
    return Masked(ids, positions, jnp.where(weights > 0, labels, 0), weights)


def read_config(path) -> EncoderConfig:
    config = json.loads(path.read_text())
    return tiny.encoder(
        vocab_size=config["vocab_size"],
        embedding_size=config["embedding_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        token_types=config["type_vocab_size"],
    )


@pytest.fixture(scope="module", params=TOWERS)
def oracle(request, shared_data) -> Oracle:
    return Oracle(shared_data / "electra_oracle", request.param)


def test_logits_equal_hugging_face(oracle):
    model = oracle.bind(oracle.params)
    if oracle.tower == "discriminator":
        logits = model.discriminate(oracle.ids, oracle.context, None)
    else:
        everywhere = oracle.context.position_ids
        logits = model.generate(oracle.ids, oracle.context, everywhere, None)
        logits = logits[..., : len(model.embeddings.word)]
    expected = oracle.outputs["logits"]
    assert logits.shape == expected.shape
    np.testing.assert_allclose(logits[oracle.is_real], expected[oracle.is_real], atol=1e-5, rtol=0)


def test_hidden_states_equal_hugging_face(oracle):
    model = oracle.bind(oracle.params)
    context = oracle.context
    embedded = model.embeddings(oracle.ids, context, None)
    encoder = getattr(model, oracle.tower).encoder
    last, states = encoder.hidden_states(embedded, context, None, every_layer=True)
    assert len(states) == 4
    for i, state in enumerate(states):
        expected = oracle.outputs[f"hidden_{i}"][oracle.is_real]
        np.testing.assert_allclose(state[oracle.is_real], expected, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(last, states[-1])


def test_loss_and_the_gradient_of_every_tensor_equal_hugging_face(oracle):
    loss, grads = jax.jit(jax.value_and_grad(oracle.loss))(oracle.params)
    np.testing.assert_allclose(loss, oracle.outputs["loss"], atol=1e-5, rtol=0)
    norms = {name: np.linalg.norm(x) for name, x in layout(oracle.tower).tensors(grads).items()}
    assert norms.keys() == oracle.grad_norms.keys()
    off = {
        name: (norm, expected)
        for name, norm in norms.items()
        if abs(norm - (expected := oracle.grad_norms[name])) > 1e-5 * max(1, expected)
    }
    assert off == {}


FINE_TUNED = {
    "classifier3": Classification(labels=("a", "b", "c"), style="huggingface"),
    "regressor": Regression(style="huggingface"),
    "span_qa": Spans(style="huggingface"),
}


def imported(directory, name: str) -> tuple[str, Network]:
    """The only network there, with its fine-tuned head, if it has one; and which part it is."""
    ((part, network),) = read_source(str(directory)).networks.items()
    if name not in FINE_TUNED:
        return part, network
    assert part == FINE_TUNED[name].huggingface.part
    return part, dataclasses.replace(network, head=FINE_TUNED[name].layers)


@pytest.fixture
def directory_of(shared_data, tmp_path):
    """A model of the oracle as Hugging Face would save it."""

    def make(name: str):
        oracle = shared_data / "electra_oracle"
        config = json.loads((oracle / f"{name}.config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "electra"}))
        shutil.copy(oracle / f"{name}.safetensors", tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.parametrize("name", [*TOWERS, *FINE_TUNED])
def test_what_was_imported_is_exported_byte_for_byte(name, directory_of):
    part, network = imported(directory_of(name), name)
    exported = file_tensors(network.params(with_head=True), layout(part))
    found = {name: (x.dtype, x.shape, x.tobytes()) for name, x in exported.items()}
    tensors = load_file(directory_of(name) / "model.safetensors")
    assert found == {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuned_logits_equal_hugging_face(name, directory_of, shared_data):
    part, network = imported(directory_of(name), name)
    params, config = jax.tree.map(jnp.asarray, network.params(with_head=True)), network.config
    graph, shapes = structure(ElectraConfig(config, config, "all"))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    zeros["discriminator"]["encoder"] = params["encoder"]
    model = nnx.merge(graph, zeros | {"embeddings": params["embeddings"]})
    with np.load(shared_data / "electra_oracle" / "io.npz") as io:
        ids, mask, types = (
            jnp.int32(io[key]) for key in ("input_ids", "attention_mask", "token_type_ids")
        )
        expected = {
            key.rpartition("/")[2]: io[key] for key in io if key.startswith(f"gelu/{name}/")
        }
    context = Context(mask, jnp.broadcast_to(jnp.arange(16), (4, 16)), types)
    hidden = encode(model.embeddings, model.discriminator.encoder, ids, context, None)
    head, apply = params["head"], lambda layer, x: x @ layer["kernel"] + layer["bias"][None]
    if part == "classifier":
        logits = apply(head["output"], gelu(apply(head["dense"], hidden[:, 0])))
        expected = expected["logits"]
    else:
        logits = jnp.einsum("blh,hc->blc", hidden, head["output"]["kernel"]) + head["output"][
            "bias"
        ].reshape(1, 1, -1)
        logits, real = np.asarray(logits), np.asarray(mask) > 0
        expected = np.stack([expected["start_logits"], expected["end_logits"]], axis=-1)
        logits, expected = logits[real], expected[real]
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tower", "sharing"),
    [
        ("discriminator", "embeddings"),
        ("generator", "embeddings"),
        ("generator", "none"),
        ("generator", "all"),
    ],
)
def test_export_and_import_are_inverse(tower, sharing):
    params = parameters(sharing=sharing)
    part = network_of(params, tower)
    tensors = layout(tower).tensors(part)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in jax.tree.leaves(part))
    jax.tree.map(np.testing.assert_array_equal, layout(tower).params(tensors, part), part)


def test_where_a_shared_tower_gets_its_parts():
    one = parameters(sharing="all")
    part = network_of(one, "generator")
    assert part["encoder"] is one["discriminator"]["encoder"]
    assert part["head"] is one["generator"]["head"]
    two = parameters(sharing="none")
    assert network_of(two, "generator")["embeddings"] is two["generator"]["embeddings"]
    assert network_of(two, "discriminator")["embeddings"] is two["embeddings"]
    bert = parameters("mlm")
    assert network_of(bert, "generator") == {"embeddings": bert["embeddings"], **bert["generator"]}


def test_layout_of_kernels():
    """`[out, in]` there; ours `[in, out]`, stacked, q, k, v fused in this order and heads split."""
    params = parameters()
    tensors = layout("discriminator").tensors(network_of(params, "discriminator"))
    layers = params["discriminator"]["encoder"]["layers"]
    name = "electra.encoder.layer.1."
    equal = np.testing.assert_array_equal
    for i, part in enumerate(("query", "key", "value")):
        ours = layers["attention"]["qkv"]["kernel"][1, :, i]  # [H, A, D]
        equal(tensors[f"{name}attention.self.{part}.weight"], ours.reshape(32, 32).T)
        ours = layers["attention"]["qkv"]["bias"][1, i]  # [A, D]
        equal(tensors[f"{name}attention.self.{part}.bias"], ours.reshape(32))
    ours = layers["attention"]["out"]["kernel"][1]  # [A, D, H]
    equal(tensors[f"{name}attention.output.dense.weight"], ours.reshape(32, 32).T)
    equal(tensors[f"{name}intermediate.dense.weight"], layers["up"]["kernel"][1].T)


def generator_file() -> tuple[dict[str, np.ndarray], dict]:
    part = network_of(parameters(), "generator")
    return {name: np.asarray(x) for name, x in layout("generator").tensors(part).items()}, part


def test_tied_output_is_accepted():
    tensors, part = generator_file()
    word = tensors["electra.embeddings.word_embeddings.weight"]
    extra = {"generator_lm_head.weight": word}
    params = layout("generator").params(tensors | extra, part)
    jax.tree.map(np.testing.assert_array_equal, params, part)


def test_half_precision_files_become_float32():
    tensors, part = generator_file()
    halves = {name: x.astype(np.float16) for name, x in tensors.items()}
    params = layout("generator").params(halves, part)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_tensors_that_do_not_fit_are_all_named():
    tensors, part = generator_file()
    del tensors["electra.embeddings_project.bias"]
    tensors["electra.encoder.layer.2.output.dense.bias"] = np.zeros(16, np.float32)
    tensors["electra.encoder.layer.0.output.dense.weight"] = np.zeros((32, 16), np.float32)
    tensors["generator_lm_head.weight"] = np.zeros((tiny.VOCAB, 8), np.float32)
    with pytest.raises(UserError) as error:
        layout("generator").params(tensors, part)
    for problem in (
        "electra.embeddings_project.bias is missing",
        "electra.encoder.layer.2.output.dense.bias is not known",
        "electra.encoder.layer.0.output.dense.weight is (32, 16), the model's is (16, 32)",
        "generator_lm_head.weight is not tied to electra.embeddings.word_embeddings.weight",
    ):
        assert problem in str(error.value)


def test_a_file_of_the_other_tower_is_refused():
    params = parameters()
    tensors = layout("discriminator").tensors(network_of(params, "discriminator"))
    with pytest.raises(UserError, match=r"discriminator_predictions.* is not known"):
        layout("generator").params(tensors, network_of(params, "generator"))
