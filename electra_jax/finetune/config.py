"""Every setting of fine-tuning, once: default, meaning, check, and if it may change on resume.

The defaults are the paper's (spec 4.5), but weight decay is the original program's: the paper has
none. A recipe (`configs/glue.py`, `squad.py`, `tagging.py`, `classify.py`) starts from
`get_config()` and states what differs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from electra_jax.config import Adam, Loading, Numerics, Parallel, Run
from electra_jax.errors import UserError
from electra_jax.finetune import objective
from electra_jax.finetune.heads.base import STYLES
from electra_jax.finetune.tasks import TASKS
from electra_jax.finetune.tasks.base import Log, Task
from electra_jax.modeling.encoders import ENCODERS, encoder_config
from electra_jax.modeling.encoders.base import NUMERICS, EncoderConfig, compute_dtype
from electra_jax.objectives.metrics import Metric
from electra_jax.settings import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Check,
    Setting,
    check_values,
    field,
    key_of,
    one_of,
    prefixed,
    restored,
    setting,
    settings_of,
    to_config,
)
from electra_jax.sharding.mesh import check_topology

INIT_STDDEV = 0.02  # of new layers

ALONE = {  # what several trials at once need; other values are for one alone
    "parallel.api": "jit",
    "parallel.fsdp": 1,
    "parallel.tensor": 1,
    "parallel.shard_optimizer": False,
    "checkpoint.keep_best": False,
    "histograms": False,
}


@dataclasses.dataclass(frozen=True)
class Data(Loading):
    """What all tasks have; `Settings` of each task has more: docs/finetuning.md."""

    kind: str = setting("glue", "of the task", key_of(TASKS))
    name: str = setting("cola", "of the GLUE task; elsewhere what the results are called")
    max_length: int = setting(
        128,
        "tokens of a row; what is longer is cut, or divided",
        Check(lambda x: x >= 8, "at least 8"),
    )
    length_buckets: int = setting(4, "widths that batches of like length are padded to", COUNT)


@dataclasses.dataclass(frozen=True)
class Optimizer(Adam):
    """Rate and schedule."""

    learning_rate: float | None = setting(None, "default: by width, see `rates`", POSITIVE)
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
        "original", "huggingface: what `transformers` has in its place", one_of(*STYLES)
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
    model: Numerics
    optimizer: Optimizer
    parallel: Parallel
    checkpoint: Checkpoint


def settings() -> dict[str, Setting]:
    """Every setting of fine-tuning by its dotted name, those of all tasks included."""
    shared = settings_of(FineTuning)
    return shared | prefixed("model", sizes()) | prefixed("data", task_settings())


def sizes() -> dict[str, Setting]:
    """The settings in `config.model` that the weights decide; they have no default."""
    shared = {
        one.name: Setting(None, "of the weights", type=one.type)
        for one in dataclasses.fields(EncoderConfig)
        if one.name not in NUMERICS
    }
    own = settings_of(*(encoder.Config for encoder in ENCODERS.values()))
    return shared | {name: dataclasses.replace(one, default=None) for name, one in own.items()}


def task_settings() -> dict[str, Setting]:
    """The settings that not all tasks have, by their names in `config.data`.

    Their meanings begin with the tasks that have them.
    """
    by_kind = {kind: settings_of(task.Settings) for kind, task in TASKS.items()}
    settings = settings_of(*(task.Settings for task in TASKS.values()))
    for name, one in settings.items():
        kinds = ", ".join(kind for kind, own in by_kind.items() if name in own)
        settings[name] = dataclasses.replace(one, meaning=f"{kinds}: {one.meaning}")
    return settings


def get_config() -> ConfigDict:
    """The complete default configuration, locked: unknown names are errors."""
    return to_config(settings())


def validate(config: ConfigDict, num_devices: int) -> None:
    """Check every value alone and those that only clash together.

    Raises:
      UserError: names the fields, what was found and what is allowed.
    """
    check_values(config, settings())
    check_topology(config.parallel, config.batch_size, config.num_microbatches, num_devices)
    data, trials = config.data, config.trials_at_once
    task = TASKS[data.kind]
    task.check(data.name, own_settings(data))
    own = settings_of(task.Settings)
    for name, one in task_settings().items():
        if name not in own and data[name] != one.default:
            raise UserError(
                f"config.data.{name} is {data[name]!r}, which has no effect with config.data.kind "
                f"= {data.kind!r}; leave it at {one.default!r}"
            )
    if config.seed + config.num_trials > 2**32:  # as in pre-training, seeds are below that
        raise UserError(
            f"config.seed is {config.seed}; with config.num_trials = {config.num_trials} it must "
            f"be at most {2**32 - config.num_trials}"
        )
    for name, needed in ALONE.items():
        if trials > 1 and field(config, name) != needed:
            raise UserError(
                f"config.{name} is {field(config, name)!r}; with config.trials_at_once = {trials} "
                f"it must be {needed!r}"
            )
    if config.patience and not config.checkpoint.keep_best:
        raise UserError(
            "config.patience needs config.checkpoint.keep_best = True, or else the last evaluation "
            "would count and not the best"
        )


def own_settings(data: ConfigDict) -> Any:
    """The settings in `config.data` that its task has, as its `Settings`."""
    kind = TASKS[data.kind].Settings
    return kind(**{field.name: data[field.name] for field in dataclasses.fields(kind)})


def make_task(config: ConfigDict, log: Log) -> Task:
    """The task that a configuration describes; `log` takes lines about its files."""
    data = config.data
    return TASKS[data.kind](data.name, own_settings(data), config.head, log)


def metrics_of(stored: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics of runs with this configuration; none where its task is not known."""
    try:
        task = make_task(restored(stored, settings()), lambda line: None)
    except (UserError, KeyError, TypeError, ValueError):
        return {}
    return {**task.head.metrics, **task.metrics}


def make_objective(config: ConfigDict, task: Task) -> objective.FineTuning:
    """The head of `task` on an encoder of the sizes in a completed configuration."""
    dtype = compute_dtype(config.model.dtype)
    encoder = encoder_config(config.model, init_stddev=INIT_STDDEV, dtype=dtype)
    return objective.FineTuning(encoder, task.head)


def rates(encoder: EncoderConfig) -> tuple[float, float]:
    """The paper's rates for small, base and large by width, and layer-wise decay by depth."""
    width, decay = encoder.hidden_size, 0.8 if encoder.num_layers < 24 else 0.9
    return 3e-4 if width < 512 else 1e-4 if width < 1024 else 5e-5, decay
