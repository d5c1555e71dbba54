"""Our training step against a PyTorch one, on the same data in one run.

    python benchmarks/step.py
    python benchmarks/step.py --batch_size=16 --rounds=5

The PyTorch step is what users of Hugging Face's classes write: `ElectraForMaskedLM` and
`ElectraForPreTraining` with the embeddings tied, the generator sampled with Gumbel noise, both
losses added, clipping, AdamW. Both train ELECTRA-Small (spec 1.1) in float32 with dropout 0.1 on
rows of English docstrings. The two steps alternate, so that what else the machine does hits both;
the ratio of the medians is the result.
"""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from electra_jax import cli
from electra_jax.config import get_config
from electra_jax.data import layout
from electra_jax.data.preparation import prepare
from electra_jax.objectives import make_objective
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import make_program

FLAGS = flags.FlagValues()
BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "rows in a batch", flag_values=FLAGS)
LENGTH = flags.DEFINE_integer("length", 128, "tokens in a row", flag_values=FLAGS)
ROUNDS = flags.DEFINE_integer("rounds", 7, "timed steps of each", flag_values=FLAGS)
THREADS = flags.DEFINE_integer("threads", 2, "CPU threads of PyTorch", flag_values=FLAGS)


def our_step(config, store) -> Callable[[dict[str, np.ndarray]], None]:
    """One compiled train step, as in a run."""
    objective = make_objective(config, store.tokenizer)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    mesh = make_mesh(config.parallel)
    program = make_program(mesh, objective, optimizer, config.seed)
    state = program.init()

    def step(batch: dict[str, np.ndarray]) -> None:
        nonlocal state
        state, _ = program.train_step(state, program.place(batch))
        jax.block_until_ready(state)

    return step


def torch_step(config, store) -> Callable[[dict[str, np.ndarray]], None]:
    """The same in PyTorch."""
    import torch
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    torch.manual_seed(config.seed)
    torch.set_num_threads(THREADS.value)
    tokenizer, model = store.tokenizer, config.model

    def sizes(width: int) -> ElectraConfig:
        return ElectraConfig(
            vocab_size=tokenizer.vocab_size,
            embedding_size=model.embedding_size,
            hidden_size=width,
            num_hidden_layers=model.num_layers,
            num_attention_heads=max(1, width // 64),
            intermediate_size=4 * width,
            hidden_dropout_prob=model.dropout,
            attention_probs_dropout_prob=model.attention_dropout,
            pad_token_id=tokenizer.pad_id,
        )

    discriminator = ElectraForPreTraining(sizes(model.hidden_size))
    generator = ElectraForMaskedLM(sizes(round(model.hidden_size * config.generator.width)))
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
        shared = getattr(discriminator.electra.embeddings, name)
        setattr(generator.electra.embeddings, name, shared)
    generator.tie_weights()
    parameters = list(dict.fromkeys([*generator.parameters(), *discriminator.parameters()]))
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.optimizer.learning_rate,
        betas=(config.optimizer.b1, config.optimizer.b2),
        eps=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
    )
    special = torch.tensor([tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id])

    def step(batch: dict[str, np.ndarray]) -> None:
        ids = torch.from_numpy(batch["input_ids"]).long()
        real = torch.from_numpy(batch["segment_ids"] > 0)
        noise = torch.rand(ids.shape).masked_fill(~real | torch.isin(ids, special), -1.0)
        num_masked = int(config.masking.rate * ids.shape[1])
        selected = torch.zeros_like(real).scatter(1, noise.topk(num_masked).indices, True)
        shown = selected & (torch.rand(ids.shape) < config.masking.mask_token_share)
        proposal = generator(
            input_ids=ids.masked_fill(shown, tokenizer.mask_id),
            attention_mask=real.long(),
            labels=ids.masked_fill(~selected, -100),
        )
        with torch.no_grad():
            logits = proposal.logits[selected]
            gumbel = -torch.log(-torch.log(torch.rand_like(logits) + 1e-9) + 1e-9)
            corrupted = ids.clone()
            corrupted[selected] = (logits + gumbel).argmax(-1)
        detection = discriminator(
            input_ids=corrupted,
            attention_mask=real.long(),
            labels=(corrupted != ids).long(),
        )
        loss = (
            config.loss.generator_weight * proposal.loss
            + config.loss.discriminator_weight * detection.loss
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm)
        optimizer.step()

    return step


def main() -> None:
    """Time both, print the ratio."""
    cli.parse(FLAGS, __doc__)
    config = get_config()
    config.batch_size = BATCH_SIZE.value
    config.data.sequence_length = LENGTH.value
    config.data.layout = "document"  # Hugging Face's classes do not know packed rows
    config.model.dtype = "float32"
    config.model.remat, config.model.scan_unroll = (
        "none",
        config.model.num_layers,
    )  # memory to spare
    store = prepare(config.data)
    rows = layout.rows(store, "train", LENGTH.value, config.data.layout)
    full = np.flatnonzero(rows.sizes == LENGTH.value - 2)[: 64 * BATCH_SIZE.value]

    def batch(number: int) -> dict[str, np.ndarray]:
        at = (number * BATCH_SIZE.value + np.arange(BATCH_SIZE.value)) % len(full)
        return rows.batch(full[at]) | {"row": np.arange(BATCH_SIZE.value, dtype=np.int32)}

    steps = {"electra_jax": our_step(config, store), "PyTorch": torch_step(config, store)}
    seconds = {name: [] for name in steps}
    for number in range(ROUNDS.value + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step(batch(number))
            seconds[name].append(time.perf_counter() - started)
    tokens = BATCH_SIZE.value * LENGTH.value
    medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    for name, times in seconds.items():
        spread = f"{min(times[2:]):.2f} to {max(times[2:]):.2f} s"
        print(f"{name:12} {tokens / medians[name]:8,.0f} tokens/s  ({spread} a step)")
    print(f"ratio        {medians['PyTorch'] / medians['electra_jax']:8.2f}")


if __name__ == "__main__":
    cli.run(main)
