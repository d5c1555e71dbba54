"""Every setting of pre-training, once: default, meaning, check, and if it may change on resume.

The defaults are the paper's ELECTRA-Small (spec 4.4). A recipe in `configs/` starts from
`get_config()` and states what differs; `--config.model.hidden_size=512` overrides one value. What
an encoder or an objective has beside these is said where it is defined, and joins `config.model` or
`config.loss`.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from electra_jax.errors import UserError
from electra_jax.modeling.electra import ElectraConfig
from electra_jax.modeling.encoder import REMAT_POLICIES, EncoderConfig
from electra_jax.modeling.heads import CopyHead, MaskedLMHead, ReplacedTokenHead
from electra_jax.modeling.precision import compute_dtype
from electra_jax.modeling.sizes import num_heads
from electra_jax.settings import (
    COUNT,
    FRACTION,
    GIVEN,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    SHARE,
    Check,
    Setting,
    check_values,
    field,
    flatten,
    one_of,
    setting,
    settings_of,
    to_config,
)

OBJECTIVES = ("electra", "electra_15", "replace_mlm", "all_tokens_mlm", "mlm")
SEED = Check(lambda x: 0 <= x < 2**32, "at least 0 and below 2**32")  # JAX drops higher bits
# With less, logits that it divides are no longer numbers.
TEMPERATURE = Check(lambda x: 1e-3 <= x < math.inf, "at least 0.001")
FIVE_NAMES = Check(
    lambda x: len({*x}) == len(x) == 5 and all(isinstance(y, str) and y for y in x),
    "five different names: padding, unknown, start, end, mask",
)
STEPS = Check(
    lambda x: not x or (len(x) == 2 and all(type(y) is int for y in x) and 1 <= x[0] <= x[1]),
    "(), or the first and the last step, such as (10, 14)",
)
IF_INSTALLED = Check(
    lambda x: not x or importlib.util.find_spec("wandb") is not None,
    "'' as long as wandb is not installed: pip install '.[wandb]'",
)
DEVICES = Check(lambda x: x == -1 or x >= 1, "at least 1, or -1 for all devices left")


# What pre-training and fine-tuning share


@dataclasses.dataclass(frozen=True)
class Loading:
    """How batches are built ahead of the step."""

    num_threads: int = setting(2, "threads that build batches", COUNT, free=True)
    num_workers: int = setting(0, "processes that do so instead; 0: none", NOT_NEGATIVE, free=True)
    prefetch: int = setting(8, "batches built ahead", COUNT, free=True)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How a network computes, whatever its size."""

    dropout: float = setting(0.1, "of embeddings and of what layers add", RATE)
    attention_dropout: float = setting(0.1, "of attention probabilities", RATE)
    dtype: str = setting(
        "auto",
        "of activations; auto: bfloat16 on accelerators, float32 on CPU",
        one_of("auto", "float32", "bfloat16"),
    )
    remat: str = setting(
        "dots", "what the backward pass recomputes", one_of(*REMAT_POLICIES), free=True
    )
    scan_unroll: int = setting(
        1, "layers in one iteration of the loop; num_layers: no loop", COUNT, free=True
    )


