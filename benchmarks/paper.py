"""The recipes of `configs/paper/`: parameters and FLOPs of each row; and that each of them trains.

    python benchmarks/paper.py              a table of all rows in the paper's size
    python benchmarks/paper.py --steps=50   trains the tiny size of each for so many steps

FLOPs are those of a whole training, as the paper counts them and as we do: matrix products alone,
a backward pass as two forward passes, the vocabulary projected to where tokens are predicted.
"""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import paper_flops
from absl import flags
from ml_collections import ConfigDict

from electra_jax import cli
from electra_jax.checks import objective_for
from electra_jax.modeling.flops import train_flops_per_token
from electra_jax.monitoring.writer import read_metrics

ROOT = Path(__file__).parents[1]


def recipes() -> Iterator[tuple[Path, str, ConfigDict]]:
    """Every file with every row, in the paper's size."""
    for path in sorted((ROOT / "configs" / "paper").glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for row in module.ROWS:
            yield path, row, module.get_config(row)


def print_table() -> None:
    """As Markdown."""
    print("| recipe | parameters | FLOPs, paper's count | FLOPs, ours |\n| --- | --- | --- | --- |")
    for path, row, config in recipes():
        objective = objective_for(config)
        length = config.data.sequence_length
        predictions = objective.masking.max_predictions(length)
        per_token = train_flops_per_token(
            objective.model, length, predictions, objective.generator_passes
        )
        tokens = config.num_train_steps * config.batch_size * length
        total = per_token * tokens
        if share := objective.switch_step / config.num_train_steps:  # the generator alone
            alone = dataclasses.replace(objective.model, discriminator=None)
            first = train_flops_per_token(alone, length, predictions)
            total = (share * first + (1 - share) * per_token) * tokens
        parameters = sum(x.size for x in jax.tree.leaves(objective.structure()))
        published = paper_flops.train_flops(config, config.data.vocab_size)
        name = f"`{path.stem}.py:{row}`"
        print(f"| {name} | {parameters:,} | {published:.3e} | {total:.3e} |", flush=True)


def train_all(num_steps: int) -> None:
    """Trains every row at its tiny size; the token store is made once."""
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        for path, row, config in recipes():
            started = time.monotonic()
            workdir = Path(directory) / f"{path.stem}-{row}"
            command = [
                *(sys.executable, "-m", "electra_jax.main", f"--workdir={workdir}"),
                f"--config={path}:{row},tiny",
                *(f"--config.num_train_steps={num_steps}", "--config.log_every_steps=10"),
                f"--config.generator.mle_steps={num_steps // 2 * (config.algorithm != 'joint')}",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            name = f"{path.stem}.py:{row},tiny"
            if done.returncode:
                failed.append(name)
                print(f"{name}: exit code {done.returncode}\n{done.stderr}", flush=True)
                continue
            facts = json.loads((workdir / "facts.json").read_text())
            losses = [x["train/loss"] for x in read_metrics(workdir) if "train/loss" in x]
            if not all(map(math.isfinite, losses)):
                failed.append(name)
            print(
                f"{name}: {facts['parameters']['total']} parameters, "
                f"loss {losses[0]:.3f} to {losses[-1]:.3f}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def main() -> None:
    """The command."""
    values = flags.FlagValues()
    steps = flags.DEFINE_integer("steps", 0, "train for so many", lower_bound=0, flag_values=values)
    cli.parse(values, __doc__)
    train_all(steps.value) if steps.value else print_table()


if __name__ == "__main__":
    cli.run(main)
