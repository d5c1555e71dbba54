"""Whole runs that take seconds: a corpus, a recipe, and the command that records its batches.

As a script, `tiny_run.py RECORD KILL_AT WORKDIR FLAGS...` is `electra_jax.main`, save that it
appends the step and the hash of every batch consumed to the file RECORD, and that it kills itself,
as hard as the system can, before step KILL_AT (0: never) but not before there is a checkpoint.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from stdlib_text import stdlib_documents

from electra_jax import cli, main
from electra_jax.data import loader

RECIPE = """
from electra_jax.config import get_config as default

def get_config():
    config = default()
    config.num_train_steps = 20
    config.batch_size = 8
    config.log_every_steps = 1
    config.eval_every_steps = 7
    config.data.update(source="corpus.txt", vocab_size=700, held_out=0.1, sequence_length=32)
    config.model.update(hidden_size=32, num_layers=2, embedding_size=32, max_positions=32)
    config.generator.update(width=1.0, depth=1.0)
    config.optimizer.update(learning_rate=2e-3, warmup_steps=2)
    config.checkpoint.every_steps = 7
    return config
"""


def make(directory: Path) -> None:
    """Write `corpus.txt` and `recipe.py`; runs are started in `directory`."""
    text = "\n\n".join("\n".join(document) for document in stdlib_documents())
    (directory / "corpus.txt").write_text(text)
    (directory / "recipe.py").write_text(RECIPE)


def snapshot(directory: Path) -> dict[str, str]:
    """Everything below `directory`, with a hash of what is in it."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in directory.rglob("*")
    }


def recorded(
    record: Path, kill_at: int, workdir: Path, start_step: int, batches: Iterator[dict]
) -> Iterator[dict]:
    for step, batch in enumerate(batches, start_step + 1):
        if step == kill_at:
            while not any(path.name.isdigit() for path in (workdir / "checkpoints").iterdir()):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        content = b"".join(batch[name].tobytes() for name in sorted(batch))
        with record.open("a") as file:
            file.write(f"{step} {hashlib.sha256(content).hexdigest()}\n")
        yield batch


if __name__ == "__main__":
    record, kill_at, workdir, *flags = sys.argv[1:]
    sys.argv[1:] = [f"--workdir={workdir}", *flags]
    train_batches = loader.train_batches
    loader.train_batches = lambda rows, start_step, *args, **kwargs: recorded(
        Path(record),
        int(kill_at),
        Path(workdir),
        start_step,
        train_batches(rows, start_step, *args, **kwargs),
    )
    cli.run(main.main)
