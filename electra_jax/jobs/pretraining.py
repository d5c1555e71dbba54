"""Pre-training: text in, and an objective on two networks, as a job for the loop."""

import collections
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.checks import objective_for, validate
from electra_jax.config import settings
from electra_jax.data import layout, loader, sources
from electra_jax.data.layout import Rows
from electra_jax.data.preparation import prepare
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.inference import network_outputs
from electra_jax.interop.generator import generator_weights
from electra_jax.interop.pretrained import load_networks
from electra_jax.modeling.params import Params
from electra_jax.monitoring import health
from electra_jax.monitoring.display import log_line
from electra_jax.monitoring.window import add_up
from electra_jax.objectives import Objective, make_objective, metrics
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.reporting.gallery import Token, shaded
from electra_jax.run import processes
from electra_jax.run.interruption import Interruption
from electra_jax.run.workdir import check, has_checkpoint
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training import loop
from electra_jax.training.job import Data, Evaluator, Facts, Job, describe_step
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.prediction import Predict
from electra_jax.training.program import Program, program_of
from electra_jax.training.step import TrainState

Log = Callable[[str], None]

SHOWN_ROWS = 8  # held-out rows in the gallery of the report
SHOWN_PROPOSALS = 5


def pretrain(config: ConfigDict, workdir: Path) -> TrainState:
    """Pre-train by `config`, from the newest checkpoint in `workdir` if there is one.

    Returns:
      The final state.

    Raises:
      UserError: the configuration, the data or what `workdir` holds does not fit. In this case
        nothing has been written there.
      FloatingPointError, Stopped, OSError: as `train.run`.
    """
    validate(config, jax.device_count())
    check_workdir(config, workdir)
    with Interruption() as interruption:
        is_new = not has_checkpoint(workdir)
        return loop.run(config, workdir, make_job(config, is_new, log_line), interruption)


def make_job(config: ConfigDict, is_new: bool, log: Log) -> Job:
    """Prepares the data, and says what to do with them.

    Args:
      is_new: whether training begins; if it goes on, no weights to start from are read.

    Raises:
      UserError: the data do not fit the configuration, or cannot be read.
    """
    length, batch_size = config.data.sequence_length, config.batch_size
    store = processes.main_first(lambda: prepare(config.data, log))
    processes.check_equal(store.hash, "the token store")
    weights = sources.weights(sources.parse(config.data.source))
    rows, held_out = (
        layout.rows(
            store,
            split,
            length,
            config.data.layout,
            seed=config.seed,
            by_source=split == "train" and weights is not None,
        )
        for split in ("train", "held_out")
    )
    if len(rows) < batch_size:
        raise UserError(
            f"config.batch_size is {batch_size}, but config.data.source gives only "
            f"{len(rows)} rows of {length} tokens to train on"
        )
    if sentence := health.padding(1 - rows.real_tokens / (len(rows) * length), length):
        log(f"warning: {sentence}")
    warn_of_long_words(config, store.manifest["splits"]["train"], log)
    is_unigram = config.generator.kind == "unigram"
    counts = store.token_counts("train") if is_unigram else None
    objective = make_objective(config, store.tokenizer, counts)
    initial: dict[str, np.ndarray] = {}
    if is_new and config.init_from:
        initial |= load_networks(
            objective,
            store.tokenizer,
            log,
            init_from=config.init_from,
            init_missing=config.init_missing,
            init_resize=config.init_resize,
            seed=config.seed,
        )
    if is_new and config.generator.init_from:
        run = Path(config.generator.init_from)
        own = generator_weights(run, store.tokenizer, objective.structure())
        refuse_other_tables(config, initial, own)
        initial |= own

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

    flops_per_token = objective.flops_per_token(length)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = program_of(config, make_mesh(config.parallel), objective, optimizer)
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
        facts=describe(config, store.manifest["splits"], rows, held_out, flops_per_token),
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


def refuse_other_tables(
    config: ConfigDict, initial: dict[str, np.ndarray], own: dict[str, np.ndarray]
) -> None:
    """Raises UserError where what both networks share is not the same in both sources of weights.

    Args:
      initial: of `config.init_from`, by path.
      own: of `config.generator.init_from`; the generator's alone may be others.
    """
    for name in sorted(initial.keys() & own.keys()):
        if not name.startswith("generator/") and not np.array_equal(initial[name], own[name]):
            raise UserError(
                f"config.generator.init_from is {config.generator.init_from!r}, whose {name} is "
                f"not that of config.init_from = {config.init_from!r}; "
                "config.generator.sharing = 'none' has room for both"
            )


def make_show(
    config: ConfigDict, objective: Objective, tokenizer: Tokenizer, held_out: Rows
) -> Callable[[Params], list[list[Token]]]:
    """Compiles what shows some held-out rows, spread evenly; see `Evaluator.show`.

    Masks and samples are those of the evaluation.
    """
    if not isinstance(objective, ReplacedTokenDetection):
        return lambda params: []
    mesh = make_mesh(config.parallel)
    outputs = functools.partial(network_outputs.corrupted, objective, config.seed, SHOWN_PROPOSALS)
    predict = Predict(mesh, outputs)
    rows = np.unique(np.linspace(0, len(held_out) - 1, SHOWN_ROWS).astype(np.int32))
    split = mesh.shape["data"] * mesh.shape["fsdp"]
    filled = np.resize(rows, -(len(rows) // -split) * split)  # some for every device
    batch = held_out.batch(filled) | {"row": filled}

    def show(params: Params) -> list[list[Token]]:
        part, parts = predict.share
        own = slice(part * len(filled) // parts, (part + 1) * len(filled) // parts)
        found = jax.device_get(predict(params, {name: x[own] for name, x in batch.items()}))
        places = [int(np.flatnonzero(found["row"] == row)[0]) for row in rows]
        found = {name: x[places] for name, x in found.items()}
        return [text for i in range(len(rows)) for text in shaded(tokenizer, batch, found, i)]

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
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Metrics over every held-out row, each once; names start with `eval/`.

    None where `is_stopped`, asked before every batch, has said so.
    """
    totals: dict[str, np.ndarray] = {}
    running = collections.deque()
    for batch in loader.eval_batches(
        held_out,
        batch_size=batch_size,
        process_index=program.share[0],
        process_count=program.share[1],
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
    config: ConfigDict,
    splits: dict[str, dict],
    rows: Rows,
    held_out: Rows,
    flops_per_token: float,
) -> Facts:
    """Facts about the data and a step."""
    length = config.data.sequence_length
    filled = rows.real_tokens / (len(rows) * length)
    epochs = config.num_train_steps * config.batch_size / len(rows)
    return {
        "data": {
            "source": config.data.source,
            "documents": f"{splits['train']['documents']:,}",
            "rows": f"{len(rows):,}",
            "tokens": f"{rows.real_tokens:,}",
            "padding": f"{1 - filled:.2%}",
            "cut off": f"{rows.dropped_tokens / splits['train']['tokens']:.2%}",
            "epochs": f"{epochs:.2f}",
            "held-out documents": f"{splits['held_out']['documents']:,}",
            "held-out tokens": f"{held_out.real_tokens:,}",
        },
        "step": describe_step(config.batch_size * length, flops_per_token),
    }
