"""What training starts from: an encoder for fine-tuning, or the networks of a pre-training run.

Nothing is left out in silence. `Pretrained.table` and the log say, for every tensor of the source
and every parameter of ours, where it goes or comes from.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.interop import huggingface
from electra_jax.interop.source import Network, Source, grouped, read_source
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.params import Params, path_name
from electra_jax.objectives import Objective
from electra_jax.training.step import stream

TOWERS = ("discriminator", "generator")

# What decides each size of a network in a pre-training run, for its discriminator and for a
# generator beside it.
MAIN_FIELDS = {
    "vocab_size": "config.data.vocab",
    "embedding_size": "config.model.embedding_size",
    "hidden_size": "config.model.hidden_size",
    "num_layers": "config.model.num_layers",
    "num_heads": "config.model.num_heads",
    "intermediate_size": "config.model.intermediate_size",
    "max_positions": "config.model.max_positions",
    "token_types": "always",
}
GENERATOR_FIELDS = MAIN_FIELDS | {
    "hidden_size": "config.generator.width",
    "num_layers": "config.generator.depth",
    "num_heads": "config.generator.width",
    "intermediate_size": "config.generator.width",
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """An encoder with its embeddings and its tokenizer.

    Attributes:
      params: `{"embeddings", "encoder"}`, float32 NumPy arrays.
      table: lines that say where every tensor of the source went.
    """

    encoder_config: EncoderConfig
    params: Params
    tokenizer: Tokenizer
    table: list[str]


@dataclasses.dataclass(frozen=True)
class Use:
    """A network of a source, and for each of its tensors that is used, the path of ours."""

    network: Network
    targets: dict[str, str]


def load_encoder(location: str) -> Pretrained:
    """The encoder at `location`: the discriminator's, or that of the only network there is.

    Args:
      location: see `source.read_source`.

    Raises:
      UserError: as `read_source`; or the vocabulary is missing or does not fit the word table; or
        parameters are missing or have another shape than `config.json` says, all by name.
    """
    source = read_source(location)
    if source.tokenizer is None:
        raise UserError(f"{location}: there is no vocabulary beside the weights")
    check_height(source)
    part = next(x for x in ("discriminator", "encoder", "generator") if x in source.networks)
    network = source.networks[part]
    params = load_tower(source, part, with_head=False)
    use = Use(network, huggingface.parameter_of(params, "encoder"))
    return Pretrained(network.config, params, source.tokenizer, [*table(source, [use])])


def load_tower(source: Source, part: str, with_head: bool) -> Params:
    """Our parameters of a network, all there, or a UserError that names what is not."""
    network = source.networks[part]
    wanted = part if with_head else "encoder"
    head = {} if with_head else head_names(network, part)
    tensors = {name: tensor for name, tensor in network.tensors.items() if name not in head}
    output = huggingface.PARTS[wanted].head.get("head/output", "")
    num_outputs = tensors.get(f"{output}.bias", np.zeros(0)).size
    like = huggingface.tower_structure(network.config, wanted, num_outputs)
    try:
        return huggingface.from_huggingface(tensors, like, wanted)
    except UserError as error:
        raise UserError(f"{source.location}: {error}") from None


def head_names(network: Network, part: str) -> set[str]:
    """The tensors of the head."""
    modules = huggingface.PARTS[part].head.values()
    return {name for name in network.tensors if name.rpartition(".")[0] in modules}


def check_height(source: Source) -> None:
    """Raises UserError where a word table has not one row for each token of the vocabulary."""
    for part, network in source.networks.items():
        word = network.tensors.get(huggingface.WORD_TABLE)
        height = None if word is None else len(word)
        if source.tokenizer and height not in (None, source.tokenizer.vocab_size):
            raise UserError(
                f"{source.location}: the vocabulary has {source.tokenizer.vocab_size:,} tokens, "
                f"but the word table of the {part} has {height:,} rows"
            )


def table(source: Source, uses: Iterable[Use]) -> Iterator[str]:
    """A line for every tensor of the source; layers share one."""
    rows: dict[str, dict[str, None]] = {}
    for part, network in source.networks.items():
        targets: dict[str, list[str]] = {}
        for use in uses:
            if use.network is network:
                for name, path in use.targets.items():
                    targets.setdefault(name, []).append(path)
        for name, origin in network.origins.items():
            if name == huggingface.TIED_OUTPUT:
                why = "the word table once more"
            elif targets and name in head_names(network, part):
                why = "a head that is not needed here"
            else:
                why = f"the {part} is not needed here"
            row = rows.setdefault(origin, {})
            for target in targets.get(name, [f"not used: {why}"]):
                row[target] = None
    for origin, why in source.left_out.items():
        rows[origin] = {f"not used: {why}": None}
    for origin, targets in rows.items():  # what one network leaves, another may use
        used = [target for target in targets if not target.startswith("not used")]
        rows[origin] = dict.fromkeys(used or targets)
    lines = (f"{origin} -> {', '.join(targets)}" for origin, targets in rows.items())
    yield from grouped(lines)


def load_networks(
    config: ConfigDict, objective: Objective, tokenizer: Tokenizer, log: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Parameters that a pre-training run starts from, by path; the others are initialized.

    Args:
      config: `init_from` names one source, or two with a comma between them, a network in each.
        `init_missing` says what becomes of a network or head that is in none: `error`,
        `initialize`, or `copy`, by which another network's encoder is taken for it. `init_resize`
        lists tables whose rows may differ in number from the source's: `positions` keeps the first
        rows, `vocabulary` those of tokens that both vocabularies have; new rows are initialized.
      tokenizer: of the run.
      log: receives the table and what is initialized.

    Raises:
      UserError: something is missing, unknown, or of another size than the configuration says.
    """
    sources = [read_source(location.strip()) for location in config.init_from.split(",")]
    structure = objective.structure()
    paths = jax.tree.map_with_path(lambda path, _: path_name(path), structure)
    fresh = functools.partial(initialized, objective, config.seed)
    loaded: dict[str, np.ndarray] = {}
    uses = []
    for tower, (source, part) in assigned(config, sources, structure).items():
        wanted = getattr(objective.model, tower)
        resize = config.init_resize.split(",")
        check_vocabulary(source, tokenizer, resize)
        check_sizes(source, part, tower, wanted, objective.model.discriminator is None, resize)
        params = load_tower(source, part, with_head=part == tower)
        own = {name: network_of(paths, tower)[name] for name in params}
        if "positions" in resize:
            resize_positions(params, own, source, fresh, log)
        if "vocabulary" in resize:
            resize_vocabulary(params, own, source, tokenizer, fresh, log)
        for path, value in zip(jax.tree.leaves(own), jax.tree.leaves(params), strict=True):
            if not np.array_equal(loaded.setdefault(path, value), value):
                raise UserError(
                    f"config.init_from: {path} is one for both networks, but differs between those "
                    f"of {config.init_from}; config.generator.sharing = 'none' has one for each"
                )
        targets = huggingface.parameter_of(params, part if "head" in params else "encoder")
        whole = {path_name(path): name for path, name in jax.tree.leaves_with_path(own)}
        targets = {name: whole[path] for name, path in targets.items()}
        uses.append(Use(source.networks[part], targets))
    for source in sources:
        if source.tokenizer is None:
            log(f"warning: {source.location} has no vocabulary; only its size was compared")
        log(f"weights of {source.location}:")
        for line in table(source, uses):
            log(f"  {line}")
    rest = [path for path in jax.tree.leaves(paths) if path not in loaded]
    log(f"initialized: {', '.join(rest) or 'nothing'}")
    return loaded


