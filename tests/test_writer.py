import contextlib
import html
import math
import re
import struct
import sys
import types

import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from electra_jax.checks import validate
from electra_jax.config import get_config
from electra_jax.errors import UserError
from electra_jax.monitoring.histograms import Histogram, histograms
from electra_jax.monitoring.tracking import tracked
from electra_jax.monitoring.writer import MetricWriter, read_metrics
from electra_jax.reporting.gallery import as_markdown
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.program import make_program


def log(workdir, steps, start_step=0):
    with MetricWriter(workdir, start_step) as writer:
        for step in steps:
            writer.write(step, {"train/mlm_loss": step / 7, "learning_rate": 2e-4})


def read_events(workdir):
    """The events of all TensorBoard files; a record is length, checksum, event, checksum."""
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            yield Event.FromString(data[12 : 12 + length])
            data = data[length + 16 :]


def steps(workdir):
    return [row["step"] for row in read_metrics(workdir)]


def test_lines_hold_the_step_and_the_values_in_order(tmp_path):
    run = tmp_path / "new" / "run"
    assert read_metrics(run) == []
    with MetricWriter(run, start_step=0) as writer:
        assert read_metrics(run) == []
        writer.write(500, {"train/loss": 12.5, "grad_norm": 1})
        # On disk at once: a run that is killed has logged what it wrote.
        text = (run / "metrics.jsonl").read_text()
        assert text == '{"step": 500, "train/loss": 12.5, "grad_norm": 1.0}\n'
        writer.write(500, {"eval/loss": 12.0})
    first = {"step": 500, "train/loss": 12.5, "grad_norm": 1.0}
    assert read_metrics(run) == [first, {"step": 500, "eval/loss": 12.0}]


@pytest.mark.parametrize("cut", [b'{"step": 400, "train/ml', b'{"step": 400', b"\0\0\0", b"{}\n"])
def test_resume_drops_later_lines_and_a_cut_last_line(tmp_path, cut):
    log(tmp_path, [100, 200, 300])
    path = tmp_path / "metrics.jsonl"
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    with path.open("ab") as file:
        file.write(cut)
    assert steps(tmp_path) == [100, 200, 300]
    log(tmp_path, [300, 400], start_step=200)
    assert path.read_bytes().startswith(kept)
    assert steps(tmp_path) == [100, 200, 300, 400]


def test_resume_from_the_last_step_leaves_the_file_alone_and_a_fresh_start_none_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 100}')  # lacks only its newline
    log(tmp_path, [200], start_step=100)
    assert steps(tmp_path) == [100, 200]
    before = path.read_bytes(), path.stat().st_ino
    log(tmp_path, [], start_step=200)
    assert (path.read_bytes(), path.stat().st_ino) == before
    log(tmp_path, [100])
    assert steps(tmp_path) == [100]


