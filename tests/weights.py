"""Weights of a small model of random numbers, in every place that a run can start from."""

import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import nnx
from ml_collections import ConfigDict

from electra_jax.config import get_config
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.finetune.heads.base import Head
from electra_jax.interop import huggingface
from electra_jax.interop.directory import write
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.modeling.electra import Electra, ElectraConfig, network_of, structure
from electra_jax.modeling.encoders.base import Context, EncoderConfig, encode
from electra_jax.modeling.encoders.bert import NAMING
from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective, make_objective
from electra_jax.run.workdir import write_run_files
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.step import TrainState

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]


def recipe(**changes) -> ConfigDict:
    config = get_config()
    config.model.update(hidden_size=64, num_layers=2, embedding_size=16, max_positions=24)
    config.model.update(num_heads=1, dropout=0.0, attention_dropout=0.0)
    config.generator.width = 0.5
    config.data.sequence_length = 16
    config.update_from_flattened_dict(changes)
    return config


def vocabulary(vocab: list[str] = VOCAB, **settings) -> WordPiece:
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200} | settings
    return WordPiece(vocab, **settings)


def random_params(config: ConfigDict, vocab: list[str] = VOCAB) -> tuple[Objective, Params]:
    """Numbers of no pattern in every place, biases too."""
    objective, rng = make_objective(config, vocabulary(vocab)), np.random.default_rng(0)
    make = lambda x: rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    return objective, jax.tree.map(make, objective.structure())


def save_run(directory: Path, config: ConfigDict, params: Params) -> str:
    state = TrainState(np.int32(3), params, {"mu": jax.tree.map(np.zeros_like, params)})
    with Checkpoints(directory / "checkpoints", "hash", keep=1) as checkpoints:
        checkpoints.save(3, jax.tree.map(jnp.asarray, state), {}, {})
    write_run_files(config, directory, vocabulary(), {})
    return str(directory)


def save_huggingface(
    directory: Path, params: Params, part: str, tokenizer: WordPiece | None = None
) -> str:
    network = network_of(params, part.replace("encoder", "discriminator"))
    if part == "encoder":
        del network["head"]
    config = huggingface.to_config(tiny.encoder_of(network), part, 0)
    layout = HuggingFaceLayout(NAMING, part)
    write(directory, layout, network, config, tokenizer or vocabulary(), "float32", "")
    return str(directory)


def save_both(directory: Path, params: Params) -> str:
    directory.mkdir(exist_ok=True)
    parts = [part for part in ("discriminator", "generator") if part in params]
    return ",".join(save_huggingface(directory / part, params, part) for part in parts)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_original(directory: Path, params: Params, **more: np.ndarray) -> str:
    """As the original program would, in a file for `TENSORFLOW`."""
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCAB))
    (directory / "model.ckpt-7.index").touch()
    np.savez(directory / "model.ckpt-7.npz", **original_variables(params) | more)
    return str(directory)


class Reader:
    """What `tf.train.load_checkpoint` returns, for a file of `save_original`."""

    def __init__(self, prefix: str):
        self.variables = dict(np.load(f"{prefix}.npz"))

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        return {name: [*x.shape] for name, x in self.variables.items()}

    def get_tensor(self, name: str) -> np.ndarray:
        assert "adam" not in name, "the moments of a large model are gigabytes"
        return self.variables[name]


TENSORFLOW = ModuleType("tensorflow")  # stands for the package
TENSORFLOW.__spec__ = ModuleSpec("tensorflow", None)
TENSORFLOW.train = SimpleNamespace(load_checkpoint=Reader)


def original_variables(params: Params) -> dict[str, np.ndarray]:
    """Our parameters of a pre-training run as the original's variables (spec 1.8)."""
    generator, discriminator = params["generator"], params.get("discriminator")
    named = embeddings("electra", params["embeddings"])
    if discriminator:
        named |= encoder("electra", discriminator["encoder"])
        named |= linear("discriminator_predictions/dense", discriminator["head"]["dense"])
        named |= linear("discriminator_predictions/dense_1", discriminator["head"]["output"])
    if "embeddings" in generator:
        named |= embeddings("generator", generator["embeddings"])
    if "encoder" in generator:
        named |= encoder("generator" if discriminator else "electra", generator["encoder"])
    named |= linear("generator_predictions/dense", generator["head"]["dense"])
    named |= norm("generator_predictions/LayerNorm", generator["head"]["norm"])
    named["generator_predictions/output_bias"] = generator["head"]["bias"]
    moments = {f"{name}/adam_{x}": np.zeros_like(named[name]) for name in named for x in "mv"}
    others = {"global_step": np.int64(4_000_000), "temperature": np.float32(1)}
    return {name: np.ascontiguousarray(x) for name, x in (named | moments | others).items()}