def assigned(
    config: ConfigDict, sources: list[Source], structure: Params
) -> dict[str, tuple[Source, str]]:
    """For each network of the run that starts from weights, the source and the part of it.

    A part that is not the network itself gives its embeddings and encoder.
    """
    found: dict[str, tuple[Source, str]] = {}
    for source in sources:
        for part in source.networks:
            place = part if part in TOWERS else "encoder"
            if place in found:
                raise UserError(
                    f"config.init_from: {found[place][0].location} and {source.location} both hold "
                    f"a network of the kind {place!r}; name one of them"
                )
            found[place] = source, part
    wanted = [tower for tower in TOWERS if tower in structure]
    missing = [tower for tower in wanted if tower not in found]
    if missing and config.init_missing == "error":
        raise UserError(
            f"config.init_from = {config.init_from!r} holds {' and '.join(found)}, but no "
            f"{' and no '.join(missing)}; config.init_missing says what to do: 'initialize', or "
            "'copy' to take the encoder that is there"
        )
    uses = {tower: found[tower] for tower in wanted if tower in found}
    if config.init_missing == "copy":
        other = next(found[place] for place in ("encoder", *TOWERS) if place in found)
        uses |= {tower: other for tower in missing}
    elif wanted[0] in missing and "encoder" in found:
        uses = {wanted[0]: found["encoder"]} | uses
    if not uses:
        raise UserError(
            f"config.init_from = {config.init_from!r} holds {' and '.join(found)}, of which "
            "nothing would be used; allowed: config.init_missing = 'copy'"
        )
    return {tower: uses[tower] for tower in wanted if tower in uses}


