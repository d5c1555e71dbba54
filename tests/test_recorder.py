"""What a run says of itself while it trains: means of windows, rates, lines, warnings."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict

from electra_jax.monitoring import rates
from electra_jax.monitoring.rates import compilations
from electra_jax.monitoring.window import add_up
from electra_jax.objectives.metrics import Metric
from electra_jax.training import recorder
from electra_jax.training.checkpoint import Restored
from electra_jax.training.recorder import Recorder

TOKENS = 100.0
SPEED = {"tokens_per_second", "input_wait", "mfu"}


class Run:
    """A recorder with a clock that stands still unless it is moved, and all that comes out."""

    def __init__(
        self,
        monkeypatch,
        peak: float | None = None,
        max_skipped: int = 0,
        saved: dict | None = None,
    ):
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        for module in (rates, recorder):
            monkeypatch.setattr(module, "time", clock)
        self.lines: list[str] = []
        self.drawn: list[list[str]] = []
        self.written: list[tuple[int, dict]] = []
        self.reports: list[int] = []
        self.compilations: list[float] = []
        objective = tiny.objective()
        self.display = types.SimpleNamespace(
            is_live=False, log=self.lines.append, status=self.drawn.append
        )
        self.recorder = Recorder(
            ConfigDict(
                {"max_skipped_updates": max_skipped, "histograms": False}
                | {"checkpoint": {"every_steps": 500}}
            ),
            types.SimpleNamespace(
                objective=objective,
                num_steps=2000,
                learned_from=2000,
                peak_tokens_per_second=peak,
                evaluator=types.SimpleNamespace(metrics=objective.metrics, show=lambda x: []),
            ),
            Restored(0, None, {"progress": saved} if saved else {}),
            self.display,
            types.SimpleNamespace(
                metrics=lambda step, values: self.written.append((step, values)),
                evaluation=lambda *parts: self.reports.append(len(self.written)),
            ),
            self.compilations,
        )

    def catch_up(self) -> None:
        self.now += 1.0
        self.recorder.catch_up()

    def step(
        self,
        step: int,
        seconds: float = 1.0,
        close: bool = False,
        shape: tuple[int, int] = (8, 16),
        **changes,
    ) -> None:
        """One step of the loop, whose predecessor took `seconds`."""
        self.now += seconds
        self.recorder.add(step, sums(**changes), shape)
        if close:
            self.recorder.close_window()

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning")]


def sums(**changes) -> dict[str, jax.Array]:
    pairs = {
        "mlm_loss": (60.0, 10.0),
        "rtd_loss": (50.0, 100.0),
        "learning_rate": (1e-3, 1.0),
        "grad_norm": (2.0, 1.0),
        "tokens": (TOKENS, 1.0),
        **changes,
    }
    return {name: jnp.array(pair) for name, pair in pairs.items()}


def test_window_is_averaged_by_weight(monkeypatch):
    run = Run(monkeypatch)
    run.step(1, mlm_loss=(60.0, 10.0), grad_norm=(1.0, 1.0))
    run.step(2, mlm_loss=(70.0, 30.0), grad_norm=(3.0, 1.0), close=True)
    run.step(3, mlm_loss=(999.0, 1.0))
    ((step, values),) = run.written
    assert step == 2
    assert values["train/mlm_loss"] == pytest.approx(130 / 40)
    assert values["train/rtd_loss"] == pytest.approx(0.5)
    assert values["train/loss"] == pytest.approx(130 / 40 + 50 * 0.5)
    assert values["grad_norm"] == pytest.approx(2.0)
    assert values["learning_rate"] == pytest.approx(1e-3)
    assert not {"tokens", "train/tokens", "train/grad_norm"} & values.keys()


def test_each_step_is_in_one_window(monkeypatch):
    run = Run(monkeypatch)
    for step in range(1, 8):
        run.step(step, mlm_loss=(10.0 * step, 10.0), close=step % 3 == 0)
    assert [step for step, _ in run.written] == [3, 6]
    assert [values["train/mlm_loss"] for _, values in run.written] == pytest.approx([2.0, 5.0])
    run.recorder.report()
    assert len(run.written) == 2


def test_nothing_is_fetched_before_the_next_step_is_dispatched(monkeypatch):
    run = Run(monkeypatch)
    fetched = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(len(x)) or device_get(x))
    run.step(1)
    run.step(2)
    run.step(3, close=True)
    assert fetched == []
    run.step(4)
    assert fetched == [3]  # once, the whole window
    run.step(5)
    assert fetched == [3]


def test_first_step_counts_for_no_rate(monkeypatch):
    run = Run(monkeypatch)
    run.step(1, seconds=500.0)
    run.step(2, seconds=0.0)
    run.step(3, seconds=2.0, close=True)
    run.step(4, seconds=2.0)
    assert run.written[0][1]["tokens_per_second"] == pytest.approx(2 * TOKENS / 4)


def test_first_step_of_another_shape_counts_for_no_rate_and_is_no_surprise(monkeypatch):
    run = Run(monkeypatch)
    batches = iter(run.recorder.rates.timed({"row": np.array([0])} for _ in range(6)))
    for step, (shape, seconds) in enumerate(
        [((8, 16), 500.0), ((8, 16), 2.0), ((8, 24), 300.0), ((8, 16), 2.0), ((8, 24), 4.0)], 1
    ):
        next(batches)
        if seconds > 100:
            run.compilations.append(seconds - 3)
        run.step(step, seconds, shape=shape, close=step == 5)
    next(batches)
    run.step(6, 0.0)
    assert ["497.0 s" in run.lines[0], "8 x 16" in run.lines[0]] == [True, True]
    assert ["297.0 s" in run.lines[1], "8 x 24" in run.lines[1]] == [True, True]
    assert run.warnings == []
    assert run.written[0][1]["tokens_per_second"] == pytest.approx(3 * TOKENS / 8)


def test_window_of_the_first_step_alone_has_no_rate_and_no_time_left(monkeypatch):
    run = Run(monkeypatch)
    run.step(7, close=True)  # as after resuming from a checkpoint
    run.step(8)
    assert "tokens_per_second" not in run.written[0][1]
    assert "left" not in run.lines[-1]


def test_pauses_count_for_no_rate(monkeypatch):
    run = Run(monkeypatch)
    run.step(1, close=True)
    run.step(2, seconds=0.0, close=True)
    run.now += 2.0
    run.recorder.report()
    with run.recorder.paused():
        run.now += 300.0
    run.step(3, seconds=0.0, close=True)
    run.step(4, seconds=5.0)
    found = [values.get("tokens_per_second") for _, values in run.written]
    assert found == [None, pytest.approx(TOKENS / 2), pytest.approx(TOKENS / 5)]


def test_utilization_is_the_rate_over_its_peak(monkeypatch):
    run = Run(monkeypatch, peak=400.0)
    run.step(1, close=True)
    run.step(2, seconds=0.0, close=True)
    run.step(3, seconds=1.0)
    assert run.written[1][1]["mfu"] == pytest.approx(0.25)
    assert "mfu 25.0%" in run.lines[-1]


def test_line_tells_place_quality_speed_and_time_left(monkeypatch):
    run = Run(monkeypatch)
    for step in range(998, 1002):
        run.step(step, close=step == 1000, seconds=0.0 if step == 999 else 2.0)
    assert run.lines[-1].split("  ") == [
        "step 1,000/2,000 (50%)",
        *("loss 31", "mlm 6", "rtd 0.5", "50 tokens/s", "33 m 20 s left"),
        "next checkpoint at 1,500",
    ]


def test_evaluation_is_written_and_shown_and_then_reported(monkeypatch):
    run = Run(monkeypatch)
    results = {"eval/loss": 31.0, "eval/rtd_auc": 0.91239, "eval/rtd_precision": 0.5}
    run.recorder.evaluated(1000, results, {})
    assert run.written == [(1000, results)] and run.reports == [1]
    assert run.lines[-1].split("  ")[1:] == ["loss 31", "auc 0.9124", "precision 0.5"]


def test_metric_of_an_objective_from_elsewhere_is_shown(monkeypatch):
    run = Run(monkeypatch)
    run.recorder.job.evaluator.metrics = {"surprise": Metric("surprise", console="surprise")}
    run.recorder.evaluated(7, {"eval/surprise": 0.25, "eval/loss": 1.0}, {})
    assert run.lines[-1].split("  ")[1:] == ["surprise 0.25"]


def test_first_step_that_is_not_finite_is_named_and_nothing_is_written(monkeypatch):
    run = Run(monkeypatch)
    run.step(11)
    run.step(12, mlm_loss=(np.nan, 10.0), grad_norm=(np.inf, 1.0))
    run.step(13, rtd_loss=(np.nan, 10.0), close=True)
    with pytest.raises(FloatingPointError, match=r"^step 12: grad_norm, mlm_loss not finite"):
        run.recorder.report()
    assert run.written == []


def test_window_goes_on_where_an_interrupted_run_was(monkeypatch):
    """To the bit: what is carried over is the double precision sum, as JSON."""
    values = {step: (step / 3, 1 / 7) for step in range(1, 7)}
    straight = Run(monkeypatch)
    for step in range(1, 7):
        straight.step(step, mlm_loss=values[step], close=step in (3, 6))
    straight.catch_up()
    first = Run(monkeypatch)
    for step in range(1, 6):
        first.step(step, mlm_loss=values[step], close=step == 3)
    first.catch_up()
    assert [step for step, _ in first.written] == [3]
    saved = json.loads(json.dumps(first.recorder.window.to_save()))
    second = Run(monkeypatch, saved=saved)
    second.step(6, mlm_loss=values[6], close=True)
    second.catch_up()
    without_speed = [
        {name: value for name, value in row.items() if name not in SPEED}
        for row in (straight.written[1][1], second.written[0][1])
    ]
    assert without_speed[0] == without_speed[1]
    assert second.written[0][0] == 6


ILL = {"mlm_loss": (np.nan, 10.0), "grad_norm": (np.inf, 1.0)}


def test_skipped_updates_count_for_no_mean_and_are_counted(monkeypatch):
    run = Run(monkeypatch, max_skipped=1)
    run.step(1, mlm_loss=(10.0, 10.0))
    run.step(2, **ILL)
    run.step(3, mlm_loss=(30.0, 10.0))
    run.step(4, **ILL, close=True)
    run.step(5, close=True)
    run.step(6, **ILL, close=True)
    run.catch_up()
    rows = [values for _, values in run.written]
    assert [row["skipped_updates"] for row in rows] == [2.0, 0.0, 1.0]
    assert rows[0]["train/mlm_loss"] == 2.0
    assert rows[0]["grad_norm"] == 2.0
    assert rows[2].keys() - SPEED == {"learning_rate", "skipped_updates"}
    assert run.warnings[0].startswith("warning: step 2: grad_norm, mlm_loss not finite")


def test_too_many_skipped_updates_in_a_row_stop_the_run_even_across_an_interruption(monkeypatch):
    run = Run(monkeypatch, max_skipped=2)
    run.step(1, **ILL)
    run.step(2, close=True)
    run.step(3, **ILL, close=True)
    run.step(4, **ILL)
    run.catch_up()
    resumed = Run(monkeypatch, max_skipped=2, saved=run.recorder.window.to_save())
    resumed.step(5, **ILL)
    message = "^step 5: grad_norm, mlm_loss not finite after 2 skipped updates"
    with pytest.raises(FloatingPointError, match=message):
        resumed.catch_up()


class Sometimes:
    """Sums of a step that the device may not have finished."""

    def __init__(self, is_ready: bool):
        self.is_ready = lambda: is_ready


@pytest.mark.parametrize("is_ready, share", [(True, 0.75), (False, 0.0)])
def test_waiting_for_batches_counts_when_the_device_has_nothing_to_do(monkeypatch, is_ready, share):
    run = Run(monkeypatch)

    def slow():
        for step in range(1, 4):
            run.now += 3.0
            yield {"row": np.array([step])}

    for step, _ in enumerate(run.recorder.rates.timed(slow()), 1):
        run.step(step, seconds=1.0, close=step == 3)
        run.recorder.rates.newest = {"loss": Sometimes(is_ready)}
    run.recorder.report()
    ((_, values),) = run.written
    assert values["input_wait"] == pytest.approx(share)
    assert any("75%" in line and "config.data." in line for line in run.warnings) == bool(share)


def test_evaluation_that_is_not_finite_is_named_and_not_written(monkeypatch):
    run = Run(monkeypatch)
    with pytest.raises(FloatingPointError, match=r"^step 40: eval/loss not finite"):
        run.recorder.evaluated(40, {"eval/loss": float("nan"), "eval/mlm_loss": 2.0}, {})
    assert run.written == []


def test_compilations_after_the_first_step_are_warned_of(monkeypatch):
    run = Run(monkeypatch)
    run.compilations += [1.5, 2.0]
    run.step(1)
    assert len(run.lines) == 1 and "3.5 s" in run.lines[0]
    run.step(2, close=True)
    run.step(3)
    assert run.warnings == []
    with run.recorder.paused():
        run.compilations.append(1.0)  # the evaluation's own
        run.recorder.evaluated(3, {"eval/loss": 1.0}, {})
    run.compilations.append(1.0)
    run.step(4, close=True)
    run.step(5)
    assert len(run.warnings) == 1 and "step 4: 1 compilations" in run.warnings[0]
    run.step(6, close=True)
    run.step(7)
    assert len(run.warnings) == 1


def test_compilations_are_counted_inside_the_block_only():
    x = jnp.ones(3)
    with compilations() as seconds:
        double = jax.jit(lambda x: x * 2 + 1)
        double(x)
        assert len(seconds) == 1
        double(x)
        assert len(seconds) == 1
    jax.jit(lambda x: x * 3 + 1)(x)
    assert len(seconds) == 1


def test_sums_are_added_in_double_precision():
    parts = [{"count": np.array([1.0, 2**24], np.float32)}, {"count": np.ones(2, np.float32)}]
    total = add_up(parts)["count"]
    assert total.dtype == np.float64
    assert total.tolist() == [2.0, 2**24 + 1]


def test_status_has_place_window_and_evaluation(monkeypatch):
    run = Run(monkeypatch)
    run.display.is_live = True
    run.recorder.evaluated(400, {"eval/rtd_auc": 0.75}, {})
    for step in range(998, 1002):
        run.step(step, close=step == 1000, seconds=0.0 if step == 999 else 2.0)
    place, window, evaluation = run.drawn[-1]
    assert "step 1,000/2,000 (50%)" in place and "33 m 20 s left" in place
    assert window.startswith("to step 1,000:") and window.endswith("rtd 0.5  50 tokens/s")
    assert "step 400" in evaluation and "auc 0.75" in evaluation
    assert not any("step 1,000/" in line for line in run.lines)  # the status has it
    count = len(run.drawn)
    run.step(1002, seconds=0.01)
    assert len(run.drawn) == count  # not drawn so often
    run.step(1003, seconds=0.6)
    assert "step 1,003/2,000" in run.drawn[-1][0]


def test_what_looks_wrong_is_said_in_words(monkeypatch):
    run = Run(monkeypatch)
    run.recorder.health.warnings = lambda step, values: [sorted(values)[0]]
    run.step(1, close=True)
    run.step(2)
    run.recorder.evaluated(2, {"eval/loss": 1.0}, {})
    assert run.warnings == ["warning: step 1: grad_norm", "warning: step 2: eval/loss"]


def test_all_steps_are_estimated_once(monkeypatch):
    run = Run(monkeypatch)
    for step in range(1, 6):
        run.step(step, close=step in (3, 4), seconds=2.0)
    (said,) = [line for line in run.lines if "all 2,000 steps" in line]
    assert "1 h 40 m" in said
