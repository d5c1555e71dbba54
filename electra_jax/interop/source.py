"""Weights to start from, whoever made them: read, and named in one way.

A source is a run directory of ours, a Hugging Face directory (ours or anyone's, ELECTRA or BERT),
or a checkpoint of the original program. Whatever it is, what comes out are networks with
Hugging Face's names, and a reason for everything that is left out.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import read_json
from electra_jax.interop import huggingface, tensorflow1
from electra_jax.interop.tensor_bundle import Entry, read_index
from electra_jax.interop.tokenizer_files import read_tokenizer
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders.base import EncoderConfig, num_heads
from electra_jax.modeling.params import Params, path_name
from electra_jax.run.workdir import chosen_step
from electra_jax.training.checkpoint import restore_params

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5")  # other formats of the same weights


@dataclasses.dataclass(frozen=True)
class Network:
    """A tower with its head.

    Attributes:
      config: its sizes.
      tensors: by Hugging Face's names for ELECTRA.
      origins: for each of them, its name in the source.
    """

    config: EncoderConfig
    tensors: dict[str, np.ndarray]
    origins: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a place holds.

    Attributes:
      networks: by part, a key of `huggingface.PARTS`.
      left_out: names of all other tensors, and why they are not used.
      tokenizer: None where there is no vocabulary beside the weights.
    """

    location: str
    networks: dict[str, Network]
    left_out: dict[str, str]
    tokenizer: Tokenizer | None


def read_source(location: str) -> Source:
    """Reads the weights at `location`.

    Args:
      location: a run directory; a Hugging Face directory; or the files of a TensorFlow checkpoint,
        by what their names start with or by a directory that holds one, with its `vocab.txt`.

    Raises:
      UserError: there is none of these, or a file is damaged, or holds what we have no name for.
    """
    path = Path(location).expanduser()
    if (path / "checkpoints").is_dir():
        return _read_run(path)
    if (path / WEIGHTS).is_file() or (path / WEIGHTS_INDEX).is_file():
        return _read_huggingface(path)
    if path.is_file() and path.suffix == ".index":
        path = path.with_suffix("")
    if Path(f"{path}.index").is_file():
        return _read_tensorflow(path)
    if path.is_dir() and any(path.glob("*.index")):
        return _read_tensorflow(_only_checkpoint(path))
    raise _nothing_to_read(path)


def _nothing_to_read(path: Path) -> UserError:
    files = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    for file in files:
        if file.suffix in PICKLES:
            return UserError(
                f"{file}: weights are read from safetensors, not from files that can run code; "
                f"save the model as {WEIGHTS}"
            )
    return UserError(
        f"{path}: there are no weights; allowed: a run directory, a Hugging Face directory with "
        f"{WEIGHTS}, or a TensorFlow checkpoint"
    )


def _read_run(path: Path) -> Source:
    _, params = restore_params(path / "checkpoints", chosen_step(path))
    rates = rates_of(read_json(path / "config.json"))
    networks = {}
    for part, tower in parts_of(params).items():
        tensors = huggingface.to_huggingface(tower, part)
        paths = huggingface.parameter_of(tower, part)
        origins = {name: f"{part}/{paths[name]}" for name in tensors}
        networks[part] = Network(config_of(tower, rates), tensors, origins)
    left_out = {}
    if "encoder" in networks:
        own = params if "encoder" in params else params["discriminator"]
        prefix = "" if own is params else "discriminator/"
        left_out = {
            f"{prefix}head/{path_name(path)}": "a head of another kind"
            for path, _ in jax.tree.leaves_with_path(own["head"])
        }
    return Source(str(path), networks, left_out, tokenizers.load(path / "tokenizer"))


def parts_of(params: Params) -> dict[str, Params]:
    """The towers in the parameters of a run, by part; without a head that no part has."""
    if "encoder" in params:
        return {"encoder": {name: params[name] for name in ("embeddings", "encoder")}}
    towers = {}
    for part in ("discriminator", "generator"):
        if part in params:
            tower = network_of(params, part)
            if part == "discriminator" and {*tower["head"]} != {"dense", "output"}:
                del tower["head"]  # it predicts words: `replace_mlm`, `all_tokens_mlm`
                part = "encoder"
            towers[part] = tower
    return towers


def rates_of(run: Mapping[str, Any]) -> dict[str, float]:
    """What a run's configuration says of dropout and initial weights."""
    model = run.get("model", {})
    return {name: model[name] for name in huggingface.RATES if name in model}


def config_of(params: Params, rates: Mapping[str, float]) -> EncoderConfig:
    """The sizes of a tower, from the shapes of its parameters, with these rates of dropout."""
    embeddings, layers = params["embeddings"], params["encoder"]["layers"]
    num_layers, hidden_size, _, num_heads, _ = layers["attention"]["qkv"]["kernel"].shape
    vocab_size, embedding_size = embeddings["word"].shape
    sizes = {
        "vocab_size": vocab_size,
        "embedding_size": embedding_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "intermediate_size": layers["up"]["kernel"].shape[-1],
        "max_positions": len(embeddings["position"]),
        "token_types": len(embeddings["token_type"]),
    }
    return huggingface.sized(sizes, rates)