def check_sizes(
    source: Source,
    part: str,
    tower: str,
    wanted: EncoderConfig,
    is_alone: bool,
    resize: list[str],
) -> None:
    """Raises UserError where a network is not of the size that the configuration gives.

    Args:
      is_alone: whether `tower` is the run's only network.
    """
    found = source.networks[part].config
    fields = MAIN_FIELDS if tower == "discriminator" or is_alone else GENERATOR_FIELDS
    free = {"positions": "max_positions", "vocabulary": "vocab_size"}
    free = {free[name] for name in resize if name}
    problems = [
        f"{name} is {getattr(found, name)} there and {getattr(wanted, name)} here ({field})"
        for name, field in fields.items()
        if getattr(found, name) != getattr(wanted, name) and name not in free
    ]
    if problems:
        raise UserError(
            f"config.init_from: the {part} of {source.location} is not the configuration's "
            f"{tower}: {'; '.join(problems)}"
        )


def check_vocabulary(source: Source, tokenizer: Tokenizer, resize: list[str]) -> None:
    """Raises UserError where ids would not mean the same, unless rows are matched by token."""
    theirs = source.tokenizer
    if "vocabulary" in resize:
        if theirs is None:
            raise UserError(
                f"{source.location}: there is no vocabulary, which config.init_resize needs to "
                "match its rows by token"
            )
        return
    check_height(source)
    if theirs is None:
        return
    advice = (
        f"give config.data.vocab = that of {source.location}, with config.data.special_tokens, "
        "config.data.lower_case and config.data.strip_accents as there, or match rows by token "
        "with config.init_resize = 'vocabulary'"
    )
    if theirs.vocab != tokenizer.vocab:
        pairs = enumerate(zip(theirs.vocab, tokenizer.vocab, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), "the end")
        raise UserError(
            f"config.init_from: the vocabulary of {source.location} is not that of config.data, "
            f"from token {place} on; {advice}"
        )
    for name in ("special_tokens", "lower_case", "strip_accents"):
        found, wanted = theirs.settings[name], tokenizer.settings[name]
        if found != wanted:
            raise UserError(
                f"config.init_from: {name} is {found!r} in {source.location}, but config.data."
                f"{name} is {wanted!r}; {advice}"
            )


def resize_positions(
    params: Params,
    paths: Params,
    source: Source,
    fresh: Callable[[str], np.ndarray],
    log: Callable[[str], None],
) -> None:
    """Cuts the position table, or lengthens it by initialized rows, in place."""
    found = params["embeddings"]["position"]
    table = fresh(paths["embeddings"]["position"]).copy()
    kept = min(len(table), len(found))
    table[:kept] = found[:kept]
    params["embeddings"]["position"] = table
    log(
        f"positions: the first {kept:,} rows are those of {source.location}, "
        f"{len(table) - kept:,} are initialized, {len(found) - kept:,} of the source are left out"
    )


def resize_vocabulary(
    params: Params,
    paths: Params,
    source: Source,
    tokenizer: Tokenizer,
    fresh: Callable[[str], np.ndarray],
    log: Callable[[str], None],
) -> None:
    """Brings the rows of the word table, and of the output's bias, into the order of `tokenizer`.

    Special tokens are matched by what they are for, not by their names.
    """
    ids = {token: i for i, token in enumerate(source.tokenizer.vocab)}
    ids |= {
        tokenizer.vocab[ours]: theirs
        for ours, theirs in zip(tokenizer.special_ids, source.tokenizer.special_ids, strict=True)
    }
    height = len(params["embeddings"]["word"])
    rows = [(i, ids[token]) for i, token in enumerate(tokenizer.vocab) if token in ids]
    rows = [(i, j) for i, j in rows if j < height]
    ours, theirs = map(list, zip(*rows, strict=True))

    def matched(tree: Params, names: Params, leaf: str) -> None:
        new = fresh(names[leaf]).copy()
        new[ours] = tree[leaf][theirs]
        tree[leaf] = new

    matched(params["embeddings"], paths["embeddings"], "word")
    if "bias" in params.get("head", {}):
        matched(params["head"], paths["head"], "bias")
    log(
        f"vocabulary: {len(rows):,} rows are those of the same tokens in {source.location}, "
        f"{tokenizer.vocab_size - len(rows):,} are initialized, {height - len({*theirs}):,} of the "
        "source are left out"
    )


def initialized(objective: Objective, seed: int, path: str) -> np.ndarray:
    """What a run without weights to start from would have as the parameter `path`."""

    def parameter() -> jax.Array:
        leaves = jax.tree.leaves_with_path(objective.init(stream(jax.random.key(seed), "init")))
        return next(leaf for place, leaf in leaves if path_name(place) == path)

    return jax.device_get(jax.jit(parameter)())
