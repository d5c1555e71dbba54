import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import weights
from flax import nnx
from safetensors.numpy import load_file

from electra_jax.errors import UserError
from electra_jax.finetune.heads.sentence import Classification, Regression
from electra_jax.finetune.heads.span import Spans
from electra_jax.interop.directory import file_tensors
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.source import Network, read_source
from electra_jax.modeling.electra import Electra, ElectraConfig, network_of, structure
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.encoders.bert import NAMING
from electra_jax.objectives.electra import rtd_sums
from electra_jax.objectives.masking import Masked
from electra_jax.objectives.mlm import mlm_sums

NETWORKS = ("discriminator", "generator")


def layout(part: str) -> HuggingFaceLayout:
    return HuggingFaceLayout(NAMING, part)


def assert_equal(found: dict, expected: dict) -> None:
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


@functools.cache
def parameters(kind: str = "electra", sharing: str = "embeddings") -> dict:
    """Random numbers in every place, biases too."""
    rng = np.random.default_rng(0)
    shapes = tiny.objective(kind, sharing).structure()
    return jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), shapes)


class Oracle:
    """A network of Hugging Face's, its input and output, and our model with its weights."""

    def __init__(self, directory, part: str):
        configs = {name: read_config(directory / f"{name}.config.json") for name in NETWORKS}
        self.graph, shapes = structure(ElectraConfig(**configs))
        self.part = part
        self.tensors = load_file(directory / f"{part}.safetensors")
        params = layout(part).params(self.tensors, network_of(shapes, part))
        self.params = jax.tree.map(jnp.asarray, params)
        (other,) = set(NETWORKS) - {part}
        self.rest = {other: jax.tree.map(lambda x: jnp.zeros(x.shape), shapes[other])}
        with np.load(directory / "io.npz") as io:
            self.inputs = {name: jnp.int32(io[name]) for name in io if io[name].ndim == 2}
            prefix = f"gelu/{part}/"
            self.outputs = {
                name.removeprefix(prefix): io[name] for name in io if name.startswith(prefix)
            }
        norms = json.loads((directory / "grad_norms.json").read_text())
        self.grad_norms = norms[f"gelu/{part}/grad_norms"]
        self.is_real = self.inputs["attention_mask"] > 0
        self.ids = self.inputs["input_ids"]
        self.masked = slots(self.ids, self.inputs["mlm_labels"])
        _, self.context = weights.inputs(self.inputs)

    def bind(self, params) -> Electra:
        own = {self.part: {"encoder": params["encoder"], "head": params["head"]}}
        return nnx.merge(self.graph, {"embeddings": params["embeddings"]} | own | self.rest)

    def loss(self, params) -> jax.Array:
        if self.part == "discriminator":
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


@pytest.fixture(scope="module", params=NETWORKS)
def oracle(request, shared_data) -> Oracle:
    return Oracle(shared_data / "electra_oracle", request.param)


def test_logits_equal_hugging_face(oracle):
    model = oracle.bind(oracle.params)
    if oracle.part == "discriminator":
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
    encoder = getattr(model, oracle.part).encoder
    last, states = encoder.hidden_states(embedded, context, None, every_layer=True)
    assert len(states) == 4
    for i, state in enumerate(states):
        expected = oracle.outputs[f"hidden_{i}"][oracle.is_real]
        np.testing.assert_allclose(state[oracle.is_real], expected, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(last, states[-1])


def test_loss_and_the_gradient_of_every_tensor_equal_hugging_face(oracle):
    loss, grads = jax.jit(jax.value_and_grad(oracle.loss))(oracle.params)
    np.testing.assert_allclose(loss, oracle.outputs["loss"], atol=1e-5, rtol=0)
    norms = {name: np.linalg.norm(x) for name, x in layout(oracle.part).tensors(grads).items()}
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


@pytest.mark.parametrize("name", [*NETWORKS, *FINE_TUNED])
def test_what_was_imported_is_exported_byte_for_byte(name, directory_of):
    part, network = imported(directory_of(name), name)
    exported = file_tensors(network.params(with_head=True), layout(part))
    found = {name: (x.dtype, x.shape, x.tobytes()) for name, x in exported.items()}
    tensors = load_file(directory_of(name) / "model.safetensors")
    assert found == {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuned_logits_equal_hugging_face(name, directory_of, shared_data):
    _, network = imported(directory_of(name), name)
    with np.load(shared_data / "electra_oracle" / "io.npz") as io:
        batch = {key: io[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
        names = ("start_logits", "end_logits") if name == "span_qa" else ("logits",)
        expected = [io[f"gelu/{name}/{key}"] for key in names]
    params = network.params(with_head=True)
    found = weights.head_outputs(FINE_TUNED[name], params, network.config, batch)
    real = batch["attention_mask"] > 0 if name == "span_qa" else ...
    for ours, theirs in zip(found, expected, strict=True):
        theirs = theirs.reshape(ours.shape)  # of one output, theirs has an axis more
        np.testing.assert_allclose(ours[real], theirs[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("part", "sharing"),
    [
        ("discriminator", "embeddings"),
        ("generator", "embeddings"),
        ("generator", "none"),
        ("generator", "all"),
    ],
)
def test_export_and_import_are_inverse(part, sharing):
    network = network_of(parameters(sharing=sharing), part)
    tensors = layout(part).tensors(network)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in jax.tree.leaves(network))
    assert_equal(layout(part).params(tensors, network), network)


def test_where_a_shared_network_gets_its_parts():
    one = parameters(sharing="all")
    network = network_of(one, "generator")
    assert network["encoder"] is one["discriminator"]["encoder"]
    assert network["head"] is one["generator"]["head"]
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


@pytest.fixture
def generator() -> tuple[dict[str, np.ndarray], dict]:
    """The tensors of a file, and the parameters they are."""
    network = network_of(parameters(), "generator")
    return layout("generator").tensors(network), network


def test_tied_output_is_accepted(generator):
    tensors, network = generator
    tied = {"generator_lm_head.weight": tensors["electra.embeddings.word_embeddings.weight"]}
    assert_equal(layout("generator").params(tensors | tied, network), network)


def test_half_precision_files_become_float32(generator):
    tensors, network = generator
    halves = {name: x.astype(np.float16) for name, x in tensors.items()}
    params = layout("generator").params(halves, network)
    assert_equal(params, jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), network))


def test_tensors_that_do_not_fit_are_all_named(generator):
    tensors, network = generator
    del tensors["electra.embeddings_project.bias"]
    tensors["electra.encoder.layer.2.output.dense.bias"] = np.zeros(16, np.float32)
    tensors["electra.encoder.layer.0.output.dense.weight"] = np.zeros((32, 16), np.float32)
    tensors["generator_lm_head.weight"] = np.zeros((tiny.VOCAB, 8), np.float32)
    tensors["discriminator_predictions.dense.bias"] = np.zeros(32, np.float32)
    with pytest.raises(UserError) as error:
        layout("generator").params(tensors, network)
    for problem in (
        "electra.embeddings_project.bias is missing",
        "electra.encoder.layer.2.output.dense.bias is not known",
        "electra.encoder.layer.0.output.dense.weight is (32, 16), the model's is (16, 32)",
        "generator_lm_head.weight is not tied to electra.embeddings.word_embeddings.weight",
        "discriminator_predictions.dense.bias is not known",
    ):
        assert problem in str(error.value)
