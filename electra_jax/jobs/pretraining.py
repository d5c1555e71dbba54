"""Pre-training: text in, and an objective on two networks, as a job for the loop."""

import collections
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.checks import objective_for, validate
from electra_jax.config import settings
from electra_jax.data import layout, loader, sources
from electra_jax.data.features import FeatureRows
from electra_jax.data.layout import Rows
from electra_jax.data.preparation import prepare
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.inference import network_outputs
from electra_jax.interop.pretrained import load_networks
from electra_jax.modeling.params import Params
from electra_jax.monitoring import health
from electra_jax.monitoring.display import log_line
from electra_jax.monitoring.window import add_up
from electra_jax.objectives import Objective, make_objective, metrics
from electra_jax.objectives.base import Batch
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.reporting.gallery import Token, shaded
from electra_jax.run import processes
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import check, steps_in
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training import loop
from electra_jax.training.job import Data, Evaluator, Facts, IsStopped, Job, describe_step
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.prediction import Predict, predict_rows
from electra_jax.training.program import Program, program_of
from electra_jax.training.step import TrainState

Log = Callable[[str], None]

SHOWN_ROWS = 8  # held-out rows in the gallery of the report
SHOWN_PROPOSALS = 5


def pretrain(config: ConfigDict, workdir: Path) -> TrainState:
    """Pre-train by `config`, from the newest checkpoint in `workdir` if there is one.

    Returns the final state, and raises as `loop.run`. UserError says that the configuration, the
    data or what `workdir` holds does not fit; then nothing has been written there.
    """
    validate(config, jax.device_count())
    check_workdir(config, workdir)
    with Interruption() as interruption:
        is_new = not steps_in(workdir / "checkpoints")
        return loop.run(config, workdir, make_job(config, is_new, log_line), interruption)


def make_job(config: ConfigDict, is_new: bool, log: Log) -> Job:
    """Prepares the data, and says what to do with them; UserError where that does not fit.

    Only where training begins, `is_new`, are weights to start from read.
    """
    length, batch_size = config.data.sequence_length, config.batch_size
    store = processes.main_first(lambda: prepare(config.data, log))
    processes.check_equal(store.hash, "the token store")
    weights = sources.weights(sources.parse(config.data.source))
    shape = {"length": length, "layout": config.data.layout, "seed": config.seed}
    rows = layout.rows(store, "train", **shape, by_source=weights is not None)
    held_out = layout.rows(store, "held_out", **shape)
    if len(rows) < batch_size:
        raise UserError(
            f"config.batch_size is {batch_size}, but config.data.source gives only "
            f"{len(rows)} rows of {length} tokens to train on"
        )
    if sentence := health.padding(1 - rows.real_tokens / (len(rows) * length), length):
        log(f"warning: {sentence}")
    splits = store.manifest["splits"]
    warn_of_long_words(config, splits["train"], log)
    is_unigram = config.generator.kind == "unigram"
    counts = store.token_counts("train") if is_unigram else None
    objective = make_objective(config, store.tokenizer, counts)
    flops_per_token = objective.flops_per_token(length)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = program_of(config, make_mesh(config.parallel), objective, optimizer)
    initial: dict[str, np.ndarray] = {}
    if is_new and (config.init_from or config.generator.init_from):
        initial = load_networks(config, objective, store.tokenizer, log)

    def batches(start: int, share: tuple[int, int]) -> Iterator[dict[str, np.ndarray]]:
        return loader.train_batches(
            rows,
            start,
            config.num_train_steps - start,
            batch_size=batch_size,
            seed=config.seed,
            weights=weights or (1.0,),
            process_index=share[0],
            process_count=share[1],
            num_threads=config.data.num_threads,
            prefetch=config.data.prefetch,
        )

    return Job(
        objective=objective,
        program=program,
        num_steps=config.num_train_steps,
        data=Data(store.tokenizer, store.hash, batches),
        evaluator=Evaluator(
            run=lambda params, is_stopped: evaluate(
                program, objective, params, held_out, batch_size, is_stopped
            ),
            metrics=objective.measured,
            keep_best=config.checkpoint.keep_best,
            show=make_show(config, objective, store.tokenizer, held_out),
        ),
        initial=initial,
        facts=describe(config, splits, rows, held_out, flops_per_token),
        flops_per_token=flops_per_token,
        learned_from=health.begin_of(
            config.num_train_steps, config.optimizer.warmup_steps, objective.switch_step
        ),
        check=check_workdir,
    )


