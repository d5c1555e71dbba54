"""What training starts from: an encoder for fine-tuning, or the networks of a pre-training run.

Nothing is left out in silence. `Pretrained.table` and the log say, for every tensor of the source
and every parameter of ours, where it goes or comes from.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.interop.source import Network, Source, grouped, read_source
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.params import Params, path_name
from electra_jax.objectives import Objective
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.training.step import stream

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


@dataclasses.dataclass(frozen=True)
class Use:
    """A network of a source, and for each of its tensors that is used, where it goes."""

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
    part = next(x for x in ("discriminator", "encoder", "generator") if x in source.networks)
    network = source.networks[part]
    params = load(source, part, with_head=False)
    check_height(source)
    use = Use(network, network.layout.paths(params))
    return Pretrained(network.config, params, source.tokenizer, [*table(source, [use])])


def load(source: Source, part: str, with_head: bool) -> Params:
    """Our parameters of a network, all there, or a UserError that names what is not."""
    try:
        return source.networks[part].params(with_head)
    except UserError as error:
        raise UserError(f"{source.location}: {error}") from None


def check_height(source: Source) -> None:
    """Raises UserError if a word table and the vocabulary differ in size."""
    for part, network in source.networks.items():
        height = network.config.vocab_size
        if source.tokenizer and height != source.tokenizer.vocab_size:
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
            if name in network.layout.tied:
                why = "the word table once more"
            elif targets and network.layout.is_of_head(name):
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
    objective: MaskedLanguageModel,
    tokenizer: Tokenizer,
    log: Callable[[str], None],
    *,
    init_from: str,
    init_missing: str,
    init_resize: str,
    seed: int,
) -> dict[str, np.ndarray]:
    """Parameters that a pre-training run starts from, by path; the others are initialized.

    Args:
      objective: of the run, and so its networks.
      tokenizer: of the run.
      log: receives the table and what is initialized.
      init_from: one source, or two with a comma between them, a network in each.
      init_missing: what becomes of a network or head that is in none: `error`, `initialize`, or
        `copy`, by which another network's encoder is taken for it.
      init_resize: lists tables whose rows may differ in number from the source's: `positions` keeps
        the first rows, `vocabulary` those of tokens that both vocabularies have; new rows are
        initialized.
      seed: of the run.

    Raises:
      UserError: something is missing, unknown, or of another size than the configuration says.
    """
    sources = [read_source(location.strip()) for location in init_from.split(",")]
    paths = jax.tree.map_with_path(lambda path, _: path_name(path), objective.structure())
    wanted = [name for name in NETWORKS if name in paths]
    resize = init_resize.split(",")
    fresh = functools.partial(initialized, objective, seed)
    loaded: dict[str, np.ndarray] = {}
    uses = []
    for name, (source, part) in assigned(sources, wanted, init_from, init_missing).items():
        check_vocabulary(source, tokenizer, resize)
        fields = GENERATOR_FIELDS if name != wanted[0] else {}
        check_sizes(source, part, name, getattr(objective.model, name), fields, resize)
        network, params = source.networks[part], load(source, part, with_head=part == name)
        targets = network.layout.paths(params)
        own = {part: network_of(paths, name)[part] for part in params}
        if "positions" in resize:
            resize_positions(params, own, source, fresh, log)
        if "vocabulary" in resize:
            resize_vocabulary(params, own, source, tokenizer, fresh, log)
        for path, value in zip(jax.tree.leaves(own), jax.tree.leaves(params), strict=True):
            if not np.array_equal(loaded.setdefault(path, value), value):
                raise UserError(
                    f"config.init_from: {path} is one for both networks, but differs between those "
                    f"of {init_from}; config.generator.sharing = 'none' has one for each"
                )
        whole = {path_name(path): whole for path, whole in jax.tree.leaves_with_path(own)}
        uses.append(Use(network, {tensor: whole[path] for tensor, path in targets.items()}))
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
    sources: list[Source], wanted: list[str], init_from: str, init_missing: str
) -> dict[str, tuple[Source, str]]:
    """For each network of the run that starts from weights, the source and the part of it.

    A part that is not the network itself gives its embeddings and encoder.

    Args:
      wanted: the networks of the run, the one that is kept first.
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
    missing = [name for name in wanted if name not in places]
    if missing and init_missing == "error":
        raise UserError(
            f"config.init_from = {init_from!r} holds {' and '.join(places)}, but no "
            f"{' and no '.join(missing)}; config.init_missing says what to do: 'initialize', or "
            "'copy' to take the encoder that is there"
        )
    uses = {name: places[name] for name in wanted if name in places}
    if init_missing == "copy":
        other = next(places[place] for place in ("encoder", *NETWORKS) if place in places)
        uses |= dict.fromkeys(missing, other)
    elif wanted[0] in missing and "encoder" in places:
        uses = {wanted[0]: places["encoder"]} | uses
    if not uses:
        raise UserError(
            f"config.init_from = {init_from!r} holds {' and '.join(places)}, of which "
            "nothing would be used; allowed: config.init_missing = 'copy'"
        )
    return {name: uses[name] for name in wanted if name in uses}


def check_sizes(
    source: Source,
    part: str,
    name: str,
    wanted: EncoderConfig,
    fields: Mapping[str, str],
    resize: list[str],
) -> None:
    """Raises UserError where a network is not of the size that the configuration gives.

    Args:
      name: of the network in the run.
      fields: the settings that decide its sizes, where these are not those of `config.model`.
    """
    theirs = source.networks[part].config
    fields = {"vocab_size": "data.vocab", **fields}
    free = {"positions": "max_positions", "vocabulary": "vocab_size"}
    free = {free[name] for name in resize if name}
    problems = [
        f"{size} is {getattr(theirs, size, None)} there and {value} here "
        f"(config.{fields.get(size, f'model.{size}')})"
        for size, value in wanted.sizes().items()
        if getattr(theirs, size, None) != value and size not in free
    ]
    if problems:
        raise UserError(
            f"config.init_from: the {part} of {source.location} is not the configuration's "
            f"{name}: {'; '.join(problems)}"
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
    theirs = params["embeddings"].get("position")
    if theirs is None:
        raise UserError("config.init_resize is 'positions', but the encoder has no such table")
    table = fresh(paths["embeddings"]["position"]).copy()
    kept = min(len(table), len(theirs))
    table[:kept] = theirs[:kept]
    params["embeddings"]["position"] = table
    log(
        f"positions: the first {kept:,} rows are those of {source.location}, "
        f"{len(table) - kept:,} are initialized, {len(theirs) - kept:,} of the source are left out"
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
