import os
import signal
import subprocess
import sys
import time

import pytest
from stores import ENVIRONMENT

from electra_jax.data import workers
from electra_jax.data.workers import map_in_order
from electra_jax.errors import UserError

pytestmark = pytest.mark.process


def tell(number: int) -> tuple[int, int]:
    time.sleep(0.02 * (number % 3))  # not done in order
    return number, os.getpid()


def refuse_seven(number: int) -> int:
    if number == 7:
        raise UserError("found 7")
    return number


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(workers, "num_cores", lambda: 2)


def test_many_items_are_spread_over_processes_and_come_in_order(two_cores):
    numbers, processes = zip(*map_in_order(tell, range(40)), strict=True)
    assert numbers == tuple(range(40))
    assert len(set(processes)) == 2
    assert os.getpid() not in processes


def test_few_items_stay_here():
    assert list(map_in_order(tell, range(3))) == [(number, os.getpid()) for number in range(3)]
    assert list(map_in_order(tell, [])) == []


def test_items_are_taken_only_a_few_ahead(two_cores):
    taken = []
    results = map_in_order(refuse_seven, (taken.append(number) or -number for number in range(99)))
    assert next(results) == 0
    assert len(taken) < 12
    results.close()


def test_error_comes_in_its_place(two_cores):
    results = map_in_order(refuse_seven, range(30))
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(UserError, match="found 7"):
        next(results)


PROGRAM = """
import time
from electra_jax.data.workers import map_in_order

if __name__ == "__main__":
    for _ in map_in_order(time.sleep, [0.1] * 1000):
        print("one", flush=True)
"""


@pytest.fixture
def program(tmp_path):
    """A process with workers, in a group of its own, after its first result."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, path]
    process = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes)
    assert process.stdout.readline() == "one\n"
    yield process
    process.kill()


def test_interrupt_ends_all_processes_without_a_word_from_them(program):
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, errors = program.communicate(timeout=20)  # ends when no process holds the pipes any more
    assert errors.count("Traceback") == 1
    assert errors.strip().endswith("KeyboardInterrupt")


def test_workers_of_a_killed_process_end(program):
    program.kill()
    program.communicate(timeout=20)