@dataclasses.dataclass(frozen=True)
class Adam:
    """ELECTRA's optimizer, without its rate and schedule."""

    decay_power: float = setting(1.0, "1: linear to zero at the last step", POSITIVE)
    b1: float = setting(0.9, "decay of the first moments", RATE)
    b2: float = setting(0.999, "decay of the second moments", RATE)
    epsilon: float = setting(1e-6, "outside the root", POSITIVE)
    weight_decay: float = setting(0.01, "not of biases and norms", NOT_NEGATIVE)
    max_grad_norm: float = setting(1.0, "0: no clipping", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The mesh of devices, and how the step is carried there."""

    api: str = setting(
        "jit", "jit: any mesh; pmap: data parallel only", one_of("jit", "pmap"), free=True
    )
    data: int = setting(-1, "devices along this axis of the mesh", DEVICES, free=True)
    fsdp: int = setting(1, "likewise; it splits parameters, too", COUNT, free=True)
    tensor: int = setting(1, "likewise; it splits heads and feed-forward", COUNT, free=True)
    shard_optimizer: bool = setting(
        False, "split the optimizer's moments over data, too (ZeRO-1)", free=True
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """What every run has."""

    seed: int = setting(0, "of parameters, masks, samples, dropout, order of the data", SEED)
    num_microbatches: int = setting(1, "parts of a batch that gradients are added up over", COUNT)
    max_skipped_updates: int = setting(
        0, "in a row, where a loss or gradient is not finite; then stop", NOT_NEGATIVE, free=True
    )
    profile_steps: tuple = setting(
        (), "(first, last): these are profiled for TensorBoard's xprof", STEPS, free=True
    )
    histograms: bool = setting(
        False, "of parameters at every evaluation, for TensorBoard", free=True
    )
    wandb: str = setting(
        "", "project of Weights & Biases that gets the metrics, too", IF_INSTALLED, free=True
    )
    resume: str = setting(
        "same",
        "changed: go on with a configuration that is not the run's own",
        one_of("same", "changed"),
        free=True,
    )


# What only pre-training has


@dataclasses.dataclass(frozen=True)
class Data(Loading):
    """Text, vocabulary and rows: docs/data.md."""

    source: str = setting("docstrings", "or files, tfds:NAME, buckets", GIVEN)
    on_error: str = setting(
        "raise", "at what cannot be read; skip: count and go on", one_of("raise", "skip")
    )
    dir: str = setting("data", "token stores are kept below this directory", GIVEN, free=True)
    vocab: str = setting("", "vocab.txt or SentencePiece .model; empty: train one on the source")
    tokenizer: str = setting(
        "wordpiece", "of a vocabulary trained here", one_of("wordpiece", "unigram", "bpe")
    )
    vocab_size: int = setting(
        30522, "tokens of a vocabulary trained here", Check(lambda x: x >= 100, "at least 100")
    )
    special_tokens: tuple = setting(
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "in this order", FIVE_NAMES
    )
    lower_case: bool = setting(True, "of a vocabulary without a file that says so")
    strip_accents: bool = setting(True, "only together with lower_case")
    max_word_chars: int = setting(200, "longer words become [UNK]; WordPiece only", COUNT)
    held_out: float = setting(0.005, "share of the documents kept for evaluation", FRACTION)
    layout: str = setting(
        "packed",
        "packed: no padding to speak of; document: one piece a row; electra: the original's",
        one_of("packed", "document", "electra"),
    )
    sequence_length: int = setting(128, "tokens in a row", Check(lambda x: x >= 8, "at least 8"))


@dataclasses.dataclass(frozen=True)
class Model(Numerics):
    """Sizes of the network that is kept."""

    hidden_size: int = setting(256, "width of the states", COUNT)
    num_layers: int = setting(12, "depth", COUNT)
    embedding_size: int = setting(128, "width of the tables", COUNT)
    num_heads: int | None = setting(None, "default: one for every 64 of hidden_size", COUNT)
    intermediate_size: int | None = setting(None, "default: 4 * hidden_size", COUNT)
    max_positions: int = setting(512, "tokens in a row at most", COUNT)
    init_stddev: float = setting(0.02, "of initial weights", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Generator:
    """What proposes tokens: docs/objectives.md."""

    kind: str = setting(
        "learned", "what proposes tokens", one_of("learned", "frozen", "unigram", "uniform")
    )
    init_from: str = setting("", "run directory whose generator this one starts as")
    mle_steps: int = setting(
        0, "two_stage: updates of the first stage; adversarial: of warm-up by MLM", NOT_NEGATIVE
    )
    width: float = setting(0.25, "of hidden_size; heads and feed-forward follow", POSITIVE)
    depth: float = setting(1.0, "of num_layers", POSITIVE)
    sharing: str = setting(
        "embeddings",
        "with the discriminator; gdes: DeBERTaV3's",
        one_of("embeddings", "none", "all", "gdes"),
    )
    temperature: float = setting(1.0, "divides the logits before sampling", TEMPERATURE)
    temperature_start: float | None = setting(
        None, "at step 0; default: the same throughout", TEMPERATURE
    )
    disallow_correct: bool = setting(False, "never sample the original token")


@dataclasses.dataclass(frozen=True)
class Masking:
    """Which tokens are predicted, and what is shown in their place."""

    mode: str = setting(
        "clean", "faithful: the original's draws with replacement", one_of("clean", "faithful")
    )
    unit: str = setting(
        "token", "word: whole words; span: some in a row", one_of("token", "word", "span")
    )
    rate: float = setting(0.15, "share of the tokens that is predicted", FRACTION)
    mask_token_share: float = setting(0.85, "of these, shown to the generator as [MASK]", SHARE)
    random_token_share: float = setting(0.0, "of these, shown as a random token", SHARE)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Weights of the mean losses."""

    generator_weight: float = setting(1.0, "of the generator's", NOT_NEGATIVE)
    generator_weight_start: float | None = setting(
        None, "at step 0; default: the same throughout", NOT_NEGATIVE
    )
    discriminator_weight: float = setting(
        50.0, "of the discriminator's, whatever it is to predict", NOT_NEGATIVE
    )
    discriminator_weight_start: float | None = setting(
        None, "at step 0; default: the same throughout", NOT_NEGATIVE
    )


@dataclasses.dataclass(frozen=True)
class Optimizer(Adam):
    """Rate and schedule."""

    learning_rate: float = setting(5e-4, "at its peak", POSITIVE)
    warmup_steps: int = setting(10_000, "updates in which the rate grows", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Which states of the run are kept."""

    every_steps: int = setting(1000, "the last step is always saved", COUNT, free=True)
    keep: int = setting(5, "newest checkpoints kept", COUNT, free=True)
    keep_best: str = setting("", "also keep the best by this metric, e.g. eval/rtd_auc", free=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(Run):
    """A whole configuration."""

    task: str = setting("pretrain", "what is to be done", one_of("pretrain"))
    objective: str = setting("electra", "docs/objectives.md says what each is", one_of(*OBJECTIVES))
    algorithm: str = setting(
        "joint",
        "how the two networks are trained",
        one_of("joint", "two_stage", "adversarial"),
    )
    num_train_steps: int = setting(1_000_000, "updates", COUNT)
    init_from: str = setting("", "weights to start from, docs/interop.md; empty: random ones")
    init_missing: str = setting(
        "error",
        "what becomes of a network without weights",
        one_of("error", "initialize", "copy"),
    )
    init_resize: str = setting(
        "",
        "tables that may differ in length",
        one_of("", "positions", "vocabulary", "positions,vocabulary"),
    )
    batch_size: int = setting(128, "rows per update over all devices and hosts", COUNT)
    ramp_steps: int = setting(
        0, "updates in which what has a *_start goes from there to its own value", NOT_NEGATIVE
    )
    log_every_steps: int = setting(100, "a line and a point in the curves", COUNT, free=True)
    eval_every_steps: int = setting(
        10_000, "on all held-out rows; the last step is always evaluated", COUNT, free=True
    )
    data: Data
    model: Model
    generator: Generator
    masking: Masking
    loss: Loss
    optimizer: Optimizer
    parallel: Parallel
    checkpoint: Checkpoint


def settings() -> dict[str, Setting]:
    """Every setting of pre-training by its dotted name."""
    return settings_of(Pretraining)


def get_config() -> ConfigDict:
    """The complete default configuration, locked: unknown names are errors."""
    return to_config(settings())


BEST_METRICS = {  # and whether larger is better
    "eval/loss": False,
    "eval/mlm_loss": False,
    "eval/mlm_accuracy": True,
    "eval/rtd_loss": False,
    "eval/rtd_accuracy": True,
    "eval/rtd_auc": True,
    "eval/reconstruction_loss": False,
    "eval/reconstruction_accuracy": True,
}
DISCRIMINATOR_HEADS = {"replace_mlm": MaskedLMHead, "all_tokens_mlm": CopyHead}


def validate(config: ConfigDict, num_devices: int) -> None:
    """Check every value alone and those that only clash together.

    Raises:
      UserError: names the fields, what was found and what is allowed.
    """
    check_values(config, settings())
    for problem in (*clashes(config), *topology_clashes(config, num_devices)):
        raise UserError(problem)


def clashes(config: ConfigDict) -> Iterator[str]:
    """Sentences about values that do not fit each other."""
    model, generator, data = config.model, config.generator, config.data

    if data.sequence_length > model.max_positions:
        yield (
            f"config.data.sequence_length is {data.sequence_length} but the position table has "
            f"config.model.max_positions = {model.max_positions} rows"
        )
    heads = num_heads(model.hidden_size) if model.num_heads is None else model.num_heads
    if model.hidden_size % heads:
        yield (
            f"config.model.hidden_size is {model.hidden_size} and config.model.num_heads is {heads}"
            "; allowed: heads (by default one for every 64) that divide the hidden size"
        )
    for name, needs_full_size in (("objective", "mlm"), ("generator.sharing", "all")):
        full_size = (generator.width, generator.depth) == (1, 1)
        if field(config, name) == needs_full_size and not full_size:
            yield (
                f"config.{name} = {needs_full_size!r} needs config.generator.width = 1 and "
                f"config.generator.depth = 1, found {generator.width} and {generator.depth}"
            )
    if has_generator(config) and generator.sharing != "all":
        width, layers = generator_width(config), generator_layers(config)
        if width < 1 or width % num_heads(width):
            yield (
                f"config.generator.width is {generator.width}, which leaves {width} of "
                f"config.model.hidden_size = {model.hidden_size}; allowed: sizes that one "
                "attention head for every 64 divides, such as multiples of 64"
            )
        if layers < 1:
            yield (
                f"config.generator.depth is {generator.depth}, which leaves none of "
                f"config.model.num_layers = {model.num_layers}; allowed: at least 1 layer"
            )
    yield from training_clashes(config)
    if config.init_from and generator.sharing == "gdes":
        yield (
            "config.init_from does not go with config.generator.sharing = 'gdes', where the "
            "discriminator's embeddings are differences; leave one of them out"
        )
    if config.masking.mask_token_share + config.masking.random_token_share > 1:
        yield (
            "config.masking.mask_token_share and config.masking.random_token_share are "
            f"{config.masking.mask_token_share} and {config.masking.random_token_share}; "
            "allowed: at most 1 together"
        )
    if config.masking.mode == "faithful" and config.masking.unit != "token":
        yield (
            f"config.masking.unit is {config.masking.unit!r}, which config.masking.mode = "
            "'faithful' does not know; allowed: 'token', or config.masking.mode = 'clean'"
        )
    if data.strip_accents and not data.lower_case:
        yield (
            "config.data.strip_accents is True, which works only together with "
            "config.data.lower_case = True"
        )
    yield from checkpoint_clashes(config)


def checkpoint_clashes(config: ConfigDict) -> Iterator[str]:
    """Says so when the best checkpoint could be one that is never saved."""
    every = config.checkpoint.every_steps
    if config.checkpoint.keep_best and every % config.eval_every_steps:
        yield (
            f"config.checkpoint.every_steps is {every}; with config.checkpoint.keep_best it must "
            f"be a multiple of config.eval_every_steps = {config.eval_every_steps}"
        )


def topology_clashes(config: ConfigDict, num_devices: int) -> Iterator[str]:
    """Sentences about a mesh and a batch that do not fit each other or the devices."""
    parallel = config.parallel
    fixed = parallel.fsdp * parallel.tensor
    wanted = fixed * (1 if parallel.data == -1 else parallel.data)
    if num_devices % fixed or (parallel.data != -1 and wanted != num_devices):
        yield (
            "config.parallel.data, config.parallel.fsdp and config.parallel.tensor are "
            f"{parallel.data}, {parallel.fsdp} and {parallel.tensor}; allowed: a product that is "
            f"the number of devices, {num_devices}"
        )
    if parallel.api == "pmap" and fixed != 1:
        yield (
            "config.parallel.api = 'pmap' is data parallel only: it needs config.parallel.fsdp = 1 "
            f"and config.parallel.tensor = 1, found {parallel.fsdp} and {parallel.tensor}"
        )
    if parallel.api == "pmap" and parallel.shard_optimizer:
        yield (
            "config.parallel.shard_optimizer is True, but config.parallel.api = 'pmap' keeps whole "
            "moments on every device; allowed: False, or config.parallel.api = 'jit'"
        )
    shards = num_devices // parallel.tensor * config.num_microbatches
    if config.batch_size % shards:
        yield (
            f"config.batch_size is {config.batch_size}; allowed: a multiple of {shards} "
            f"({num_devices // parallel.tensor} devices that split the batch x "
            f"config.num_microbatches = {config.num_microbatches})"
        )


STARTS = ("generator.temperature", "loss.generator_weight", "loss.discriminator_weight")


def without_effect(config: ConfigDict) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields that decide nothing, each after the field because of which."""
    generator = config.generator
    if not config.init_from:
        yield "init_from", ("init_missing", "init_resize")
    if config.objective == "mlm":
        yield "objective", ("algorithm", "generator.kind", "generator.init_from")
        yield "objective", ("generator.mle_steps", "generator.sharing")
        yield "objective", ("generator.temperature", "generator.temperature_start")
        yield "objective", ("generator.disallow_correct",)
        yield "objective", ("loss.discriminator_weight", "loss.discriminator_weight_start")
        return
    if generator.kind != "learned":
        yield "generator.kind", ("algorithm", "generator.mle_steps")
        yield "generator.kind", ("loss.generator_weight", "loss.generator_weight_start")
    elif config.algorithm == "joint":
        yield "algorithm", ("generator.mle_steps",)
    elif config.algorithm == "two_stage" and not generator.mle_steps:
        yield "generator.mle_steps", ("loss.generator_weight", "loss.generator_weight_start")
    if not is_network(config):
        yield "generator.kind", ("generator.init_from", "generator.sharing")
        yield "generator.kind", ("generator.width", "generator.depth")
        yield "generator.kind", ("masking.mask_token_share", "masking.random_token_share")
    if generator.kind == "uniform":
        yield "generator.kind", ("generator.temperature", "generator.temperature_start")


def training_clashes(config: ConfigDict) -> Iterator[str]:
    """Sentences about objectives, generators and algorithms that do not fit each other."""
    generator, default = config.generator, flatten(get_config())
    inert = set()
    for cause, names in without_effect(config):
        inert |= {*names}
        for name in names:
            value = field(config, name)
            if value != default[name]:
                yield (
                    f"config.{name} is {value!r}, which has no effect with config.{cause} = "
                    f"{field(config, cause)!r}; leave it at {default[name]!r}"
                )
    started = [name for name in STARTS if field(config, f"{name}_start") is not None]
    for name in started:
        if not config.ramp_steps and f"{name}_start" not in inert:
            yield (
                f"config.{name}_start is {field(config, f'{name}_start')}, which has no effect "
                "with config.ramp_steps = 0; say in how many updates it is left behind"
            )
    if config.ramp_steps and not started:
        yield (
            f"config.ramp_steps is {config.ramp_steps}, which has no effect as long as none of "
            f"{', '.join(f'config.{name}_start' for name in STARTS)} is set"
        )
    if config.ramp_steps > config.num_train_steps:
        yield (
            f"config.ramp_steps is {config.ramp_steps}; allowed: at most config.num_train_steps = "
            f"{config.num_train_steps}, or else the values that it leads to are never reached"
        )
    weights = [name for name in STARTS if "weight" in name and name not in inert]
    if not any(field(config, name) or field(config, f"{name}_start") for name in weights):
        names = " and ".join(f"config.{name}" for name in weights)
        yield f"{names} = 0 leave nothing to train"
    if (cause := not_measuring(config)) and cause not in inert:
        yield (
            f"config.checkpoint.keep_best is {config.checkpoint.keep_best!r}, which "
            f"config.{cause} = {field(config, cause)!r} does not measure"
        )
    if not has_generator(config):
        return
    if config.algorithm == "two_stage" or generator.kind == "frozen":
        cause = "generator.kind" if generator.kind == "frozen" else "algorithm"
        if generator.sharing not in ("none", "gdes"):
            yield (
                f"config.generator.sharing is {generator.sharing!r}, but with config.{cause} = "
                f"{field(config, cause)!r} the discriminator goes on when the generator is "
                "frozen; allowed: 'none' or 'gdes'"
            )
    second = {"two_stage": "the discriminator", "adversarial": "the policy"}.get(config.algorithm)
    if second and generator.mle_steps >= config.num_train_steps:
        yield (
            f"config.generator.mle_steps is {generator.mle_steps}, which leaves none of "
            f"config.num_train_steps = {config.num_train_steps} to {second}"
        )
    if config.algorithm == "two_stage" and generator.kind == "learned" and generator.mle_steps:
        for name in started:
            if name != "loss.generator_weight" and config.ramp_steps <= generator.mle_steps:
                yield (
                    f"config.{name}_start is {field(config, f'{name}_start')}, which has no effect "
                    f"as long as config.ramp_steps = {config.ramp_steps} end in the first stage "
                    f"of config.generator.mle_steps = {generator.mle_steps}"
                )
        if generator.sharing in ("none", "gdes") and not is_of_one_size(config):
            yield (
                "config.algorithm = 'two_stage' copies the generator into the discriminator: it "
                "needs config.generator.width = 1 and config.generator.depth = 1, no other "
                "config.model.num_heads and config.model.intermediate_size than by default, and, "
                "where config.generator.sharing = 'none', config.model.embedding_size = "
                "config.model.hidden_size"
            )
    if config.algorithm == "adversarial":
        if config.objective not in ("electra", "electra_15"):
            yield (
                f"config.objective is {config.objective!r}, but config.algorithm = 'adversarial' "
                "rewards the generator for the verdicts of a discriminator; allowed: 'electra', "
                "'electra_15'"
            )
        if config.masking.mode != "clean":
            yield (
                f"config.masking.mode is {config.masking.mode!r}, in which samples are averaged; "
                "config.algorithm = 'adversarial' rewards each of them: allowed: 'clean'"
            )
    if generator.init_from and generator.sharing == "all":
        yield (
            f"config.generator.init_from is {generator.init_from!r}, but with "
            "config.generator.sharing = 'all' the generator has no encoder of its own"
        )


def not_measuring(config: ConfigDict) -> str:
    """The field because of which there is no `config.checkpoint.keep_best`, or ""."""
    metric, objective = config.checkpoint.keep_best, config.objective
    if "rtd" in metric:
        return "" if objective in ("electra", "electra_15") else "objective"
    if "reconstruction" in metric:
        return "" if objective in DISCRIMINATOR_HEADS else "objective"
    if metric == "eval/loss" and config.algorithm == "adversarial":
        return "algorithm"  # the loss of a policy is no measure
    return "generator.kind" if "mlm" in metric and not is_network(config) else ""


def is_network(config: ConfigDict) -> bool:
    """Whether what proposes tokens is a network, learned or frozen."""
    return config.generator.kind in ("learned", "frozen")


def has_generator(config: ConfigDict) -> bool:
    """Whether there is a generator beside the network that is kept."""
    return config.objective != "mlm" and is_network(config)


def is_of_one_size(config: ConfigDict) -> bool:
    """Whether generator and discriminator have the same parameters but for their heads."""
    model, width = config.model, generator_width(config)
    sizes = (width, generator_layers(config), num_heads(width), 4 * width)
    return sizes == (
        model.hidden_size,
        model.num_layers,
        model.num_heads or num_heads(model.hidden_size),
        model.intermediate_size or 4 * model.hidden_size,
    ) and (config.generator.sharing == "gdes" or model.embedding_size == width)


def generator_width(config: ConfigDict) -> int:
    """Hidden size of the generator (spec 2.1)."""
    return round(config.model.hidden_size * config.generator.width)


def generator_layers(config: ConfigDict) -> int:
    """Depth of the generator (spec 2.1)."""
    return round(config.model.num_layers * config.generator.depth)


def model_config(config: ConfigDict, vocab_size: int) -> ElectraConfig:
    """Sizes of both networks; everything that follows from other fields is worked out here."""
    model, generator = config.model, config.generator
    discriminator = EncoderConfig(
        vocab_size=vocab_size,
        embedding_size=model.embedding_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads or num_heads(model.hidden_size),
        intermediate_size=model.intermediate_size or 4 * model.hidden_size,
        max_positions=model.max_positions,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        init_stddev=model.init_stddev,
        remat=model.remat,
        scan_unroll=model.scan_unroll,
        dtype=compute_dtype(model.dtype),
    )
    if config.objective == "mlm":
        return ElectraConfig(discriminator=None, generator=discriminator)
    made = ElectraConfig(
        discriminator,
        discriminator,
        generator.sharing,
        DISCRIMINATOR_HEADS.get(config.objective, ReplacedTokenHead),
        baseline=config.algorithm == "adversarial",
    )
    if not is_network(config):
        return dataclasses.replace(made, generator=None)
    if generator.sharing == "all":
        return made
    width = generator_width(config)
    own = dataclasses.replace(
        discriminator,
        embedding_size=width if generator.sharing == "none" else model.embedding_size,
        hidden_size=width,
        num_layers=generator_layers(config),
        num_heads=num_heads(width),
        intermediate_size=4 * width,
    )
    return dataclasses.replace(made, generator=own)
