"""A run of 200 steps that is killed and told to stop again and again, against one that is not.

    make soak
    python tests/soak.py --seed=3 --kills=5 --stops=3

SIGKILL and SIGTERM come at moments drawn from the seed: while Python starts, while the run restores
and compiles, and between any two instructions of the loop, evaluations and saves. In the end both
runs must have the same parameters and moments to the bit, the same metric lines and the same
batches. Takes about five minutes. Exit code 0 says that they have.
"""

import argparse
import random
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import tiny_run

from electra_jax.run.interruption import EXIT_CODE

STEPS = 200
# Nothing divides anything else: windows, evaluations and checkpoints cut each other everywhere.
FLAGS = (
    f"--config.num_train_steps={STEPS}",
    "--config.log_every_steps=5",
    "--config.eval_every_steps=17",
    "--config.checkpoint.every_steps=7",
    "--config.checkpoint.keep=2",
)
START_SECONDS = 6.0  # about what Python, restoring and compiling from a cache take


def interrupt(place: Path, number: signal.Signals, last_step: int, rng: random.Random) -> str:
    """Starts the run and sends it a signal; returns what came of it.

    Every third comes at any time after the start, the others once `last_step` is logged.
    """
    process = tiny_run.start(place, "soak", *FLAGS)
    is_early = rng.random() < 1 / 3
    delay = rng.uniform(0, START_SECONDS) if is_early else rng.uniform(0, 0.5)
    deadline = threading.Timer(60, process.kill)
    deadline.start()
    if not is_early:
        for line in process.stdout:
            logged = re.match(r"step ([\d,]+)/", line)
            if logged and int(logged[1].replace(",", "")) >= last_step:
                break
    time.sleep(delay)
    process.send_signal(number)
    process.communicate()
    deadline.cancel()
    code = process.returncode
    # Before the first step, SIGTERM ends it like any other program.
    allowed = {-number} if number == signal.SIGKILL else {EXIT_CODE, *((-number,) * is_early)}
    assert code in allowed | {0}, f"{number.name}: exit code {code}"
    moment = "while starting" if is_early else f"{delay:.2f} s after step {last_step}"
    newest = tiny_run.newest(place / "soak")
    return f"{number.name} {moment}: exit code {code}, newest checkpoint {newest}"


def main() -> None:
    """Run both, compare, and say what was compared."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kills", type=int, default=20, help="times SIGKILL")
    parser.add_argument("--stops", type=int, default=10, help="times SIGTERM")
    options = parser.parse_args()
    rng = random.Random(options.seed)  # noqa: S311 - no secret

    place = tiny_run.make(Path(tempfile.mkdtemp(prefix="soak-")))
    started = time.monotonic()
    straight = tiny_run.run(place, "straight", *FLAGS)
    assert straight.returncode == 0, straight.stderr
    print(f"{STEPS} steps without a signal: {time.monotonic() - started:.0f} s", flush=True)

    numbers = [signal.SIGKILL] * options.kills + [signal.SIGTERM] * options.stops
    rng.shuffle(numbers)
    started = time.monotonic()
    for count, number in enumerate(numbers, 1):
        # Signals are spread over the run: each may come before its share of the steps is done.
        target = (
            max(tiny_run.newest(place / "soak"), (STEPS - 10) * (count - 1) // len(numbers)) + 1
        )
        print(f"{count:3}", interrupt(place, number, target, rng), flush=True)
    last = tiny_run.run(place, "soak", *FLAGS)
    assert last.returncode == 0, last.stderr
    print(f"with {len(numbers)} signals: {time.monotonic() - started:.0f} s")

    tiny_run.assert_same_run(place / "soak", place / "straight", STEPS)
    lines = tiny_run.lines(place / "soak")
    logged = [line["step"] for line in lines if "train/loss" in line]
    assert logged == list(range(5, STEPS + 1, 5)), logged
    found = tiny_run.batches(place / "soak")
    assert found == tiny_run.batches(place / "straight")
    again = sum(1 for _ in (place / "soak.batches").open()) - STEPS
    print(
        f"the same: {len(tiny_run.arrays(place / 'soak', STEPS))} arrays to the bit, {len(lines)} "
        f"metric lines, {len(found)} batches; {again} steps were done more than once"
    )


if __name__ == "__main__":
    main()
