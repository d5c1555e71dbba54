"""Weights to start from, whoever made them: networks, and a reason for each tensor left out.

A source is a run directory of ours, a Hugging Face directory (ours or anyone's), or a checkpoint of
the original program.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from safetensors import SafetensorError, safe_open

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError, located
from electra_jax.files import read_json
from electra_jax.interop import huggingface, tensorflow1
from electra_jax.interop.layouts import HuggingFaceLayout, Layout, OurLayout
from electra_jax.interop.tokenizer_files import read_tokenizer
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders import ENCODERS, FIRST, encoder_class
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.heads import MaskedLMHead, ReplacedTokenHead
from electra_jax.modeling.params import Params
from electra_jax.objectives import networks
from electra_jax.run.workdir import chosen_step
from electra_jax.training.checkpoint import restore_params

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = {"discriminator": ReplacedTokenHead, "generator": MaskedLMHead}  # by part
Make = Callable[[EncoderConfig, nnx.Rngs], nnx.Module]
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5")  # other formats of the same weights


@dataclasses.dataclass(frozen=True)
class Network:
    """The tensors of an encoder, its embeddings and, mostly, a head.

    Attributes:
      head: makes the head, if pre-training has such a head.
      tensors: by their names in `layout`.
      origins: the name in the source of each tensor.
    """

    config: EncoderConfig
    head: Make | None
    layout: Layout
    tensors: dict[str, np.ndarray]
    origins: dict[str, str]

    def params(self, with_head: bool) -> Params:
        """Our parameters; UserError names the tensors that do not fit."""
        kind = encoder_class(self.config)
        modules = {"embeddings": kind.Embeddings, "encoder": kind}
        if with_head and self.head:
            modules["head"] = self.head
        made = nnx.eval_shape(
            lambda: {name: make(self.config, nnx.Rngs(0)) for name, make in modules.items()}
        )
        shapes = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in made.items()}
        of_head = self.layout.is_of_head
        tensors = {name: x for name, x in self.tensors.items() if with_head or not of_head(name)}
        return self.layout.params(tensors, shapes)


@dataclasses.dataclass(frozen=True)
class Source:
    """The weights in one place.

    Attributes:
      networks: by part, a key of `Naming.parts`.
      left_out: names of all other tensors, each with the reason why it is not used.
      tokenizer: None where there is no vocabulary beside the weights.
    """

    location: str
    networks: dict[str, Network]
    left_out: dict[str, str]
    tokenizer: Tokenizer | None

    def check_height(self) -> None:
        """Raises UserError if a word table and the vocabulary differ in size."""
        for part, network in self.networks.items():
            height = network.config.vocab_size
            if self.tokenizer and height != self.tokenizer.vocab_size:
                raise UserError(
                    f"{self.location}: the vocabulary has {self.tokenizer.vocab_size:,} tokens, "
                    f"but the word table of the {part} has {height:,} rows"
                )


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
    named = [path] if path.suffix == ".index" else [Path(f"{path}.index")]
    found = [file for file in named if file.is_file()] or sorted(path.glob("*.index"))
    if len(found) == 1:
        return _read_tensorflow(found[0].with_suffix(""))
    if found:
        raise UserError(
            f"{path}: there are {len(found)} checkpoints; name one, such as "
            f"{found[-1].with_suffix('')}"
        )
    for file in (path, *sorted(path.glob("*"))):
        if file.suffix in PICKLES and file.is_file():
            raise UserError(
                f"{file}: weights are read from safetensors, not from files that can run code; "
                f"save the model as {WEIGHTS}"
            )
    raise UserError(
        f"{path}: there are no weights; allowed: a run directory, a Hugging Face directory with "
        f"{WEIGHTS}, or a TensorFlow checkpoint"
    )


def _read_run(path: Path) -> Source:
    _, params = restore_params(path / "checkpoints", chosen_step(path))
    layout, found = OurLayout(), {}
    for part, network in parts_of(params).items():
        tensors = layout.tensors(network)
        owner = "discriminator" if part == "encoder" else part
        scope = f"{owner}/" if owner in params else ""
        origins = {name: f"{scope}{name}" for name in tensors}
        config = encoder_config(path / "config.json", params, part)
        found[part] = Network(config, HEADS.get(part), layout, tensors, origins)
    return Source(str(path), found, {}, tokenizers.load(path / "tokenizer"))


def parts_of(params: Params) -> dict[str, Params]:
    """The networks in the parameters of a run, by part.

    One with a head that is not in `HEADS` is an `encoder`.
    """
    if "encoder" in params:
        return {"encoder": params}
    parts = {}
    for part in ("discriminator", "generator"):
        if part in params:
            network = network_of(params, part)
            if part == "discriminator" and {*network["head"]} != {"dense", "output"}:
                part = "encoder"
            parts[part] = network
    return parts


def encoder_config(path: Path, params: Params, part: str) -> EncoderConfig:
    """The encoder of a part of a run with these parameters, by its `config.json`.

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
        main = networks.encoder(run.model, len(params["embeddings"]["word"]))
        is_main = part != "generator" or "discriminator" not in params
        return main if is_main else networks.generator(run, main)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the configuration of the run beside it ({error})") from error