def embeddings(scope: str, tree: Params) -> dict[str, np.ndarray]:
    tables = ("word", "position", "token_type")
    named = {f"{scope}/embeddings/{name}_embeddings": tree[name] for name in tables}
    return named | norm(f"{scope}/embeddings/LayerNorm", tree["norm"])


def encoder(scope: str, tree: Params) -> dict[str, np.ndarray]:
    named = {}
    if "projection" in tree:
        named |= linear(f"{scope}/embeddings_project", tree["projection"])
    for i in range(len(tree["layers"]["up"]["bias"])):
        layer = jax.tree.map(lambda x, i=i: x[i], tree["layers"])
        place, attention = f"{scope}/encoder/layer_{i}", layer["attention"]
        width = len(attention["out"]["bias"])
        for part, name in enumerate(("query", "key", "value")):
            kernel = attention["qkv"]["kernel"][:, part].reshape(width, width)
            bias = attention["qkv"]["bias"][part].reshape(width)
            named |= linear(f"{place}/attention/self/{name}", {"kernel": kernel, "bias": bias})
        out = attention["out"] | {"kernel": attention["out"]["kernel"].reshape(width, width)}
        named |= linear(f"{place}/attention/output/dense", out)
        named |= norm(f"{place}/attention/output/LayerNorm", layer["attention_norm"])
        named |= linear(f"{place}/intermediate/dense", layer["up"])
        named |= linear(f"{place}/output/dense", layer["down"])
        named |= norm(f"{place}/output/LayerNorm", layer["output_norm"])
    return named


def linear(name: str, tree: Params) -> dict[str, np.ndarray]:
    return {f"{name}/kernel": tree["kernel"], f"{name}/bias": tree["bias"]}


def norm(name: str, tree: Params) -> dict[str, np.ndarray]:
    return {f"{name}/gamma": tree["scale"], f"{name}/beta": tree["bias"]}


def main_network(params: Params) -> Params:
    encoder = params.get("discriminator", params["generator"])["encoder"]
    return {"embeddings": params["embeddings"], "encoder": encoder}


def assert_equal(found: dict[str, np.ndarray], expected: Params) -> None:
    expected = tiny.flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True, err_msg=name)


def bind(params: Params, config: EncoderConfig) -> Electra:
    """Our model with this network in both roles, the heads zero where it has none."""
    graph, shapes = structure(ElectraConfig(config, config, "all"))
    whole = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    params = jax.tree.map(jnp.asarray, params)
    whole |= {"embeddings": params["embeddings"]}
    whole["discriminator"]["encoder"] = params["encoder"]
    for role in ("discriminator", "generator"):
        if jax.tree.structure(whole[role]["head"]) == jax.tree.structure(params.get("head")):
            whole[role]["head"] = params["head"]
    return nnx.merge(graph, whole)


def inputs(batch: dict) -> tuple[jax.Array, Context]:
    """Token ids and context of a batch as Hugging Face's models take it."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    ids, mask, types = (jnp.int32(batch[name]) for name in names)
    return ids, Context(mask, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), types)


def head_outputs(head: Head, params: Params, config: EncoderConfig, batch: dict) -> list:
    """Outputs of a head of fine-tuning, where every real token may be an answer."""
    model, (ids, context) = bind(params, config), inputs(batch)
    hidden = encode(model.embeddings, model.discriminator.encoder, ids, context, None)
    graph = nnx.graphdef(nnx.eval_shape(lambda: head.layers(config, nnx.Rngs(0))))
    layers = nnx.merge(graph, jax.tree.map(jnp.asarray, params["head"]))
    outputs = head.outputs(layers, hidden, {"allowed": context.segment_ids})
    return [np.asarray(x) for x in outputs.values()]
