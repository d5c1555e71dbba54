"""Every setting of pre-training, once: default, meaning, check, and if it may change on resume.

The defaults are the paper's ELECTRA-Small (spec 4.4). A recipe in `configs/` starts from
`get_config()` and states what differs; `--config.model.hidden_size=512` overrides one value. What
an encoder or an objective has beside these is said where it is defined, and joins `config.model` or
`config.loss`.
"""

import dataclasses
import importlib.util
import math

from ml_collections import ConfigDict

from electra_jax.data.layout import LAYOUTS
from electra_jax.data.tokenizers import TRAINERS
from electra_jax.data.tokenizers.base import FIVE_NAMES
from electra_jax.modeling.encoders import ENCODERS, FIRST
from electra_jax.modeling.encoders.base import REMAT_POLICIES
from electra_jax.objectives import OBJECTIVES
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
    at_least,
    key_of,
    one_of,
    prefixed,
    setting,
    settings_of,
    to_config,
)

SEED = Check(lambda x: 0 <= x < 2**32, "at least 0 and below 2**32")  # JAX drops higher bits
# With less, logits that it divides are no longer numbers.
TEMPERATURE = Check(lambda x: 1e-3 <= x < math.inf, "at least 0.001")
STEPS = Check(
    lambda x: not x or (len(x) == 2 and all(type(y) is int for y in x) and 1 <= x[0] <= x[1]),
    "(), or the first and the last step, such as (10, 14)",
)
IF_INSTALLED = Check(
    lambda x: not x or importlib.util.find_spec("wandb") is not None,
    "'' as long as wandb is not installed: pip install '.[wandb]'",
)
DEVICES = Check(lambda x: x == -1 or x >= 1, "at least 1, or -1 for all devices left")

AT_START = "at step 0; default: the same throughout"  # of what changes in `ramp_steps` updates


@dataclasses.dataclass(frozen=True)
class Loading:
    """How batches are built ahead of the step."""

    num_threads: int = setting(2, "threads that build batches", COUNT, free=True)
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


@dataclasses.dataclass(frozen=True)
class Data(Loading):
    """Text, vocabulary and rows: docs/data.md."""

    source: str = setting("docstrings", "or files, tfds:NAME, buckets", GIVEN)
    on_error: str = setting(
        "raise", "at what cannot be read; skip: count and go on", one_of("raise", "skip")
    )
    dir: str = setting("data", "token stores are kept below this directory", GIVEN, free=True)
    vocab: str = setting("", "vocab.txt or SentencePiece .model; empty: train one on the source")
    tokenizer: str = setting("wordpiece", "of a vocabulary trained here", key_of(TRAINERS))
    vocab_size: int = setting(30522, "tokens of a vocabulary trained here", at_least(100))
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
        one_of(*LAYOUTS),
    )
    sequence_length: int = setting(128, "tokens in a row", at_least(8))


@dataclasses.dataclass(frozen=True)
class Model(Numerics):
    """The encoder that is kept, and its sizes; what only one encoder has is said there."""

    encoder: str = setting(FIRST, "architecture: docs/objectives.md", key_of(ENCODERS))
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
    init_from: str = setting("", "weights that the generator starts from, docs/interop.md")
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
    temperature_start: float | None = setting(None, AT_START, TEMPERATURE)
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
    generator_weight_start: float | None = setting(None, AT_START, NOT_NEGATIVE)
    discriminator_weight: float = setting(
        50.0, "of the discriminator's, whatever it is to predict", NOT_NEGATIVE
    )
    discriminator_weight_start: float | None = setting(None, AT_START, NOT_NEGATIVE)


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
    objective: str = setting("electra", "docs/objectives.md says what each is", key_of(OBJECTIVES))
    algorithm: str = setting(
        "joint", "how the two networks are trained", one_of("joint", "two_stage", "adversarial")
    )
    num_train_steps: int = setting(1_000_000, "updates", COUNT)
    init_from: str = setting("", "weights to start from, docs/interop.md; empty: random ones")
    init_missing: str = setting(
        "error", "what becomes of a network without weights", one_of("error", "initialize", "copy")
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
    """Every setting of pre-training, by its dotted name; encoders and objectives add theirs."""
    model = settings_of(*(encoder.Config for encoder in ENCODERS.values()))
    loss = settings_of(*(objective.Settings for objective in OBJECTIVES.values()))
    return settings_of(Pretraining) | prefixed("model", model) | prefixed("loss", loss)


def get_config() -> ConfigDict:
    """The complete default configuration, locked: unknown names are errors."""
    return to_config(settings())
