"""What the display costs: steps of configs/tiny.py with and without it, in turns in one run.

    python benchmarks/progress.py

The display is that of a terminal, drawn as often as it ever is; metrics are written, too. Printed
are milliseconds a step, and those that go into the display and the collection of metrics.
"""

import io
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from configs.tiny import get_config
from electra_jax.checks import objective_for
from electra_jax.monitoring.display import Display
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import Restored
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import make_program
from electra_jax.training.recorder import Recorder

BLOCK, BLOCKS = 20, 30  # steps; blocks with the display, and as many without


class Terminal(io.StringIO):
    """A terminal that nobody looks at."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def main() -> None:
    """Measure and print."""
    os.environ["TERM"] = "xterm"
    config = get_config()
    objective = objective_for(config)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    program = make_program(make_mesh(config.parallel), objective, optimizer, 0)
    shape = config.batch_size, config.data.sequence_length
    ids = np.random.default_rng(0).integers(5, config.data.vocab_size, shape, np.int32)
    ones = np.ones_like(ids)
    places = np.arange(shape[1], dtype=np.int32)
    batch = {"input_ids": ids, "piece_ids": ones, "position_ids": ones * places}
    batch |= {"token_type_ids": 0 * ones, "row": np.arange(len(ids), dtype=np.int32)}
    batch = program.place(batch)
    state = program.init()
    job = SimpleNamespace(
        objective=objective,
        num_steps=BLOCK * BLOCKS,
        learned_from=0,
        peak_tokens_per_second=None,
        evaluator=SimpleNamespace(metrics=objective.metrics),
    )

    with (
        tempfile.TemporaryDirectory() as workdir,
        Display(Terminal()) as display,
        Recorder(config, Path(workdir), job, display, Restored(0, state, {})) as recorder,
    ):
        state, sums = program.train_step(state, batch)
        recorder.add(0, sums, ids.shape)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        inside = 0.0
        for block in range(2 * BLOCKS):
            has_display = block % 2 == 0
            started = time.perf_counter()
            for step in range(BLOCK):
                state, sums = program.train_step(state, batch)
                jax.block_until_ready(sums)  # so that what follows waits for nothing
                if has_display:
                    before = time.perf_counter()
                    recorder.add(block // 2 * BLOCK + step, sums, ids.shape)
                    if step == BLOCK - 1:
                        recorder.close_window()
                    inside += time.perf_counter() - before
            seconds[has_display].append((time.perf_counter() - started) / BLOCK)
        milliseconds = {key: 1000 * statistics.median(found) for key, found in seconds.items()}
    share = inside / (BLOCK * BLOCKS) / statistics.median(seconds[True])
    print(f"with {milliseconds[True]:.2f} ms, without {milliseconds[False]:.2f} ms a step")
    print(f"display and metrics: {1e6 * inside / (BLOCK * BLOCKS):.0f} us a step, {share:.2%}")


if __name__ == "__main__":
    main()
