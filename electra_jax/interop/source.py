"""Weights to start from, whoever made them: networks, and a reason for all that is left out.

A source is a run directory of ours, a Hugging Face directory (ours or anyone's), or a checkpoint of
the original program.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from safetensors import SafetensorError, safe_open

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import read_json
from electra_jax.interop import huggingface, tensorflow1
from electra_jax.interop.layouts import HuggingFaceLayout, Layout, OurLayout
from electra_jax.interop.tensor_bundle import Entry, read_index
from electra_jax.interop.tokenizer_files import read_tokenizer
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders import ENCODERS, FIRST, encoder_class
from electra_jax.modeling.encoders.base import EncoderConfig, num_heads
from electra_jax.modeling.heads import MaskedLMHead, ReplacedTokenHead
from electra_jax.modeling.params import Params, by_path
from electra_jax.objectives import networks
from electra_jax.run.workdir import chosen_step
from electra_jax.training.checkpoint import restore_params

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = {"discriminator": ReplacedTokenHead, "generator": MaskedLMHead}  # by part
Make = Callable[[EncoderConfig, nnx.Rngs], nnx.Module]
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5")  # other formats of the same weights


@dataclasses.dataclass(frozen=True)
class Network:
    """An encoder with its embeddings and, mostly, a head.

    Attributes:
      head: makes the head, if it is one of pre-training's.
      layout: says what the tensors are.
      tensors: by their names in the layout.
      origins: for each of them, its name in the source.
    """

    config: EncoderConfig
    head: Make | None
    layout: Layout
    tensors: dict[str, np.ndarray]
    origins: dict[str, str]

    def params(self, with_head: bool) -> Params:
        """Our parameters.

        Raises:
          UserError: names the tensors that are not as they should be.
        """
        of_head = self.layout.is_of_head
        tensors = {name: x for name, x in self.tensors.items() if with_head or not of_head(name)}
        return self.layout.params(tensors, structure(self.config, self.head if with_head else None))


@dataclasses.dataclass(frozen=True)
class Source:
    """What a place holds.

    Attributes:
      networks: by part, a key of `Naming.parts`.
      left_out: names of all other tensors, and why they are not used.
      tokenizer: None where there is no vocabulary beside the weights.
    """

    location: str
    networks: dict[str, Network]
    left_out: dict[str, str]
    tokenizer: Tokenizer | None


def structure(config: EncoderConfig, head: Make | None) -> Params:
    """Shapes of `{"embeddings", "encoder", "head"}`, without head if there is none."""

    def shapes(module: Make) -> Params:
        return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: module(config, nnx.Rngs(0)))))

    kind = encoder_class(config)
    modules = {"embeddings": kind.Embeddings, "encoder": kind} | ({"head": head} if head else {})
    return {name: shapes(module) for name, module in modules.items()}


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
    configs, layout = encoder_configs(path / "config.json", params), OurLayout()
    parts = {}
    for part, network in parts_of(params).items():
        tensors = layout.tensors(network)
        origins = {name: f"{part}/{name}" for name in tensors}
        parts[part] = Network(configs[part], HEADS.get(part), layout, tensors, origins)
    left_out = {}
    if "encoder" in parts:
        own = params if "encoder" in params else params["discriminator"]
        prefix = "" if own is params else "discriminator/"
        left_out = {
            f"{prefix}head/{name}": "a head of another kind" for name in by_path(own["head"])
        }
    return Source(str(path), parts, left_out, tokenizers.load(path / "tokenizer"))


def parts_of(params: Params) -> dict[str, Params]:
    """The networks in the parameters of a run, by part; without a head that is not in `HEADS`."""
    if "encoder" in params:
        return {"encoder": {name: params[name] for name in ("embeddings", "encoder")}}
    parts = {}
    for part in ("discriminator", "generator"):
        if part in params:
            network = network_of(params, part)
            if part == "discriminator" and {*network["head"]} != {"dense", "output"}:
                del network["head"]
                part = "encoder"
            parts[part] = network
    return parts


def encoder_configs(path: Path, params: Params) -> dict[str, EncoderConfig]:
    """For each part of a run with these parameters, what its `config.json` says of its encoder.

    Settings that are newer than the run have their default.
    """
    run = ConfigDict(read_json(path))
    try:
        name = run.model.get("encoder") or FIRST
        newer = {
            field.name: field.default
            for field in dataclasses.fields(ENCODERS[name].Config)
            if field.default is not dataclasses.MISSING
        }
        run.model = ConfigDict({**newer, "init_stddev": 0.02, **run.model, "encoder": name})
        vocab_size = len(params["embeddings"]["word"])
        main = networks.encoder(run.model, vocab_size)
        if "discriminator" not in params or "generator" not in params:
            return dict.fromkeys(("encoder", "discriminator", "generator"), main)
        other = networks.generator(run, main)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the configuration of the run beside it ({error})") from error
    return {"encoder": main, "discriminator": main, "generator": other}


def _read_huggingface(directory: Path) -> Source:
    path = directory / "config.json"
    content = read_json(path)
    try:
        config = huggingface.from_config(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    naming = encoder_class(config).naming
    tensors, origins, left_out = {}, {}, {}
    for file in _weight_files(directory):
        for name, tensor in _read_safetensors(file).items():
            theirs = huggingface.canonical(name, naming)
            why = huggingface.without_a_place(theirs, naming, content["model_type"])
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
    part = huggingface.part_of(tensors, naming)
    layout = HuggingFaceLayout(naming, part)
    network = Network(config, HEADS.get(part), layout, tensors, origins)
    return Source(str(directory), {part: network}, left_out, read_tokenizer(directory))


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
    parts = {}
    for part, origins in found.items():
        tensors = {theirs: _tensorflow_tensor(name, entries) for theirs, name in origins.items()}
        layout = HuggingFaceLayout(ENCODERS[tensorflow1.ENCODER].naming, part)
        config = _tensorflow_config(prefix, tensors)
        parts[part] = Network(config, HEADS.get(part), layout, tensors, origins)
    return Source(str(prefix), parts, left_out, read_tokenizer(prefix.parent, 200))


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
    return huggingface.described(tensorflow1.ENCODER, sizes, {})


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
