"""What a run says of itself while it trains: means of windows, rates, lines, warnings."""

import json
import types
from pathlib import Path

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
OTHER_SHAPE = {"shape": (8, 24)}
CLOSE = {"close": True}
ILL = {"mlm_loss": (np.nan, 10.0), "grad_norm": (np.inf, 1.0)}


class Run:
    """A recorder with a clock that stands still unless it is moved, and all that comes out."""

    def __init__(self, monkeypatch, peak=None, max_skipped: int = 0, saved: dict | None = None):
        self.now = 1000.0
        for module in (rates, recorder):
            clock = types.SimpleNamespace(monotonic=lambda: self.now)
            monkeypatch.setattr(module, "time", clock)
        self.lines: list[str] = []
        self.drawn: list[list[str]] = []
        self.written: list[tuple[int, dict]] = []
        self.reports: list[int] = []
        config = {"max_skipped_updates": max_skipped, "histograms": False}
        config["checkpoint"] = {"every_steps": 500}
        objective = tiny.objective()
        self.evaluator = types.SimpleNamespace(metrics=objective.metrics, show=lambda params: [])
        self.display = types.SimpleNamespace(
            is_live=False, log=self.lines.append, status=self.drawn.append
        )
        job = types.SimpleNamespace(
            objective=objective,
            num_steps=2000,
            learned_from=2000,
            peak_tokens_per_second=peak,
            evaluator=self.evaluator,
        )
        start = Restored(0, None, {"progress": saved} if saved else {})
        self.recorder = Recorder(ConfigDict(config), Path(), job, self.display, start)
        self.compilations = self.recorder.rates.compilations
        self.recorder.files = types.SimpleNamespace(
            write=lambda step, values: self.written.append((step, values)),
            evaluated=lambda *parts: self.reports.append(len(self.written)),
        )

    def step(self, step, seconds=1.0, close=False, shape=(8, 16), **changes) -> None:
        """One step of the loop, whose predecessor took `seconds`."""
        self.now += seconds
        self.recorder.add(step, sums(**changes), shape)
        if close:
            self.recorder.close_window()

    def catch_up(self) -> None:
        self.now += 1.0
        self.recorder.catch_up()

    def evaluated(self, step: int, **results: float) -> None:
        found = {f"eval/{name}": value for name, value in results.items()}
        self.recorder.evaluated(step, found, {})

    @property
    def rows(self) -> list[dict]:
        return [values for _, values in self.written]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning")]


@pytest.fixture
def run(monkeypatch) -> Run:
    return Run(monkeypatch)


def sums(**changes) -> dict[str, jax.Array]:
    pairs = {"mlm_loss": (60.0, 10.0), "rtd_loss": (50.0, 100.0), "learning_rate": (1e-3, 1.0)}
    pairs |= {"grad_norm": (2.0, 1.0), "tokens": (TOKENS, 1.0)}
    return {name: jnp.array(pair) for name, pair in (pairs | changes).items()}


def test_window_is_averaged_by_weight_and_each_step_is_in_one(run):
    run.step(1, mlm_loss=(60.0, 10.0), grad_norm=(1.0, 1.0))
    run.step(2, mlm_loss=(70.0, 30.0), grad_norm=(3.0, 1.0), **CLOSE)
    run.step(3, mlm_loss=(20.0, 10.0))
    run.step(4, mlm_loss=(80.0, 10.0), **CLOSE)
    run.step(5, mlm_loss=(999.0, 1.0))
    assert [step for step, _ in run.written] == [2, 4]
    first, second = run.rows
    expected = {"train/mlm_loss": 130 / 40, "train/rtd_loss": 0.5}
    expected |= {"train/loss": 130 / 40 + 50 * 0.5, "grad_norm": 2.0, "learning_rate": 1e-3}
    assert {name: first[name] for name in first.keys() - SPEED} == pytest.approx(expected)
    assert second["train/mlm_loss"] == pytest.approx(5.0)


def test_nothing_is_fetched_before_the_next_step_is_dispatched(monkeypatch):
    run, fetched, device_get = Run(monkeypatch), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(len(x)) or device_get(x))
    for step, expected in enumerate(([], [], [], [3], [3]), 1):  # once, the whole window
        run.step(step, close=step == 3)
        assert fetched == expected


