"""Several processes of one run on this machine, as a cluster would start them.

    python launch/local.py --processes=2 -- --config=configs/tiny.py --workdir=runs/two
    python launch/local.py --processes=2 --devices=4 -- --config=configs/tiny.py

What follows `--` goes to `python -m electra_jax.main`. Each process has `--devices` CPU devices. If
they stop with exit code 42, which says that they were interrupted and have saved, or by SIGTERM
before there was anything to save, they are started again. If one fails, the others are stopped. The
exit code is that of the first one to fail, or 0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

INTERRUPTED = 42
TERMINATED = -signal.SIGTERM
GRACE_SECONDS = 30


def start(
    number: int, processes: int, port: int, devices: int, arguments: list[str]
) -> subprocess.Popen:
    """One process of the run."""
    command = [
        *(sys.executable, "-m", "electra_jax.main", *arguments),
        f"--coordinator=localhost:{port}",
        f"--num_processes={processes}",
        f"--process_id={number}",
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    # In a group of its own: a terminal's Ctrl-C comes to this launcher, which passes it on once.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Run:
    """All processes of one attempt."""

    def __init__(self, processes: int, devices: int, arguments: list[str]):
        port = free_port()
        self.processes = [start(i, processes, port, devices, arguments) for i in range(processes)]

    def wait(self) -> int:
        """Waits until all have ended, or one has failed. Returns an exit code."""
        while True:
            codes = [process.poll() for process in self.processes]
            codes = [INTERRUPTED if code == TERMINATED else code for code in codes]
            failed = [code for code in codes if code not in (None, 0, INTERRUPTED)]
            if failed:
                self.stop()
                return failed[0] if failed[0] > 0 else 128 - failed[0]  # as shells say of signals
            if None not in codes:
                return max(codes)
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends what still runs: politely, then not."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    """Run until done, or until this launcher itself is told to stop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="how many")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each")
    parser.add_argument("arguments", nargs="+", help="flags of electra_jax.main, after --")
    options = parser.parse_args()
    attempts: list[Run] = []
    told: list[int] = []

    def pass_on(number: int, _) -> None:
        told.append(number)
        for process in attempts[-1].processes if attempts else ():
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    while True:
        attempts.append(Run(options.processes, options.devices, options.arguments))
        code = attempts[-1].wait()
        if code != INTERRUPTED or told:
            return code


if __name__ == "__main__":
    sys.exit(main())