def _read_huggingface(directory: Path) -> Source:
    path = directory / "config.json"
    content = read_json(path)
    try:
        config = huggingface.from_config(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    tensors, origins, left_out = {}, {}, {}
    for file in _weight_files(directory):
        for name, tensor in _read_safetensors(file).items():
            theirs = huggingface.canonical(name)
            why = huggingface.without_a_place(theirs)
            if content["model_type"] == "bert" and re.match(r"(classifier|qa_outputs)\.", theirs):
                why = "a fine-tuned head of BERT's"
            if why is None and theirs in tensors:
                if not np.array_equal(tensor, tensors[theirs]):
                    raise UserError(f"{file}: {name} and {origins[theirs]} are not the same")
                why = f"the same as {origins[theirs]}"
            if why:
                left_out[name] = why
            else:
                tensors[theirs], origins[theirs] = tensor, name
    numbers = [int(x[1]) for x in map(re.compile(r"\.layer\.(\d{1,9})\.").search, tensors) if x]
    if max(numbers, default=-1) + 1 != config.num_layers:
        raise UserError(
            f"{path}: num_hidden_layers is {config.num_layers}, but the weights have "
            f"{max(numbers, default=-1) + 1} layers"
        )
    part = huggingface.part_of(tensors)
    return Source(
        str(directory),
        {part: Network(config, tensors, origins)},
        left_out,
        read_tokenizer(directory),
    )


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    path = directory / WEIGHTS_INDEX
    names = read_json(path).get("weight_map", {})
    files = sorted({str(name) for name in names.values()}) if isinstance(names, dict) else []
    for name in files:
        if Path(name).name != name or not (directory / name).is_file():
            raise UserError(f"{path}: there is no file {name!r} beside it")
    if not files:
        raise UserError(f"{path}: names no files")
    return [directory / name for name in files]


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not readable as safetensors: {error}") from error


def _read_tensorflow(prefix: Path) -> Source:
    entries = read_index(prefix)
    found = tensorflow1.networks(entries)
    used = {name for names in found.values() for name in names.values()}
    left_out = {name: tensorflow1.no_weight(name) for name in entries if name not in used}
    unknown = [name for name, why in left_out.items() if why is None]
    if unknown:
        raise UserError(f"{prefix}.index: not known: {', '.join(grouped(unknown))}")
    networks = {}
    for part, origins in found.items():
        tensors = {theirs: _tensorflow_tensor(name, entries) for theirs, name in origins.items()}
        networks[part] = Network(_tensorflow_config(prefix, tensors), tensors, origins)
    return Source(str(prefix), networks, left_out, read_tokenizer(prefix.parent, 200))


def _tensorflow_tensor(name: str, entries: Mapping[str, Entry]) -> np.ndarray:
    tensor = entries[name].read()
    return tensor.T if name.endswith("/kernel") else tensor


def _tensorflow_config(prefix: Path, tensors: Mapping[str, np.ndarray]) -> EncoderConfig:
    """The sizes that a checkpoint's shapes tell; heads are one for every 64 of width (spec 1.1)."""
    embeddings, layer = "electra.embeddings.", "electra.encoder.layer.{}."
    tables = [
        f"{embeddings}{name}_embeddings.weight" for name in ("word", "position", "token_type")
    ]
    query, up = f"{layer}attention.self.query.weight", f"{layer}intermediate.dense.weight"
    num_layers = 0
    while query.format(num_layers) in tensors:
        num_layers += 1
    for name in (*tables, query.format(0), up.format(0)):
        if tensors.get(name, np.zeros(())).ndim != 2:
            raise UserError(f"{prefix}.index: there is no table or kernel for {name}")
    (vocab_size, embedding_size), (max_positions, _), (token_types, _) = (
        tensors[name].shape for name in tables
    )
    hidden_size = tensors[query.format(0)].shape[1]
    heads = num_heads(hidden_size)
    if not heads or hidden_size % heads:
        raise UserError(
            f"{prefix}.index: the width is {hidden_size}, which one attention head for every 64 "
            "does not divide"
        )
    sizes = {
        "vocab_size": vocab_size,
        "embedding_size": embedding_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": heads,
        "intermediate_size": tensors[up.format(0)].shape[0],
        "max_positions": max_positions,
        "token_types": token_types,
    }
    return huggingface.sized(sizes, {})


def _only_checkpoint(directory: Path) -> Path:
    found = sorted(directory.glob("*.index"))
    if len(found) > 1:
        raise UserError(
            f"{directory}: there are {len(found)} checkpoints; name one, such as "
            f"{found[-1].with_suffix('')}"
        )
    return found[0].with_suffix("")


def grouped(names: Iterable[str]) -> list[str]:
    """`names` with a star for the number of the layer, each once."""
    return list(dict.fromkeys(re.sub(r"(\blayer[._])\d+", r"\1*", name) for name in names))
