import jax
import pytest

from electra_jax.monitoring.profiling import profiled


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: found.append(f"start {path}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


@pytest.mark.parametrize(
    "steps, end, expected",
    [
        ((), 9, "5 6 7 8 9"),
        ((6, 7), 9, "5 start 6 7 wait stop 8 9"),
        ((6, 6), 9, "5 start 6 wait stop 7 8 9"),
        ((9, 9), 9, "5 6 7 8 start 9 wait stop"),
        ((8, 12), 9, "5 6 7 start 8 9 stop"),  # the run ends before
        ((2, 7), 9, "5 6 7 8 9"),  # it goes on from within
    ],
)
def test_steps_of_the_window_are_profiled(calls, tmp_path, steps, end, expected):
    batches = profiled(
        iter([{}] * (end - 4)), 4, steps, tmp_path, lambda: calls.append("wait") or []
    )
    for step, _ in enumerate(batches, 5):
        calls.append(str(step))
    assert " ".join(calls) == expected.replace("start", f"start {tmp_path}")


def test_profiler_is_off_after_a_failure(calls, tmp_path):
    batches = profiled(iter([{}] * 3), 0, (1, 3), tmp_path, list)
    next(batches)
    batches.close()
    assert calls == [f"start {tmp_path}", "stop"]