@pytest.mark.parametrize("damage", ["not json", "[1]", '{"train/loss": 1.0}', '{"step": "1"}'])
def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path, damage):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 100}}\n{damage}\n{{"step": 300}}\n')
    for reader in (read_metrics, lambda path: MetricWriter(path, start_step=100)):
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
            reader(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    with MetricWriter(tmp_path, start_step=0) as writer:
        with pytest.raises(ValueError, match="JSON"):
            writer.write(7, {"grad_norm": 1.0, "train/loss": value})
        writer.write(8, {"grad_norm": 1.0})
    assert read_metrics(tmp_path) == [{"step": 8, "grad_norm": 1.0}]


@pytest.mark.parametrize("attribute", ["_jsonl", "_tensorboard"])
def test_full_disk_is_said_with_the_name_of_the_file(tmp_path, attribute):
    full = open("/dev/full", "ab") if attribute == "_jsonl" else RecordWriter("/dev/full")  # noqa: SIM115
    with (
        pytest.raises(OSError, match="No space left on device") as error,
        MetricWriter(tmp_path, start_step=0) as writer,
    ):
        writer.write(100, {"grad_norm": 1.0})
        getattr(writer, attribute).close()
        setattr(writer, attribute, full)
        writer.write(200, {"grad_norm": 1.0})
    assert error.value.filename == str(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path)[0] == {"step": 100, "grad_norm": 1.0}


def test_tensorboard_gets_the_same_numbers_and_hides_what_a_resumed_run_logs_again(tmp_path):
    log(tmp_path, [100, 200, 300])
    log(tmp_path, [300], start_step=200)
    events = list(read_events(tmp_path))
    # TensorBoard drops earlier events from the step of a start event on.
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [1, 201]
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    rows = read_metrics(tmp_path)
    assert scalars == [
        (row["step"], name, pytest.approx(row[name]))
        for row in (*rows, rows[-1])
        for name in ("train/mlm_loss", "learning_rate")
    ]


def test_texts_are_events_of_the_text_plugin_in_tables(tmp_path):
    token = {"token": "##a|b", "starts_word": False, "probability": 0.931}
    asked = {"token": "c", "starts_word": True, "probability": 0.0, "original": "d\x1b"}
    with MetricWriter(tmp_path, 0) as writer:
        writer.write_text(7, "held-out texts", as_markdown([[token, asked], []]))
    (value,) = [value for event in read_events(tmp_path) for value in event.summary.value]
    assert value.tag.startswith("held-out texts")
    assert value.metadata.plugin_data.plugin_name == "text"
    (table,) = value.tensor.string_val
    *_, first, second = html.unescape(table.decode()).splitlines()
    assert first == "| ##a|b | ##a|b | 93% |"
    assert second == "| d\\u001b | **c** | 0% |"


def test_weights_and_biases_get_the_metrics_and_one_run_through_interruptions(
    tmp_path, monkeypatch
):
    inits, logged = [], []

    class FakeRun(contextlib.nullcontext):
        def log(self, values, step):
            logged.append((step, values))

    def init(**options):
        inits.append(options)
        return FakeRun(FakeRun())

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = get_config()
    config.wandb = "mine"
    for start in (0, 10):
        with tracked(config, tmp_path) as track, MetricWriter(tmp_path, start, track) as writer:
            writer.write(start + 10, {"eval/loss": 2.0})
    assert logged == [(10, {"eval/loss": 2.0}), (20, {"eval/loss": 2.0})]
    assert [options["project"] for options in inits] == ["mine", "mine"]
    assert inits[0]["id"] == inits[1]["id"]
    assert inits[0]["resume"] == "allow"
    assert inits[0]["config"]["batch_size"] == 128


def test_weights_and_biases_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = get_config()
    validate(config, 1)
    config.wandb = "mine"
    with pytest.raises(UserError, match=r"config.wandb is 'mine'; .* not installed: pip install"):
        validate(config, 1)


@pytest.mark.process
@pytest.mark.parametrize("axes", [pytest.param((8, 1, 1), marks=pytest.mark.slow), (2, 2, 2)])
def test_histograms_are_numpys_of_each_layer_wherever_the_parameters_are(axes, tmp_path):
    sizes = ConfigDict(dict(zip(("data", "fsdp", "tensor"), axes, strict=True)))
    mesh = make_mesh(sizes)
    params = make_program(mesh, tiny.objective(), tiny.optimizer(), 0).init().params
    with MetricWriter(tmp_path, start_step=0) as writer:
        writer.write_histograms(7, histograms(params))
    events = [event for event in read_events(tmp_path) if event.step == 7]
    found = {value.tag: value.histo for event in events for value in event.summary.value}
    arrays = tiny.flat(params)
    assert "discriminator/encoder/layers/1/up/kernel" in found and "embeddings/word" in found
    assert sum(histo.num for histo in found.values()) == sum(x.size for x in arrays.values())
    for tag, histo in found.items():
        name, layer = re.subn(r"/layers/\d+/", "/layers/", tag)
        values = arrays[name][int(re.search(r"/(\d+)/", tag)[1])] if layer else arrays[name]
        counts, edges = np.histogram(values, 64)
        # A value on an edge may be rounded to either side of it.
        np.testing.assert_allclose(np.cumsum(histo.bucket), np.cumsum(counts), atol=2, err_msg=tag)
        np.testing.assert_allclose(histo.bucket_limit, edges[1:], rtol=1e-5, atol=1e-6)
        assert histo.sum == pytest.approx(values.sum(), rel=1e-4, abs=1e-3)
        assert histo.sum_squares == pytest.approx(np.square(values).sum(), rel=1e-4)


def test_tensorboard_lists_what_was_written(tmp_path):
    """TensorBoard itself, where it is installed."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs TensorBoard: pip install tensorboard",
    )
    log(tmp_path, [1, 2, 3])
    with MetricWriter(tmp_path, start_step=3) as writer:
        writer.write_text(4, "held-out texts", "| a |")
        values = np.arange(4.0)
        counts, edges = np.histogram(values, 64)
        writer.write_histograms(4, {"a": Histogram(counts, edges, 6.0, 14.0)})
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["learning_rate", "train/mlm_loss"]
    assert [event.step for event in found.Scalars("train/mlm_loss")] == [1, 2, 3]
    assert "held-out texts" in str(found.Tags()["tensors"])
    assert "a" in str(found.Tags())