def _read_huggingface(directory: Path) -> Source:
    path = directory / "config.json"
    content = read_json(path)
    with located(path):
        config = huggingface.from_config(content)
    naming = encoder_class(config).naming
    of_no_use = (*naming.without_a_place, *naming.dialects[content["model_type"]].without_a_place)
    tensors, origins, left_out = {}, {}, {}
    for file in _weight_files(directory):
        for name, tensor in _read_safetensors(file).items():
            theirs = huggingface.renamed(name, naming.spellings)
            if why := huggingface.reason(theirs, of_no_use):
                left_out[name] = why
            elif theirs not in tensors:
                tensors[theirs], origins[theirs] = tensor, name
            elif np.array_equal(tensor, tensors[theirs]):
                left_out[name] = f"the same as {origins[theirs]}"
            else:
                raise UserError(f"{file}: {name} and {origins[theirs]} are not the same")
    numbers = map(re.compile(r"\.layer\.(\d{1,9})\.").search, tensors)
    num_layers = max((int(number[1]) + 1 for number in numbers if number), default=0)
    if num_layers != config.num_layers:
        raise UserError(
            f"{path}: num_hidden_layers is {config.num_layers}, but the weights have "
            f"{num_layers} layers"
        )
    part = huggingface.part_of(tensors, naming)
    layout = HuggingFaceLayout(naming, part)
    network = Network(config, HEADS.get(part), layout, tensors, origins)
    return Source(str(directory), {part: network}, left_out, read_tokenizer(directory))


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    path = directory / WEIGHTS_INDEX
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{path}: names no files")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        if Path(name).name != name or not (directory / name).is_file():
            raise UserError(f"{path}: there is no file {name!r} beside it")
    return [directory / name for name in files]


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not readable as safetensors: {error}") from error


def _read_tensorflow(prefix: Path) -> Source:
    variables, left_out = tensorflow1.read(prefix)
    naming, found = ENCODERS[tensorflow1.ENCODER].naming, {}
    with located(f"{prefix}.index"):
        for part, origins in tensorflow1.networks(variables).items():
            tensors = {
                theirs: variables[name].T if name.endswith("/kernel") else variables[name]
                for theirs, name in origins.items()
            }
            config, layout = tensorflow1.config_of(tensors), HuggingFaceLayout(naming, part)
            found[part] = Network(config, HEADS.get(part), layout, tensors, origins)
        used = {name for network in found.values() for name in network.origins.values()}
        if unknown := grouped(name for name in variables if name not in used):
            raise UserError(f"not known: {', '.join(unknown)}")
    return Source(str(prefix), found, left_out, read_tokenizer(prefix.parent, 200))


def grouped(names: Iterable[str]) -> list[str]:
    """`names` with a star for the number of the layer, each once."""
    return list(dict.fromkeys(re.sub(r"(\blayer[._])\d+", r"\1*", name) for name in names))
