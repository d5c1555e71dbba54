"""Hugging Face weights from and to our parameters (spec 1.9).

A Hugging Face file holds one tower: `ElectraForPreTraining` the discriminator,
`ElectraForMaskedLM` the generator, each with its copy of the shared embeddings. Its linear
weights are `[out, in]`, one tensor a layer, with query, key and value apart. Ours are `[in, out]`,
stacked over layers, with query, key and value fused and heads split.

`NAMES` and `to_huggingface` say it all: they only reorder numbers, so the transpose of that linear
map is its inverse, and `from_huggingface` needs no second description.
"""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from electra_jax.errors import UserError
from electra_jax.modeling.electra import Params, path_name, tower_embeddings

# Our modules and tables to theirs; `{}` is the layer. Several names are fused in ours.
NAMES: dict[str, tuple[str, ...]] = {
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
    "discriminator/head/dense": ("discriminator_predictions.dense",),
    "discriminator/head/output": ("discriminator_predictions.dense_prediction",),
    "generator/head/dense": ("generator_predictions.dense",),
    "generator/head/norm": ("generator_predictions.LayerNorm",),
    "generator/head": ("generator_lm_head",),
}

WORD_TABLE = "electra.embeddings.word_embeddings.weight"
TIED_OUTPUT = "generator_lm_head.weight"  # the word table once more, where a file has it at all
BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")  # no weights


def one_tower(params: Params, tower: str) -> Params:
    """`{"embeddings", tower: {"encoder", "head"}}`, what `tower` runs on, however it is shared.

    Args:
      params: of a whole model, or their shapes.
      tower: `generator` or `discriminator`.
    """
    own = params[tower]
    embeddings = tower_embeddings(params, tower)
    encoder = own["encoder"] if "encoder" in own else params["discriminator"]["encoder"]
    return {"embeddings": embeddings, tower: {"encoder": encoder, "head": own["head"]}}


def to_huggingface(params: Params) -> dict[str, Array]:
    """Hugging Face's tensors of `one_tower`; the tied `generator_lm_head.weight` is left out."""
    tensors = {}
    for path, value in jax.tree.leaves_with_path(params):
        path = re.sub("^(generator|discriminator)/encoder", "encoder", path_name(path))
        module, _, leaf = path.rpartition("/")
        names = NAMES[path if path in NAMES else module]
        suffix = "bias" if leaf == "bias" else "weight"
        is_stacked = "/layers/" in path
        for i, layer in enumerate(jnp.split(value, len(value)) if is_stacked else [value[None]]):
            parts = jnp.split(layer[0], len(names), axis=1 if leaf == "kernel" else 0)
            for name, part in zip(names, parts, strict=True):
                if leaf == "kernel":  # [H, 1, A, D], [A, D, H] or [in, out]
                    inputs = part.shape[:1] if len(names) > 1 else part.shape[:-1]
                    part = part.reshape(np.prod(inputs), -1).T
                elif leaf == "bias":
                    part = part.reshape(-1)
                tensors[f"{name.format(i)}.{suffix}"] = part
    return tensors


def from_huggingface(tensors: Mapping[str, Array | np.ndarray], like: Params) -> Params:
    """Our float32 parameters from a Hugging Face file.

    Args:
      tensors: by name, of any floating type.
      like: `one_tower` of the model's structure; says which tensors there must be, and how large.

    Returns:
      Parameters in the layout of `like`.

    Raises:
      UserError: names the tensors that are missing, unknown, of another shape or not tied.
    """
    expected = jax.eval_shape(to_huggingface, like)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, x in tensors.items():
        if name in expected and x.shape != expected[name].shape:
            problems.append(f"{name} is {x.shape}, the model's is {expected[name].shape}")
        elif name == TIED_OUTPUT and "generator" in like:
            if not np.array_equal(x, tensors.get(WORD_TABLE)):
                problems.append(f"{name} is not tied to {WORD_TABLE}")
        elif name not in expected and name not in BUFFERS:
            problems.append(f"{name} is not known")
    if problems:
        raise UserError(f"the weights do not fit the model: {'; '.join(problems)}")
    source = {name: jnp.asarray(tensors[name], jnp.float32) for name in expected}
    inverse = jax.linear_transpose(to_huggingface, like)
    return jax.jit(inverse)(source)[0]
