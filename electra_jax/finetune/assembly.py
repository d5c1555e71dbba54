"""A task, its head and its network, from the configuration of a run."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from electra_jax.data.features import FeatureRows
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.finetune.buckets import trimmed
from electra_jax.finetune.config import SIZES
from electra_jax.finetune.glue import GlueTask
from electra_jax.finetune.heads import HeadConfig
from electra_jax.finetune.objective import FineTuning
from electra_jax.finetune.squad import SquadTask
from electra_jax.finetune.tables import TableTask
from electra_jax.finetune.tagging import TaggingTask, type_of
from electra_jax.finetune.task import TRAIN, Arrays, Task
from electra_jax.modeling.encoder import EncoderConfig
from electra_jax.modeling.precision import compute_dtype
from electra_jax.training.loop import Log, log_line

INPUTS = ("input_ids", "piece_ids", "position_ids", "token_type_ids", "allowed")


def to_predict(task: Task, examples: Sequence, tokenizer: Tokenizer, max_length: int) -> Arrays:
    """Features of examples that are not trained on."""
    return trimmed(task.features(examples, tokenizer, max_length, training=False))


def make_task(config: ConfigDict, log: Log = log_line) -> Task:
    """The task that `config.data` describes; `log` takes what it says of its files."""
    data = config.data
    files = {name: data[name] for name in (TRAIN, "dev", "test") if data[name]}
    if data.kind == "glue":
        return GlueTask(
            data.name,
            data.source,
            double_unordered=data.double_unordered,
            on_error=data.on_error,
            log=log,
        )
    if data.kind == "squad":
        default = -2.75 if config.head == "original" else 0.0
        return SquadTask(
            files,
            unanswerable=data.unanswerable,
            null_threshold=default if data.null_threshold is None else data.null_threshold,
            max_answer_length=data.max_answer_length,
            doc_stride=data.doc_stride,
            answerability=data.answerability,
            name=data.name,
            log=log,
        )
    if data.kind == "tagging":
        types = {x if data.scheme == "plain" else type_of(x) for x in data.labels} - {""}
        return TaggingTask(
            files,
            scheme=data.scheme or None,
            types=sorted(types) or None,
            name=data.name,
            log=log,
        )
    return TableTask(
        files,
        data.target,
        data.text,
        data.label,
        labels=data.labels or None,
        value_range=data.value_range or None,
        name=data.name,
    )


def encoder_config(config: ConfigDict) -> EncoderConfig:
    """Sizes and numerics of a completed configuration."""
    model = config.model
    return EncoderConfig(
        **{name: model[name] for name in SIZES},
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        remat=model.remat,
        scan_unroll=model.scan_unroll,
        dtype=compute_dtype(model.dtype),
    )


def make_objective(config: ConfigDict, task: Task) -> FineTuning:
    """The network and its loss."""
    head = HeadConfig(task.head.kind, max(1, len(task.head.labels)), config.head)
    return FineTuning(encoder_config(config), head)


def feature_rows(features: Arrays) -> FeatureRows:
    """What the network sees of `features`."""
    return FeatureRows({name: features[name] for name in INPUTS if name in features})
