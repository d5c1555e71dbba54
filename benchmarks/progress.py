"""What the display costs: steps of configs/tiny.py with and without it, in turns in one run.

    python benchmarks/progress.py

The display is that of a terminal, drawn as often as it ever is; metrics are written, too. Printed
are milliseconds a step, and those that go into the display and the collection of metrics.
"""

import io
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from electra_jax.monitoring.console import Console
from electra_jax.monitoring.progress import Progress, compilations

from configs.tiny import get_config
from electra_jax.checks import model_config
from electra_jax.monitoring.writer import MetricWriter
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.masking import MaskingConfig
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import make_program

BLOCK, BLOCKS = 20, 30  # steps; blocks with the display, and as many without


class Terminal(io.StringIO):
    """A terminal that nobody looks at."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def main() -> None:
    """Measure and print."""
    config = get_config()
    vocab, length = config.data.vocab_size, config.data.sequence_length
    masking = MaskingConfig(**config.masking, vocab_size=vocab, mask_id=4, unmaskable_ids=(2, 3, 4))
    objective = ReplacedTokenDetection(model_config(config, vocab), masking)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = make_program(make_mesh(config.parallel), objective, optimizer, 0)
    ids = np.random.default_rng(0).integers(5, vocab, (config.batch_size, length), np.int32)
    ones = np.ones_like(ids)
    places = np.arange(length, dtype=np.int32)
    batch = {"input_ids": ids, "segment_ids": ones, "position_ids": ones * places}
    batch |= {"token_type_ids": 0 * ones, "row": np.arange(len(ids), dtype=np.int32)}
    batch = program.place(batch)
    state = program.init()

    with (
        tempfile.TemporaryDirectory() as workdir,
        MetricWriter(Path(workdir), 0) as writer,
        compilations() as compiled,
    ):
        console = Console(Terminal())
        console.is_live = True
        progress = Progress(
            BLOCK * BLOCKS, objective.loss_terms, None, compiled, writer.write, console, 400
        )
        state, sums = program.train_step(state, batch)
        progress.add(0, sums, ids.shape)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        inside = 0.0
        for block in range(2 * BLOCKS):
            has_display = block % 2 == 0
            started = time.perf_counter()
            for step in range(BLOCK):
                state, sums = program.train_step(state, batch)
                if has_display:
                    jax.block_until_ready(sums)  # so that what follows waits for nothing
                    before = time.perf_counter()
                    progress.add(block // 2 * BLOCK + step, sums, ids.shape)
                    if step == BLOCK - 1:
                        progress.close_window()
                    inside += time.perf_counter() - before
                else:
                    jax.block_until_ready(sums)
            seconds[has_display].append((time.perf_counter() - started) / BLOCK)
        milliseconds = {key: 1000 * statistics.median(found) for key, found in seconds.items()}
    share = inside / (BLOCK * BLOCKS) / statistics.median(seconds[True])
    print(f"with {milliseconds[True]:.2f} ms, without {milliseconds[False]:.2f} ms a step")
    print(f"display and metrics: {1e6 * inside / (BLOCK * BLOCKS):.0f} us a step, {share:.2%}")


if __name__ == "__main__":
    main()
