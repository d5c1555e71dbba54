"""Our fine-tuning against a plain PyTorch loop, on the same GLUE task and weights in one run.

    python benchmarks/finetune.py --source=glue --task=mrpc --weights=DIRECTORY --max_length=80

The PyTorch loop is what most people write: `transformers.AutoModel`, a linear layer on `[CLS]`,
shuffled rows padded to the longest of their batch, clipping, AdamW. Ours has batches of rows of
like length. Both train in float32 with dropout 0.1; what compiling takes is printed apart. The two
alternate, so that what else the machine does hits both; the ratio of the sums is the result.
"""

import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from electra_jax import cli
from electra_jax.finetune.config import get_config, make_task
from electra_jax.finetune.heads.sentence import Regression, SentenceHead
from electra_jax.interop.pretrained import load_encoder
from electra_jax.jobs import finetuning
from electra_jax.training.job import Job
from electra_jax.training.program import Program

FLAGS = flags.FlagValues()
SOURCE = flags.DEFINE_string("source", "glue", "directory of the GLUE files", flag_values=FLAGS)
TASK = flags.DEFINE_string("task", "mrpc", "mrpc, stsb, sst2, ...", flag_values=FLAGS)
WEIGHTS = flags.DEFINE_string(
    "weights", None, "Hugging Face directory of the encoder", required=True, flag_values=FLAGS
)
MAX_LENGTH = flags.DEFINE_integer("max_length", 128, "tokens in a row", flag_values=FLAGS)
STEPS = flags.DEFINE_integer("steps", 40, "timed steps of each", flag_values=FLAGS)
THREADS = flags.DEFINE_integer("threads", 2, "CPU threads of PyTorch", flag_values=FLAGS)
Batch = dict[str, np.ndarray]


def our_step(program: Program) -> Callable[[Batch], None]:
    """One compiled train step, as in a run."""
    state = program.init()

    def step(batch: Batch) -> None:
        nonlocal state
        state, _ = program.train_step(state, program.place(batch))
        jax.block_until_ready(state)

    return step


def torch_step(config, head: SentenceHead) -> Callable[[Batch], None]:
    """The same in PyTorch."""
    import torch
    from transformers import AutoModel

    torch.manual_seed(config.seed)
    torch.set_num_threads(THREADS.value)
    encoder = AutoModel.from_pretrained(
        WEIGHTS.value,
        hidden_dropout_prob=config.model.dropout,
        attention_probs_dropout_prob=config.model.attention_dropout,
    ).train()
    layers = torch.nn.Sequential(
        torch.nn.Dropout(config.model.dropout),
        torch.nn.Linear(encoder.config.hidden_size, len(head.labels) or 1),
    )
    parameters = [*encoder.parameters(), *layers.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.learning_rate)

    def step(batch: Batch) -> None:
        width = batch["segment_ids"].sum(axis=1).max()
        ids, real, types = (
            torch.from_numpy(batch[name][:, :width]).long()
            for name in ("input_ids", "segment_ids", "token_type_ids")
        )
        states = encoder(input_ids=ids, attention_mask=real, token_type_ids=types)
        outputs = layers(states.last_hidden_state[:, 0])
        labels = torch.from_numpy(batch["label"])
        if isinstance(head, Regression):
            loss = torch.nn.functional.mse_loss(outputs[:, 0], labels)
        else:
            loss = torch.nn.functional.cross_entropy(outputs, labels.long())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
        optimizer.step()

    return step


def make_job(config, length_buckets: int, *parts) -> Job:
    """That of a run, for its program and its batches; `parts` are those of `Trials`."""
    config = config.copy_and_resolve_references()
    config.data.length_buckets = length_buckets
    trials = finetuning.Trials(config, *parts)
    return trials.job(trials.program, (config.seed,), lambda *_: None)


def main() -> None:
    """Time both, print the ratio."""
    cli.parse(FLAGS, __doc__)
    config = get_config()
    config.data.name, config.data.source = TASK.value, SOURCE.value
    config.data.max_length = MAX_LENGTH.value
    config.optimizer.learning_rate, config.optimizer.layerwise_decay = 5e-5, 1.0
    pretrained = load_encoder(WEIGHTS.value)
    config.model.remat = "none"  # memory to spare
    config.model.scan_unroll = pretrained.encoder_config.num_layers
    task = make_task(config, print)
    parts = task, pretrained
    job, shuffled = (make_job(config, n, *parts) for n in (config.data.length_buckets, 1))
    ours, theirs = our_step(job.program), torch_step(config, task.head)
    widths = job.facts["data"]["padded to"].split(" or ")
    started, compiled = time.perf_counter(), set()
    for batch in job.data.batches(0, (0, 1)):
        if len(compiled) == len(widths):
            break
        if batch["input_ids"].shape not in compiled:
            ours(batch)
            compiled.add(batch["input_ids"].shape)
    compiling = time.perf_counter() - started
    print(f"{TASK.value}: compiled for {', '.join(widths)} tokens in {compiling:.1f} s")
    steps = {
        "electra_jax": (ours, job.data.batches(0, (0, 1))),
        "PyTorch": (theirs, shuffled.data.batches(0, (0, 1))),
    }
    seconds = dict.fromkeys(steps, 0.0)
    for number in range(STEPS.value + 2):
        for name, (step, source) in steps.items():
            batch = next(source)
            begun = time.perf_counter()
            step(batch)
            seconds[name] += (time.perf_counter() - begun) * (number >= 2)
    for name, total in seconds.items():
        rate = STEPS.value * config.batch_size / total
        print(f"{name:12} {rate:6.1f} examples/s  ({1000 * total / STEPS.value:.0f} ms a step)")
    print(f"ratio        {seconds['PyTorch'] / seconds['electra_jax']:6.2f}")


if __name__ == "__main__":
    cli.run(main)
