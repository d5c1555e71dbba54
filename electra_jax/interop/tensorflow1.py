"""The original program's checkpoints, renamed to Hugging Face's names (spec 1.8, 1.9).

A checkpoint holds both networks. The embeddings lie under `electra/` even where the generator alone
reads them, and so does an encoder that both networks share, or the only one.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from electra_jax.errors import UserError
from electra_jax.interop.huggingface import described, reason, renamed
from electra_jax.modeling.encoders.base import EncoderConfig, num_heads

ENCODER = "bert"  # its key in `ENCODERS`
Tensors = dict[str, np.ndarray]

# Everything that is no weight, and why it is not used.
NO_WEIGHTS = (
    (r"/adam_[mv]$", "the optimizer's moments; training starts with fresh ones"),
    (r"^global_step$", "the step; training starts at 0"),
    (r"^temperature$", "left in published checkpoints, read by nothing"),
    (r"^task_specific/", "a fine-tuned head"),
)
HEADS = {
    "discriminator": "discriminator_predictions/",
    "generator": "generator_predictions/",
}
SPELLINGS = (  # `electra.encoder.layer.0.output.dense.weight` of `generator/encoder/layer_0/...`
    (r"^(electra|generator)/", "electra/"),
    (r"^generator_predictions/output_bias$", "generator_lm_head/bias"),
    (r"^discriminator_predictions/dense_1/", "discriminator_predictions/dense_prediction/"),
    (r"/layer_(\d+)/", r"/layer/\1/"),
    (r"_embeddings$", "_embeddings/weight"),
    (r"/(kernel|gamma)$", "/weight"),
    (r"/beta$", "/bias"),
    (r"/", "."),
)


def read(prefix: Path) -> tuple[Tensors, dict[str, str]]:
    """The weights in a checkpoint whose files start with `prefix`; why the rest is not used.

    Raises:
      UserError: TensorFlow is not installed, or cannot read the checkpoint.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no lines about processors
    try:
        import tensorflow
    except ImportError as error:
        raise UserError(
            f"{prefix}.index is a checkpoint of TensorFlow, which is read by the package "
            "'tensorflow'; it is not installed: pip install tensorflow"
        ) from error
    try:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        names = sorted(reader.get_variable_to_shape_map())
        left_out = {name: why for name in names if (why := reason(name, NO_WEIGHTS))}
        return {name: reader.get_tensor(name) for name in names if name not in left_out}, left_out
    except Exception as error:  # they are of many kinds
        message = " ".join(str(error).split())
        raise UserError(f"{prefix}.index: TensorFlow cannot read this checkpoint: {message}") from (
            error
        )


def networks(variables: Mapping[str, np.ndarray]) -> dict[str, dict[str, str]]:
    """For each network, its tensors by Hugging Face's names, with the original's.

    Keys are `discriminator` and `generator`, as far as there is a head; else `encoder`. Variables
    that none of them reads are in none.
    """

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in variables)

    found = {}
    for part in [part for part, head in HEADS.items() if has(head)] or ["encoder"]:
        own = f"{part}/" if part == "generator" else "electra/"
        embeddings, encoder = (
            own if has(f"{own}{name}/") else "electra/" for name in ("embeddings", "encoder")
        )
        starts = (
            f"{embeddings}embeddings/",
            f"{encoder}embeddings_project/",
            f"{encoder}encoder/",
            *([HEADS[part]] if part in HEADS else []),
        )
        found[part] = {
            renamed(name, SPELLINGS): name for name in variables if name.startswith(starts)
        }
    return found


def config_of(tensors: Mapping[str, np.ndarray]) -> EncoderConfig:
    """The sizes of a network that its shapes tell; one head for every 64 of width (spec 1.1).

    Args:
      tensors: by Hugging Face's names.

    Raises:
      UserError: a table or kernel is missing, or there can be no such heads.
    """

    def shape(name: str) -> tuple[int, int]:
        tensor = tensors.get(f"electra.{name}.weight", np.zeros(()))
        if tensor.ndim != 2:
            raise UserError(f"there is no table or kernel for electra.{name}.weight")
        return tensor.shape

    vocab_size, embedding_size = shape("embeddings.word_embeddings")
    intermediate_size, hidden_size = shape("encoder.layer.0.intermediate.dense")
    heads = num_heads(hidden_size)
    if hidden_size % heads:
        raise UserError(f"the width is {hidden_size}; allowed: what a head for every 64 divides")
    sizes = {
        "vocab_size": vocab_size,
        "embedding_size": embedding_size,
        "hidden_size": hidden_size,
        "num_layers": sum(name.endswith(".intermediate.dense.weight") for name in tensors),
        "num_heads": heads,
        "intermediate_size": intermediate_size,
        "max_positions": shape("embeddings.position_embeddings")[0],
        "token_types": shape("embeddings.token_type_embeddings")[0],
    }
    return described(ENCODER, sizes, {})
