"""Every setting of fine-tuning, once, with its default; and the check that they make sense.

The defaults are the paper's (spec 4.5). A recipe (`configs/glue.py`, `squad.py`, `tagging.py`,
`classify.py`) starts from `get_config()` and states what differs.
"""

import math
from collections.abc import Iterator

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from electra_jax.config import get_config as pretraining_config
from electra_jax.config import topology_clashes
from electra_jax.errors import UserError
from electra_jax.finetune import glue
from electra_jax.modeling.encoder import EncoderConfig
from electra_jax.settings import (
    COUNT,
    NOT_NEGATIVE,
    OPTIONAL_COUNT,
    POSITIVE,
    SHARE,
    Check,
    check_fields,
    field,
    one_of,
)

SIZES = (
    *("vocab_size", "embedding_size", "hidden_size", "num_layers", "num_heads"),
    *("intermediate_size", "max_positions", "token_types"),
)


def get_config() -> ConfigDict:
    """The complete default configuration, locked: unknown names are errors."""
    pretraining = pretraining_config()
    config = ConfigDict()
    config.task = "finetune"
    config.init_from = ""  # a run, an export or a Hugging Face directory; see docs/finetuning.md
    config.head = "original"  # original | huggingface: what `transformers` has in its place
    config.seed = 0  # of the first trial: of the head, dropout and the order of the data
    config.num_trials = 1  # with the seeds seed, seed + 1, ...
    config.trials_at_once = 1  # trained in one program, where memory allows
    config.num_train_epochs = 3.0
    config.batch_size = 32
    config.num_microbatches = 1

    config.data = data = ConfigDict()
    data.kind = "glue"  # glue | squad | tagging | table
    data.name = "cola"  # of the GLUE task; elsewhere what the results are called
    data.source = ""  # glue: the directory with the tasks' folders, or tfds:glue
    data.train = ""  # squad, tagging, table: the file of each split
    data.dev = ""
    data.test = ""
    data.on_error = "raise"  # raise | skip, at malformed rows to train on; glue only
    data.max_length = 128  # tokens of a row; what is longer is cut, or divided
    data.length_buckets = 4  # batches of rows of like length, padded to one of so many widths
    data.double_unordered = True  # glue: MRPC and STS-B with each pair swapped, too
    data.unanswerable = False  # squad: questions may have no answer
    data.null_threshold = placeholder(float)  # squad: of no answer; default: -2.75, or 0
    data.max_answer_length = 30  # squad: in tokens
    data.doc_stride = 128  # squad: between windows of a long text
    data.answerability = "window"  # squad: window | question (the original): of windows without it
    data.target = "classification"  # table: classification | multilabel | regression
    data.text = ("text",)  # table: the column of the text, or the two of a pair
    data.label = "label"  # table: the column of the label
    data.labels = ()  # their names; default: those of the task, or of the training data
    data.scheme = ""  # tagging: default: that of the training file
    data.value_range = ()  # regression: labels that the network sees as 0 and 1
    data.num_threads = 2
    data.num_workers = 0
    data.prefetch = 8

    config.model = model = ConfigDict()
    for name in ("dropout", "attention_dropout", "dtype", "remat", "scan_unroll"):
        model[name] = pretraining.model[name]
    for name in SIZES:  # those of the weights, which fill them in
        model[name] = placeholder(int)

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = placeholder(float)  # default: by width, see `learning_rate`
    optimizer.warmup_fraction = 0.1  # of all updates
    optimizer.decay_power = 1.0
    optimizer.b1 = 0.9
    optimizer.b2 = 0.999
    optimizer.epsilon = 1e-6
    optimizer.weight_decay = 0.01
    optimizer.max_grad_norm = 1.0
    optimizer.layerwise_decay = placeholder(float)  # default: 0.8, 0.9 for 24 layers and more
    optimizer.layerwise_mode = "fixed"  # fixed | faithful (the original skips a level, spec 4.3)

    config.parallel = pretraining.parallel
    config.log_every_steps = 50
    config.eval_every_steps = placeholder(int)  # default: an epoch; the last is always evaluated
    config.patience = 0  # evaluations without a better score, after which to stop; 0: never
    config.max_skipped_updates = 0
    config.profile_steps = ()  # (first, last): these are profiled for TensorBoard's xprof
    config.histograms = False  # of parameters at every evaluation, for TensorBoard
    config.wandb = ""  # project of Weights & Biases that gets the metrics, too
    config.resume = "same"
    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every_steps = placeholder(int)  # default: as eval_every_steps
    checkpoint.keep = 1
    checkpoint.keep_best = False  # predict with the best by the task's main score, not the last
    return config.lock()


def are_names(labels: tuple) -> bool:
    """Whether these can be labels."""
    return all(x and isinstance(x, str) for x in labels) and len({*labels}) == len(labels)


def is_range(values: tuple) -> bool:
    """Whether a regression can be scaled by these; by none, the data say."""
    if not all(isinstance(x, int | float) and -math.inf < x < math.inf for x in values):
        return False
    return not values or (len(values) == 2 and values[0] < values[1])


CHECKS: dict[str, Check] = {
    "task": one_of("finetune"),
    "init_from": (bool, "a run, an export or a Hugging Face directory to start from"),
    "head": one_of("original", "huggingface"),
    "num_trials": COUNT,
    "trials_at_once": COUNT,
    "num_train_epochs": POSITIVE,
    "data.kind": one_of("glue", "squad", "tagging", "table"),
    "data.max_length": (lambda x: x >= 8, "at least 8"),
    "data.length_buckets": COUNT,
    "data.max_answer_length": COUNT,
    "data.doc_stride": COUNT,
    "data.answerability": one_of("window", "question"),
    "data.labels": (are_names, "text, each once"),
    "data.value_range": (is_range, "two numbers, the smaller one first"),
    "data.target": one_of("classification", "multilabel", "regression"),
    "optimizer.learning_rate": (lambda x: x is None or x > 0, "a number above 0"),
    "optimizer.warmup_fraction": SHARE,
    "optimizer.layerwise_decay": (lambda x: x is None or 0 < x <= 1, "above 0, at most 1"),
    "optimizer.layerwise_mode": one_of("fixed", "faithful"),
    "eval_every_steps": OPTIONAL_COUNT,
    "patience": NOT_NEGATIVE,
    "checkpoint.every_steps": OPTIONAL_COUNT,
}
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
SHARED = (
    *("seed", "batch_size", "num_microbatches", "log_every_steps", "max_skipped_updates", "resume"),
    *("profile_steps", "wandb"),
    *("data.on_error", "data.num_threads", "data.num_workers", "data.prefetch"),
    *("model.dropout", "model.attention_dropout", "model.dtype", "model.remat"),
    *("model.scan_unroll", "optimizer.decay_power", "optimizer.b1", "optimizer.b2"),
    *("optimizer.epsilon", "optimizer.weight_decay", "optimizer.max_grad_norm"),
    *("parallel.api", "parallel.data", "parallel.fsdp", "parallel.tensor", "checkpoint.keep"),
)


def validate(config: ConfigDict, num_devices: int) -> None:
    """Check every value alone and those that only clash together.

    Raises:
      UserError: names the fields, what was found and what is allowed.
    """
    shared = {name: config.CHECKS[name] for name in SHARED}
    check_fields(config, CHECKS | shared)
    for problem in (*clashes(config), *topology_clashes(config, num_devices)):
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
