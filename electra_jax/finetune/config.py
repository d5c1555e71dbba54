"""Every setting of fine-tuning, once: default, meaning, check, and if it may change on resume.

The defaults are the paper's (spec 4.5). A recipe (`configs/glue.py`, `squad.py`, `tagging.py`,
`classify.py`) starts from `get_config()` and states what differs.
"""

import dataclasses
import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from electra_jax.config import Adam, Loading, Numerics, Parallel, Run
from electra_jax.errors import UserError
from electra_jax.finetune import glue
from electra_jax.modeling.encoder import EncoderConfig
from electra_jax.settings import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Check,
    Setting,
    check_values,
    field,
    one_of,
    setting,
    settings_of,
    to_config,
)
from electra_jax.sharding.mesh import check_topology

SIZES = (
    *("vocab_size", "embedding_size", "hidden_size", "num_layers", "num_heads"),
    *("intermediate_size", "max_positions", "token_types"),
)


def are_names(labels: tuple) -> bool:
    """Whether these can be labels."""
    return all(x and isinstance(x, str) for x in labels) and len({*labels}) == len(labels)


def is_range(values: tuple) -> bool:
    """Whether a regression can be scaled by these; by none, the data say."""
    if not all(isinstance(x, int | float) and -math.inf < x < math.inf for x in values):
        return False
    return not values or (len(values) == 2 and values[0] < values[1])


@dataclasses.dataclass(frozen=True)
class Data(Loading):
    """A task and its files: docs/finetuning.md."""

    kind: str = setting("glue", "of the task", one_of("glue", "squad", "tagging", "table"))
    name: str = setting("cola", "of the GLUE task; elsewhere what the results are called")
    source: str = setting("", "glue: the directory with the tasks' folders, or tfds:glue")
    train: str = setting("", "squad, tagging, table: the file of each split")
    dev: str = setting("", "likewise")
    test: str = setting("", "likewise")
    on_error: str = setting(
        "raise", "at malformed rows to train on; glue only", one_of("raise", "skip")
    )
    max_length: int = setting(
        128,
        "tokens of a row; what is longer is cut, or divided",
        Check(lambda x: x >= 8, "at least 8"),
    )
    length_buckets: int = setting(4, "widths that batches of like length are padded to", COUNT)
    double_unordered: bool = setting(True, "glue: MRPC and STS-B with each pair swapped, too")
    unanswerable: bool = setting(False, "squad: questions may have no answer")
    null_threshold: float | None = setting(None, "squad: of no answer; default: -2.75, or 0")
    max_answer_length: int = setting(30, "squad: in tokens", COUNT)
    doc_stride: int = setting(128, "squad: tokens between windows of a long text", COUNT)
    answerability: str = setting(
        "window",
        "squad: of windows without the answer; question: the original's",
        one_of("window", "question"),
    )
    target: str = setting(
        "classification",
        "table: what a label is",
        one_of("classification", "multilabel", "regression"),
    )
    text: tuple = setting(("text",), "table: the column of the text, or the two of a pair")
    label: str = setting("label", "table: the column of the label")
    labels: tuple = setting(
        (),
        "their names; default: those of the task, or of the training data",
        Check(are_names, "text, each once"),
    )
    scheme: str = setting("", "tagging: default: that of the training file")
    value_range: tuple = setting(
        (),
        "regression: labels that the network sees as 0 and 1",
        Check(is_range, "two numbers, the smaller one first"),
    )


@dataclasses.dataclass(frozen=True)
class Model(Numerics):
    """Numerics; the sizes are those of the weights, which fill them in."""

    vocab_size: int | None = setting(None, "of the weights", COUNT)
    embedding_size: int | None = setting(None, "of the weights", COUNT)
    hidden_size: int | None = setting(None, "of the weights", COUNT)
    num_layers: int | None = setting(None, "of the weights", COUNT)
    num_heads: int | None = setting(None, "of the weights", COUNT)
    intermediate_size: int | None = setting(None, "of the weights", COUNT)
    max_positions: int | None = setting(None, "of the weights", COUNT)
    token_types: int | None = setting(None, "of the weights", COUNT)