@pytest.mark.parametrize(
    "steps, expected",
    [
        ([(500, {}), (0, {}), (2, CLOSE), (2, {})], 2 * TOKENS / 4),  # the first does not count
        ([(1, CLOSE), (1, {})], None),  # there are no others
        (
            [(500, {}), (2, {}), (300, OTHER_SHAPE), (2, {}), (4, OTHER_SHAPE | CLOSE), (0, {})],
            3 * TOKENS / 8,
        ),
    ],
)
def test_first_step_of_a_shape_counts_for_no_rate_and_is_no_surprise(steps, expected, run):
    batches = iter(run.recorder.rates.timed({"row": np.array([0])} for _ in steps))
    for step, (seconds, options) in enumerate(steps, 1):
        next(batches)
        if seconds > 100:
            run.compilations.append(seconds - 3)
        run.step(step, seconds, **options)
    assert [row.get("tokens_per_second") for row in run.rows] == pytest.approx([expected])
    assert any("left" in line for line in run.lines) == (expected is not None)
    compiled = [line for line in run.lines if line.startswith("compiled")]
    for line, facts in zip(compiled, (("497.0", "8 x 16"), ("297.0", "8 x 24")), strict=False):
        assert all(fact in line for fact in facts)
    assert len(compiled) == sum(seconds > 100 for seconds, _ in steps) and not run.warnings


def test_pauses_count_for_no_rate_and_utilization_is_the_rate_over_its_peak(monkeypatch):
    run = Run(monkeypatch, peak=400.0)
    run.step(1, **CLOSE)
    run.step(2, seconds=0.0, **CLOSE)
    run.now += 2.0
    run.recorder.report()
    with run.recorder.paused():
        run.now += 300.0
    run.step(3, seconds=0.0, **CLOSE)
    run.step(4, seconds=5.0)
    found = [row.get("tokens_per_second") for row in run.rows]
    assert found == [None, pytest.approx(TOKENS / 2), pytest.approx(TOKENS / 5)]
    assert [row.get("mfu") for row in run.rows[1:]] == pytest.approx([0.125, 0.05])
    assert "mfu 5.0%" in run.lines[-1]


def test_line_tells_place_quality_speed_and_time_left(run):
    for step in range(998, 1002):
        run.step(step, close=step == 1000, seconds=0.0 if step == 999 else 2.0)
    *_, estimate, line = run.lines
    assert "2,000 steps take 1 h 06 m" in estimate
    place, *parts = line.split("  ")
    assert place == "step 1,000/2,000 (50%)"
    assert parts[:4] == ["loss 31", "mlm 6", "rtd 0.5", "50 tokens/s"]
    assert parts[4:] == ["33 m 20 s left", "next checkpoint at 1,500"]
    run.step(1002, **CLOSE)
    run.step(1003)
    assert sum("2,000 steps take" in line for line in run.lines) == 1


def test_status_has_place_window_and_evaluation(run):
    run.display.is_live = True
    run.evaluated(400, rtd_auc=0.75)
    for step in range(998, 1002):
        run.step(step, close=step == 1000, seconds=0.0 if step == 999 else 2.0)
    place, window, evaluation = run.drawn[-1]
    assert place.startswith(f"[{15 * '#'}{15 * '.'}]  step 1,000/2,000 (50%)  33 m 20 s left")
    assert window.startswith("to step 1,000:") and window.endswith("rtd 0.5  50 tokens/s")
    assert "step 400" in evaluation and "auc 0.75" in evaluation
    assert not any("step 1,000/" in line for line in run.lines)  # the status has it
    count = len(run.drawn)
    run.step(1002, seconds=0.01)
    assert len(run.drawn) == count  # not drawn so often
    run.step(1003, seconds=1.1)
    assert "step 1,003/2,000" in run.drawn[-1][0]


def test_evaluation_is_written_and_shown_and_then_reported(run):
    run.evaluated(1000, loss=31.0, rtd_auc=0.91239, rtd_precision=0.5)
    assert run.written[0][0] == 1000 and run.rows[0]["eval/rtd_auc"] == 0.91239
    assert run.reports == [1]
    assert run.lines[-1].split("  ")[1:] == ["loss 31", "auc 0.9124", "precision 0.5"]
    run.evaluator.metrics = {"surprise": Metric("surprise", console="surprise")}  # from elsewhere
    run.evaluated(2000, loss=1.0, surprise=0.25)
    assert run.lines[-1].split("  ")[1:] == ["surprise 0.25"]


def test_what_is_not_finite_is_named_and_nothing_is_written(run):
    run.step(11)
    run.step(12, **ILL)
    run.step(13, rtd_loss=(np.nan, 10.0), **CLOSE)
    with pytest.raises(FloatingPointError, match=r"^step 12: grad_norm, mlm_loss not finite"):
        run.recorder.report()
    with pytest.raises(FloatingPointError, match=r"^step 40: eval/loss not finite"):
        run.evaluated(40, loss=float("nan"), mlm_loss=2.0)
    assert run.written == []


