"""What training starts from: an encoder for fine-tuning, or the networks of a pre-training run.

Nothing is left out in silence. `Pretrained.table` and the log say where every tensor of the source
goes, and which of our parameters come from none.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError, located
from electra_jax.interop.source import Network, Source, grouped, read_source
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.params import Params, by_path, path_name
from electra_jax.objectives import Objective
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.training.step import stream

Fresh = Callable[[str], np.ndarray]  # the initialized parameter at a path, the caller's own
Log = Callable[[str], None]
Targets = dict[str, str]  # for each tensor that is used, the path of the parameter that it goes to

NETWORKS = ("discriminator", "generator")
# The settings that decide the sizes of a generator beside a discriminator; the others are those of
# `config.model` with the same name.
GENERATOR_FIELDS = {
    "hidden_size": "generator.width",
    "num_layers": "generator.depth",
    "num_heads": "generator.width",
    "intermediate_size": "generator.width",
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
    part = next(x for x in ("discriminator", "encoder", "generator") if x in source.networks)
    network = source.networks[part]
    with located(location):
        params = network.params(with_head=False)
    source.check_height()
    lines = table(source, [(network, network.layout.paths(params))])
    return Pretrained(network.config, params, source.tokenizer, lines)


def table(source: Source, uses: Sequence[tuple[Network, Targets]]) -> list[str]:
    """A line for every tensor of the source; layers share one.

    Args:
      uses: networks, of this source or another, and what becomes of their tensors.
    """
    used: dict[str, dict[str, None]] = {}  # by names in the source
    unused = dict(source.left_out)
    for part, network in source.networks.items():
        targets = [targets for other, targets in uses if other is network]
        for name, origin in network.origins.items():
            found = [paths[name] for paths in targets if name in paths]
            used.setdefault(origin, {}).update(dict.fromkeys(found))
            if name in network.layout.tied:
                unused[origin] = "the word table once more"
            elif targets and network.layout.is_of_head(name):
                unused[origin] = "a head that is not needed here"
            else:
                unused.setdefault(origin, f"the {part} is not needed here")
    lines = [
        f"{origin} -> {', '.join(used.get(origin) or [f'not used: {unused[origin]}'])}"
        for origin in {**used, **unused}
    ]
    return grouped(lines)


def load_networks(
    config: ConfigDict, objective: MaskedLanguageModel, tokenizer: Tokenizer, log: Log
) -> dict[str, np.ndarray]:
    """Parameters that a pre-training run starts from, by path; the others are initialized.

    `config.init_from` is one source, or two with a comma between them, a network in each. What
    becomes of a network or head that is in none, `config.init_missing` says: `error`, `initialize`,
    or `copy`, by which another network's encoder is taken for it. `config.generator.init_from` is a
    source of the generator alone.

    `config.init_resize` lists tables whose rows may differ in number from the source's: `positions`
    keeps the first rows, `vocabulary` those of tokens that both vocabularies have; new rows are
    initialized.

    Args:
      objective: of the run, and so its networks.
      tokenizer: of the run.
      log: receives the table and what is initialized.

    Raises:
      UserError: something is missing, unknown, or of another size than the configuration says.
    """
    paths = jax.tree.map_with_path(lambda path, _: path_name(path), objective.structure())
    networks = [name for name in NETWORKS if name in paths]
    resize = config.init_resize.split(",")
    fresh = functools.partial(initialized, objective, config.seed)
    sources = [read_source(name.strip()) for name in config.init_from.split(",") if name]
    own = config.generator.init_from
    wanted = [name for name in networks if not own or name != "generator"]
    chosen = assigned(config, sources, wanted) if sources else {}
    if own:
        sources.append(read_source(own))
        chosen["generator"] = sources[-1], "generator"
        if "generator" not in sources[-1].networks:
            raise UserError(f"config.generator.init_from is {own!r}, where there is no generator")
    loaded: dict[str, np.ndarray] = {}
    uses = []
    for name, (source, part) in chosen.items():
        network = source.networks[part]
        check_vocabulary(source, tokenizer, resize)
        fields = GENERATOR_FIELDS if name != networks[0] else {}
        with located(f"{source.location}: {part} for {name}"):
            check_sizes(network.config, getattr(objective.model, name), fields, resize)
            params = network.params(with_head=part == name)
        places = {part: network_of(paths, name)[part] for part in params}
        if "positions" in resize:
            log(resize_positions(params, places, source, fresh))
        if "vocabulary" in resize:
            log(resize_vocabulary(params, places, source, tokenizer, fresh))
        places = by_path(places)
        for path, value in by_path(params).items():
            if not np.array_equal(loaded.setdefault(places[path], value), value):
                raise UserError(
                    f"{places[path]} is one for both networks, but that of {source.location} "
                    "differs from the other network's; config.generator.sharing = 'none' has one "
                    "for each"
                )
        targets = network.layout.paths(params)
        uses.append((network, {tensor: places[path] for tensor, path in targets.items()}))
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
    config: ConfigDict, sources: list[Source], wanted: list[str]
) -> dict[str, tuple[Source, str]]:
    """For each network that starts from `config.init_from`, the source and the part of it.

    A part that is not the network itself gives its embeddings and encoder.

    Args:
      wanted: the networks that need weights, the main one first.
    """
    places: dict[str, tuple[Source, str]] = {}
    for source in sources:
        for part in source.networks:
            place = part if part in NETWORKS else "encoder"
            if place in places:
                raise UserError(
                    f"config.init_from: {places[place][0].location} and {source.location} both "
                    f"hold a network of the kind {place!r}; name one of them"
                )
            places[place] = source, part
    where = f"config.init_from = {config.init_from!r} holds {' and '.join(places)}"
    missing = [name for name in wanted if name not in places]
    if missing and config.init_missing == "error":
        raise UserError(
            f"{where}, but no {' and no '.join(missing)}; config.init_missing says what to do: "
            "'initialize', or 'copy' to take the encoder that is there"
        )
    if config.init_missing == "copy":
        other = next(places[place] for place in ("encoder", *NETWORKS) if place in places)
        places |= dict.fromkeys(missing, other)
    elif wanted[0] in missing and "encoder" in places:
        places[wanted[0]] = places["encoder"]
    uses = {name: places[name] for name in wanted if name in places}
    if not uses:
        raise UserError(
            f"{where}, of which nothing would be used; allowed: config.init_missing = 'copy'"
        )
    return uses


def check_sizes(
    theirs: EncoderConfig, wanted: EncoderConfig, fields: dict[str, str], resize: list[str]
) -> None:
    """Raises UserError where a network is not of the size that the configuration gives.

    Args:
      fields: the settings that decide its sizes, where these are not those of `config.model`.
    """
    fields = {"vocab_size": "data.vocab", **fields}
    free = {"max_positions": "positions", "vocab_size": "vocabulary"}
    problems = [
        f"{size} is {getattr(theirs, size, None)} there and {value} here "
        f"(config.{fields.get(size, f'model.{size}')})"
        for size, value in wanted.sizes().items()
        if getattr(theirs, size, None) != value and free.get(size) not in resize
    ]
    if problems:
        raise UserError("; ".join(problems))


def check_vocabulary(source: Source, tokenizer: Tokenizer, resize: list[str]) -> None:
    """Raises UserError where ids would not mean the same, unless rows are matched by token."""
    theirs, where = source.tokenizer, source.location
    if "vocabulary" in resize:
        if theirs is None:
            raise UserError(
                f"{where}: there is no vocabulary, which config.init_resize needs to match its "
                "rows by token"
            )
        return
    source.check_height()
    if theirs is None:
        return
    problems = [
        f"{name} is {theirs.settings[name]!r} there and {tokenizer.settings[name]!r} here"
        for name in ("special_tokens", "lower_case", "strip_accents")
        if theirs.settings[name] != tokenizer.settings[name]
    ]
    if theirs.vocab != tokenizer.vocab:
        pairs = enumerate(zip(theirs.vocab, tokenizer.vocab, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), "the end")
        problems.append(f"from token {place} on it is not the vocabulary of config.data")
    if problems:
        raise UserError(
            f"{where}: the vocabulary does not fit: {'; '.join(problems)}; allowed: config.data."
            "vocab, special_tokens, lower_case and strip_accents as there, or config.init_resize = "
            "'vocabulary', which matches rows by token"
        )


def resize_positions(params: Params, paths: Params, source: Source, fresh: Fresh) -> str:
    """Cuts the position table, or lengthens it by initialized rows, in place; a line for the log.

    Args:
      paths: of `params` in the run.
    """
    if "position" not in params["embeddings"]:
        raise UserError("config.init_resize is 'positions', but the encoder has no such table")
    theirs = params["embeddings"]["position"]
    table = params["embeddings"]["position"] = fresh(paths["embeddings"]["position"])
    kept = min(len(table), len(theirs))
    table[:kept] = theirs[:kept]
    return (
        f"positions: the first {kept:,} rows are those of {source.location}, "
        f"{len(table) - kept:,} are initialized, {len(theirs) - kept:,} of the source are left out"
    )


def resize_vocabulary(
    params: Params, paths: Params, source: Source, tokenizer: Tokenizer, fresh: Fresh
) -> str:
    """Brings word table and output bias into the order of `tokenizer`, as `resize_positions`.

    Special tokens are matched by what they are for, not by their names.
    """
    ids = {token: i for i, token in enumerate(source.tokenizer.vocab)}
    ids |= {
        tokenizer.vocab[ours]: theirs
        for ours, theirs in zip(tokenizer.special_ids, source.tokenizer.special_ids, strict=True)
    }
    height = len(params["embeddings"]["word"])
    rows = [(i, ids[token]) for i, token in enumerate(tokenizer.vocab) if token in ids]
    ours, theirs = map(list, zip(*[(i, j) for i, j in rows if j < height], strict=True))
    for module, leaf in (("embeddings", "word"), ("head", "bias")):
        if leaf in params.get(module, {}):
            table = fresh(paths[module][leaf])
            table[ours] = params[module][leaf][theirs]
            params[module][leaf] = table
    return (
        f"vocabulary: {len(ours):,} rows are those of the same tokens in {source.location}, "
        f"{tokenizer.vocab_size - len(ours):,} are initialized, {height - len({*theirs}):,} of the "
        "source are left out"
    )


def initialized(objective: Objective, seed: int, path: str) -> np.ndarray:
    """The parameter `path` of a run that starts without weights."""

    def parameter() -> jax.Array:
        leaves = jax.tree.leaves_with_path(objective.init(stream(jax.random.key(seed), "init")))
        return next(leaf for place, leaf in leaves if path_name(place) == path)

    return np.array(jax.jit(parameter)())
