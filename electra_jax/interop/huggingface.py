"""Hugging Face's names and layout of weights, from and to our parameters (spec 1.9).

One of their files holds a part of what a run has trained: an encoder with its embeddings and,
mostly, a head. Their linear weights are `[out, in]`, one tensor a layer, with query, key and value
apart. Ours are `[in, out]`, stacked over layers, with query, key and value fused and heads split.

`ENCODER`, `PARTS` and `to_huggingface` say it all. What that function makes of NumPy arrays are
views of them, so filling the views is its inverse, and `from_huggingface` needs no second
description.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from electra_jax.errors import UserError
from electra_jax.modeling.electra import ElectraConfig, network_of, structure
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.encoders.bert import Bert
from electra_jax.modeling.layers import LAYER_NORM_EPSILON
from electra_jax.modeling.params import Params, path_name

# Our modules and tables to theirs; `{}` is the layer. Several names are fused in ours.
ENCODER: dict[str, tuple[str, ...]] = {
    "embeddings/word": ("electra.embeddings.word_embeddings",),
    "embeddings/position": ("electra.embeddings.position_embeddings",),
    "embeddings/token_type": ("electra.embeddings.token_type_embeddings",),
    "embeddings/norm": ("electra.embeddings.LayerNorm",),
    "encoder/projection": ("electra.embeddings_project",),
    "encoder/layers/attention/qkv": (
        "electra.encoder.layer.{}.attention.self.query",
        "electra.encoder.layer.{}.attention.self.key",
        "electra.encoder.layer.{}.attention.self.value",
    ),
    "encoder/layers/attention/out": ("electra.encoder.layer.{}.attention.output.dense",),
    "encoder/layers/attention_norm": ("electra.encoder.layer.{}.attention.output.LayerNorm",),
    "encoder/layers/up": ("electra.encoder.layer.{}.intermediate.dense",),
    "encoder/layers/down": ("electra.encoder.layer.{}.output.dense",),
    "encoder/layers/output_norm": ("electra.encoder.layer.{}.output.LayerNorm",),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """What one file holds.

    Attributes:
      architecture: Hugging Face's class.
      head: our modules to theirs.
    """

    architecture: str
    head: dict[str, str]


PARTS = {
    "encoder": Part("ElectraModel", {}),
    "discriminator": Part(
        "ElectraForPreTraining",
        {
            "head/dense": "discriminator_predictions.dense",
            "head/output": "discriminator_predictions.dense_prediction",
        },
    ),
    "generator": Part(
        "ElectraForMaskedLM",
        {
            "head/dense": "generator_predictions.dense",
            "head/norm": "generator_predictions.LayerNorm",
            "head": "generator_lm_head",
        },
    ),
    "classifier": Part(
        "ElectraForSequenceClassification",
        {"head/dense": "classifier.dense", "head/output": "classifier.out_proj"},
    ),
    "qa": Part("ElectraForQuestionAnswering", {"head/output": "qa_outputs"}),
    "tagger": Part("ElectraForTokenClassification", {"head/output": "classifier"}),
}

WORD_TABLE = "electra.embeddings.word_embeddings.weight"
TIED_OUTPUT = "generator_lm_head.weight"  # the word table once more, where a file has it at all

# What `config.json` must say where it says anything: all that our encoder can be.
FIXED = {
    "hidden_act": "gelu",
    "layer_norm_eps": LAYER_NORM_EPSILON,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
SIZES = {
    "vocab_size": "vocab_size",
    "embedding_size": "embedding_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
}
RATES = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_stddev": "initializer_range",
}


def tower_structure(config: EncoderConfig, part: str, num_outputs: int = 0) -> Params:
    """Shapes of a part of these sizes, `num_outputs` being those of a fine-tuned head."""
    shapes = structure(ElectraConfig(config, config, "all"))[1]
    if part in ("discriminator", "generator"):
        return network_of(shapes, part)
    tower = network_of(shapes, "discriminator")
    pretraining_head = tower.pop("head")
    if PARTS[part].head:
        width = config.hidden_size
        output = {
            "kernel": jax.ShapeDtypeStruct((width, num_outputs), jnp.float32),
            "bias": jax.ShapeDtypeStruct((num_outputs,), jnp.float32),
        }
        dense = {"dense": pretraining_head["dense"]} if "head/dense" in PARTS[part].head else {}
        tower["head"] = dense | {"output": output}
    return tower


def to_huggingface(params: Params, part: str) -> dict[str, Array | np.ndarray]:
    """Hugging Face's tensors of a part, a key of `PARTS`.

    Args:
      params: `{"embeddings", "encoder", "head"}`, the head where the part has one.

    Returns:
      Tensors by name; of NumPy arrays they are views. The generator's tied
      `generator_lm_head.weight` is left out.
    """
    tensors = {}
    for path, value in jax.tree.leaves_with_path(params):
        path, split = path_name(path), np.split if isinstance(value, np.ndarray) else jnp.split
        is_kernel, is_stacked = path.endswith("/kernel"), "/layers/" in path
        layers = split(value, len(value)) if is_stacked else [value[None]]
        for layer, names in zip(layers, tensor_names(path, len(layers), part), strict=True):
            pieces = split(layer[0], len(names), axis=1 if is_kernel else 0)
            for name, piece in zip(names, pieces, strict=True):
                if is_kernel:  # [H, 1, A, D], [A, D, H] or [in, out]
                    inputs = piece.shape[:1] if len(names) > 1 else piece.shape[:-1]
                    piece = piece.reshape(np.prod(inputs), -1).T
                elif name.endswith(".bias"):
                    piece = piece.reshape(-1)
                tensors[name] = piece
    return tensors


def tensor_names(path: str, num_layers: int, part: str) -> Iterator[tuple[str, ...]]:
    """For each layer, the names of the tensors that our parameter `path` is made of.

    Raises:
      KeyError: the part has no such parameter.
    """
    names = ENCODER | {ours: (theirs,) for ours, theirs in PARTS[part].head.items()}
    module, _, leaf = path.rpartition("/")
    suffix = "bias" if leaf == "bias" else "weight"
    found = names[path if path in names else module]
    for layer in range(num_layers):
        yield tuple(f"{name.format(layer)}.{suffix}" for name in found)


def parameter_of(like: Params, part: str) -> dict[str, str]:
    """For each tensor that `to_huggingface` gives, the path of our parameter."""
    return {
        name: path_name(path)
        for path, x in jax.tree.leaves_with_path(like)
        for names in tensor_names(
            path_name(path), x.shape[0] if "/layers/" in path_name(path) else 1, part
        )
        for name in names
    }


def from_huggingface(tensors: Mapping[str, Array | np.ndarray], like: Params, part: str) -> Params:
    """Our float32 parameters from Hugging Face's tensors.

    Args:
      tensors: by name, those of the part alone; of any floating type that float32 holds.
      like: `{"embeddings", "encoder", "head"}` or their shapes; says which tensors there must be,
        and how large.
      part: a key of `PARTS`.

    Returns:
      Parameters in the layout of `like`, on the host.

    Raises:
      UserError: names the tensors that are missing, unknown, of another shape or type, not tied or
        not finite.
    """
    expected = jax.eval_shape(lambda params: to_huggingface(params, part), like)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, x in tensors.items():
        if name in expected and x.shape != expected[name].shape:
            problems.append(f"{name} is {x.shape}, the model's is {expected[name].shape}")
        elif name == TIED_OUTPUT and part == "generator":
            if not np.array_equal(x, tensors.get(WORD_TABLE)):
                problems.append(f"{name} is not tied to {WORD_TABLE}")
        elif name not in expected:
            problems.append(f"{name} is not known")
        elif not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
            problems.append(f"{name} holds {x.dtype}; allowed: float32 and smaller floating types")
        elif not np.isfinite(x).all():
            problems.append(f"{name} holds numbers that are not finite")
    if problems:
        raise UserError(f"the weights do not fit the model: {'; '.join(problems)}")
    params = jax.tree.map(lambda x: np.empty(x.shape, np.float32), like)
    for name, view in to_huggingface(params, part).items():
        view[...] = tensors[name]
    return params


def part_of(names: Mapping[str, Any]) -> str:
    """Which part a file with tensors of these names is: the one whose head is there."""
    roots = {name.rpartition(".")[0] for name in names}
    heads = {part: len(roots & {*PARTS[part].head.values()}) for part in PARTS if PARTS[part].head}
    best = max(heads, key=heads.get)
    return best if heads[best] else "encoder"


def to_config(config: EncoderConfig, part: str, pad_id: int) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "model_type": "electra",
        "architectures": [PARTS[part].architecture],
        **{theirs: getattr(config, ours) for ours, theirs in (SIZES | RATES).items()},
        "hidden_act": FIXED["hidden_act"],
        "layer_norm_eps": FIXED["layer_norm_eps"],
        "pad_token_id": pad_id,
        "tie_word_embeddings": True,
    }


def from_config(content: Mapping[str, Any]) -> EncoderConfig:
    """The sizes in a `config.json` of an ELECTRA or BERT model.

    Raises:
      UserError: names the field that is missing, or that no encoder of ours can follow.
    """
    kind = content.get("model_type")
    if kind not in ("electra", "bert"):
        raise UserError(f"model_type is {kind!r}; allowed: 'electra', 'bert'")
    for name, value in FIXED.items():
        if content.get(name, value) != value:
            raise UserError(f"{name} is {content[name]!r}; allowed: {value!r}")
    if kind == "bert":
        content = {**content, "embedding_size": content.get("hidden_size")}
    sizes = {ours: content.get(theirs) for ours, theirs in SIZES.items()}
    for ours, value in sizes.items():
        if type(value) is not int or not 1 <= value < 2**31:
            raise UserError(f"{SIZES[ours]} is {value!r}; allowed: a number, at least 1")
    rates = {ours: content[theirs] for ours, theirs in RATES.items() if theirs in content}
    for ours, value in rates.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise UserError(f"{RATES[ours]} is {value!r}; allowed: at least 0 and below 1")
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise UserError(
            f"hidden_size is {sizes['hidden_size']} and num_attention_heads is "
            f"{sizes['num_heads']}; allowed: heads that divide the hidden size"
        )
    return sized(sizes, {name: float(value) for name, value in rates.items()})


def sized(sizes: Mapping[str, int], rates: Mapping[str, float]) -> EncoderConfig:
    """An encoder of these sizes. Rates that are not given are the usual ones."""
    usual = {"dropout": 0.1, "attention_dropout": 0.1, "init_stddev": 0.02}
    numerics = {"remat": "none", "scan_unroll": 1, "dtype": jnp.float32}
    return Bert.Config(encoder="bert", **sizes, **usual | dict(rates), **numerics)


# Other spellings of the same tensors: BERT's, those of a file without a head, those of old files.
SPELLINGS = (
    (r"^bert\.", "electra."),
    (r"^(embeddings|embeddings_project|encoder|pooler)\.", r"electra.\1."),
    (r"^cls\.predictions\.transform\.", "generator_predictions."),
    (r"^cls\.predictions\.bias$", "generator_lm_head.bias"),
    (r"^cls\.predictions\.decoder\.", "generator_lm_head."),
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
)
# What is known and has no place in our model, and why.
WITHOUT_A_PLACE = (
    (r"^electra\.embeddings\.(position_ids|token_type_ids)$", "numbers 0, 1, 2 ..., no weights"),
    (r"^electra\.pooler\.", "BERT's pooler; ELECTRA has none"),
    (r"^cls\.seq_relationship\.", "BERT's head for the next sentence; ELECTRA has none"),
)


def canonical(name: str) -> str:
    """The name that an ELECTRA model of Hugging Face's would have for the tensor `name`."""
    for pattern, replacement in SPELLINGS:
        name = re.sub(pattern, replacement, name)
    return name


def without_a_place(name: str) -> str | None:
    """Why the tensor of this canonical name is not used, if it is known to be of no use."""
    return next((why for pattern, why in WITHOUT_A_PLACE if re.search(pattern, name)), None)