def check_workdir(config: ConfigDict, workdir: Path) -> list[str]:
    """See `workdir.check`."""
    return check(config, workdir, settings(), fits)


def fits(before: ConfigDict, now: ConfigDict, step: int) -> bool:
    """Whether both configurations have the same parameters, and at `step` the same stage.

    A second stage that has begun began with a copy of the generator, which is not made again.
    """
    was, becomes = (objective_for(x, before.data.vocab_size) for x in (before, now))
    switches = {was.switch_step, becomes.switch_step}
    return was.structure() == becomes.structure() and (len(switches) == 1 or min(switches) > step)


def make_show(
    config: ConfigDict, objective: Objective, tokenizer: Tokenizer, held_out: Rows
) -> Callable[[Params], list[list[Token]]]:
    """Compiles what shows some held-out rows, spread evenly; see `Evaluator.show`.

    Masks and samples are those of the evaluation.
    """
    if not isinstance(objective, ReplacedTokenDetection):
        return lambda params: []
    mesh = make_mesh(config.parallel)
    numbers = np.unique(np.linspace(0, len(held_out) - 1, SHOWN_ROWS).astype(np.int32))
    rows = held_out.batch(numbers) | {"number": numbers}
    batch_size = -(len(numbers) // -mesh.size) * mesh.size  # some for every device

    def outputs(params: Params, batch: Batch) -> network_outputs.Outputs:
        batch = batch | {"row": batch["number"]}
        return network_outputs.corrupted(objective, config.seed, SHOWN_PROPOSALS, params, batch)

    predict = Predict(mesh, outputs)

    def show(params: Params) -> list[list[Token]]:
        found = predict_rows(predict, params, FeatureRows(rows), batch_size)
        return [text for i in range(len(numbers)) for text in shaded(tokenizer, rows, found, i)]

    return show


def warn_of_long_words(config: ConfigDict, counts: dict[str, int], log: Log) -> None:
    """Say so when whole words are to be masked in a script that does not separate them."""
    tokens_per_word = counts["tokens"] / counts["words"]
    if config.masking.unit != "token" and tokens_per_word > 3:
        log(
            f"warning: config.masking.unit is {config.masking.unit!r}, but words have "
            f"{tokens_per_word:.1f} tokens on average here; words that exceed a row's share of "
            "predictions are never masked, and fewer tokens are predicted than asked for"
        )


def evaluate(
    program: Program,
    objective: Objective,
    params: Params,
    held_out: Rows,
    batch_size: int,
    is_stopped: IsStopped = lambda: False,
) -> dict[str, float] | None:
    """Metrics over every held-out row, each once; names start with `eval/`.

    None where `is_stopped`, asked before every batch, has said so.
    """
    totals: dict[str, np.ndarray] = {}
    running = collections.deque()
    part, parts = program.share
    for batch in loader.eval_batches(
        held_out, batch_size=batch_size, process_index=part, process_count=parts
    ):
        if is_stopped():
            return None
        running.append(program.eval_step(params, program.place(batch)))
        if len(running) > 4:  # the device always has work, and memory stays flat
            totals = add_up([totals, jax.device_get(running.popleft())])
    totals = add_up([totals, *jax.device_get(list(running))])
    values = metrics.summarize(totals, objective.loss_terms)
    return {f"eval/{name}": value for name, value in values.items()}


def describe(
    config: ConfigDict, splits: dict[str, dict], rows: Rows, held_out: Rows, flops_per_token: float
) -> Facts:
    """Facts about the data and a step."""
    num_tokens = config.batch_size * config.data.sequence_length
    filled = rows.real_tokens / (len(rows) * config.data.sequence_length)
    return {
        "data": {
            "source": config.data.source,
            "documents": f"{splits['train']['documents']:,}",
            "rows": f"{len(rows):,}",
            "tokens": f"{rows.real_tokens:,}",
            "padding": f"{1 - filled:.2%}",
            "cut off": f"{rows.dropped_tokens / splits['train']['tokens']:.2%}",
            "epochs": f"{config.num_train_steps * config.batch_size / len(rows):.2f}",
            "held-out documents": f"{splits['held_out']['documents']:,}",
            "held-out tokens": f"{held_out.real_tokens:,}",
        },
        "step": describe_step(num_tokens, flops_per_token),
    }