def test_window_goes_on_where_an_interrupted_run_was(monkeypatch):
    """To the bit: what is carried over is the double precision sum, as JSON."""
    values = {step: (step / 3, 1 / 7) for step in range(1, 7)}
    straight, first = Run(monkeypatch), Run(monkeypatch)
    for step in range(1, 7):
        straight.step(step, mlm_loss=values[step], close=step in (3, 6))
        if step < 6:
            first.step(step, mlm_loss=values[step], close=step == 3)
    straight.catch_up()
    first.catch_up()
    assert [step for step, _ in first.written] == [3]
    second = Run(monkeypatch, saved=json.loads(json.dumps(first.recorder.window.to_save())))
    second.step(6, mlm_loss=values[6], **CLOSE)
    second.catch_up()
    (step, resumed), expected = second.written[0], straight.rows[1]
    assert step == 6 and resumed.keys() - SPEED == expected.keys() - SPEED
    assert all(resumed[name] == expected[name] for name in expected.keys() - SPEED)


def test_skipped_updates_count_for_no_mean_and_are_counted(monkeypatch):
    run = Run(monkeypatch, max_skipped=1)
    run.step(1, mlm_loss=(10.0, 10.0))
    run.step(2, **ILL)
    run.step(3, mlm_loss=(30.0, 10.0))
    run.step(4, **ILL, **CLOSE)
    run.step(5, **CLOSE)
    run.step(6, **ILL, **CLOSE)
    run.catch_up()
    assert [row["skipped_updates"] for row in run.rows] == [2.0, 0.0, 1.0]
    assert (run.rows[0]["train/mlm_loss"], run.rows[0]["grad_norm"]) == (2.0, 2.0)
    assert run.rows[2].keys() - SPEED == {"learning_rate", "skipped_updates"}
    assert run.warnings[0].startswith("warning: step 2: grad_norm, mlm_loss not finite")


def test_too_many_skipped_updates_in_a_row_stop_the_run_even_across_an_interruption(monkeypatch):
    run = Run(monkeypatch, max_skipped=2)
    run.step(1, **ILL)
    run.step(2, **CLOSE)
    run.step(3, **ILL, **CLOSE)
    run.step(4, **ILL)
    run.catch_up()
    resumed = Run(monkeypatch, max_skipped=2, saved=run.recorder.window.to_save())
    resumed.step(5, **ILL)
    with pytest.raises(FloatingPointError, match=r"^step 5: .* not finite after 2 skipped"):
        resumed.catch_up()


@pytest.mark.parametrize("is_ready, share", [(True, 0.75), (False, 0.0)])
def test_waiting_for_batches_counts_when_the_device_has_nothing_to_do(run, is_ready, share):

    def slow():
        for step in range(1, 4):
            run.now += 3.0
            yield {"row": np.array([step])}

    for step, _ in enumerate(run.recorder.rates.timed(slow()), 1):
        run.step(step, seconds=1.0, close=step == 3)
        run.recorder.rates.newest = {"loss": types.SimpleNamespace(is_ready=lambda: is_ready)}
    run.recorder.report()
    assert run.rows[0]["input_wait"] == pytest.approx(share)
    assert any("75%" in line and "config.data." in line for line in run.warnings) == bool(share)


def test_compilations_after_the_first_step_are_warned_of(run):
    run.compilations += [1.5, 2.0]
    run.step(1)
    assert len(run.lines) == 1 and "3.5 s" in run.lines[0]
    run.step(2, **CLOSE)
    run.step(3)
    assert run.warnings == []
    with run.recorder.paused():
        run.compilations.append(1.0)  # the evaluation's own
        run.evaluated(3, loss=1.0)
    run.compilations.append(1.0)
    for step in (4, 5, 6, 7):
        run.step(step, close=step % 2 == 0)
    assert len(run.warnings) == 1 and "step 4: 1 compilations" in run.warnings[0]


def test_compilations_are_counted_inside_the_block_only():
    x = jnp.ones(3)
    with compilations() as seconds:
        double = jax.jit(lambda x: x * 2 + 1)
        for _ in range(2):
            double(x)
            assert len(seconds) == 1
    jax.jit(lambda x: x * 3 + 1)(x)
    assert len(seconds) == 1


def test_sums_are_added_in_double_precision():
    parts = [{"count": np.array([1.0, 2**24], np.float32)}, {"count": np.ones(2, np.float32)}]
    total = add_up(parts)["count"]
    assert total.dtype == np.float64
    assert total.tolist() == [2.0, 2**24 + 1]


def test_what_looks_wrong_is_said_in_words(run):
    run.recorder.health.warnings = lambda step, values: [sorted(values)[0]]
    run.step(1, **CLOSE)
    run.step(2)
    run.evaluated(2, loss=1.0)
    assert run.warnings == ["warning: step 1: grad_norm", "warning: step 2: eval/loss"]