@dataclasses.dataclass(frozen=True)
class Optimizer(Adam):
    """Rate and schedule."""

    learning_rate: float | None = setting(None, "default: by width, see `learning_rate`", POSITIVE)
    warmup_fraction: float = setting(0.1, "of all updates", SHARE)
    layerwise_decay: float | None = setting(
        None,
        "default: 0.8, 0.9 for 24 layers and more",
        Check(lambda x: 0 < x <= 1, "above 0, at most 1"),
    )
    layerwise_mode: str = setting(
        "fixed", "faithful: the original skips a level", one_of("fixed", "faithful")
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Which states of the run are kept."""

    every_steps: int | None = setting(None, "default: as eval_every_steps", COUNT, free=True)
    keep: int = setting(1, "newest checkpoints kept", COUNT, free=True)
    keep_best: bool = setting(
        False, "predict with the best by the task's main score, not the last", free=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning(Run):
    """A whole configuration."""

    task: str = setting("finetune", "what is to be done", one_of("finetune"))
    init_from: str = setting(
        "",
        "weights to start from, docs/finetuning.md",
        Check(bool, "a run, an export or a Hugging Face directory to start from"),
    )
    head: str = setting(
        "original",
        "huggingface: what `transformers` has in its place",
        one_of("original", "huggingface"),
    )
    num_trials: int = setting(1, "with the seeds seed, seed + 1, ...", COUNT)
    trials_at_once: int = setting(1, "trained in one program, where memory allows", COUNT)
    num_train_epochs: float = setting(3.0, "times that each row is trained on", POSITIVE)
    batch_size: int = setting(32, "rows per update over all devices and hosts", COUNT)
    log_every_steps: int = setting(50, "a line and a point in the curves", COUNT, free=True)
    eval_every_steps: int | None = setting(
        None, "default: an epoch; the last step is always evaluated", COUNT, free=True
    )
    patience: int = setting(
        0, "evaluations without a better score, after which to stop; 0: never", NOT_NEGATIVE
    )
    data: Data
    model: Model
    optimizer: Optimizer
    parallel: Parallel
    checkpoint: Checkpoint


def settings() -> dict[str, Setting]:
    """Every setting of fine-tuning by its dotted name."""
    return settings_of(FineTuning)


def get_config() -> ConfigDict:
    """The complete default configuration, locked: unknown names are errors."""
    return to_config(settings())


KINDS = {  # of tasks that a field is for
    **dict.fromkeys(("data.source", "data.on_error", "data.double_unordered"), ("glue",)),
    **dict.fromkeys(("data.train", "data.dev", "data.test"), ("squad", "tagging", "table")),
    **dict.fromkeys(
        (
            f"data.{name}"
            for name in (
                *("unanswerable", "null_threshold", "max_answer_length", "doc_stride"),
                "answerability",
            )
        ),
        ("squad",),
    ),
    **dict.fromkeys(("data.target", "data.text", "data.label", "data.value_range"), ("table",)),
    "data.scheme": ("tagging",),
    "data.labels": ("table", "tagging"),
}


def validate(config: ConfigDict, num_devices: int) -> None:
    """Check every value alone and those that only clash together.

    Raises:
      UserError: names the fields, what was found and what is allowed.
    """
    check_values(config, settings())
    check_topology(config.parallel, config.batch_size, config.num_microbatches, num_devices)
    for problem in clashes(config):
        raise UserError(problem)


def clashes(config: ConfigDict) -> Iterator[str]:
    """Sentences about values that do not fit each other."""
    data = config.data
    if data.kind == "glue":
        if data.name not in glue.TASKS:
            yield f"config.data.name is {data.name!r}; allowed: {', '.join(glue.TASKS)}"
        if not data.source:
            yield "config.data.source is empty; allowed: the directory of the GLUE files, tfds:glue"
    elif not data.train:
        yield f"config.data.train is empty; config.data.kind = {data.kind!r} needs a training file"
    default = get_config()
    for name, kinds in KINDS.items():
        value, usual = field(config, name), field(default, name)
        if data.kind not in kinds and value != usual:
            yield (
                f"config.{name} is {value!r}, which has no effect with config.data.kind = "
                f"{data.kind!r}; leave it at {usual!r}"
            )
    if config.patience and not (config.checkpoint.keep_best):
        yield (
            "config.patience needs config.checkpoint.keep_best = True, or else the last evaluation "
            "would count and not the best"
        )
    if config.seed + config.num_trials > 2**32:  # as in pre-training, seeds are below that
        yield (
            f"config.seed is {config.seed}; with config.num_trials = {config.num_trials} it must "
            f"be at most {2**32 - config.num_trials}"
        )
    if config.trials_at_once > 1:
        for name, needed in (
            ("parallel.api", "jit"),
            ("parallel.fsdp", 1),
            ("parallel.tensor", 1),
            ("parallel.shard_optimizer", False),
            ("checkpoint.keep_best", False),
            ("histograms", False),
        ):
            if (found := field(config, name)) != needed:
                yield (
                    f"config.{name} is {found!r}; with config.trials_at_once = "
                    f"{config.trials_at_once} it must be {needed!r}"
                )


def learning_rate(encoder: EncoderConfig) -> float:
    """The paper's for small, base and large (spec 4.5), by width."""
    if encoder.hidden_size < 512:
        return 3e-4
    return 1e-4 if encoder.hidden_size < 1024 else 5e-5


def layerwise_decay(encoder: EncoderConfig) -> float:
    """The paper's for small and base, and for large (spec 4.5), by depth."""
    return 0.8 if encoder.num_layers < 24 else 0.9
