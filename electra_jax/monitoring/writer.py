"""What a run logs: `metrics.jsonl`, a JSON object a line, and the same numbers for TensorBoard."""

import contextlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from electra_jax.errors import UserError
from electra_jax.files import write_bytes
from electra_jax.monitoring.histograms import Histogram
from electra_jax.monitoring.tracking import Track


class MetricWriter:
    """Appends the metrics of a run to `workdir/metrics.jsonl` and `workdir/tensorboard/`.

    A run that resumes from `start_step` logs the later steps again, so what an earlier attempt
    logged after `start_step` is dropped first. Nothing else in the file changes; UserError where
    one of its lines, other than a cut last one, is not a row. One process of a run writes; the
    others must not create a writer. `track` is told step and values, too.
    """

    def __init__(self, workdir: Path, start_step: int, track: Track = lambda step, values: None):
        self._track = track
        self.workdir, self.path = workdir, workdir / "metrics.jsonl"
        (workdir / "tensorboard").mkdir(parents=True, exist_ok=True)
        rows = [line + b"\n" for line, row in _whole_lines(self.path) if row["step"] <= start_step]
        if self.path.exists() and self.path.read_bytes() != b"".join(rows):
            write_bytes(self.path, b"".join(rows))
        self._jsonl = self.path.open("ab")
        # Event files are named after the second they are opened in; without the step, a run that
        # fails at once and resumes would overwrite its own events. They are written here and not
        # by a thread, as usual, which a full disk would end, and the run would wait for it forever.
        name = f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{start_step}"
        self._tensorboard = RecordWriter(str(workdir / "tensorboard" / name))
        self._add_event(file_version="brain.Event:2")
        self._add_event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Logs `values` by metric name at `step`; both logs are flushed on return.

        Raises ValueError, and writes nothing, if one is not finite, which JSON cannot hold. OSError
        names the file that cannot be written.
        """
        values = {name: float(value) for name, value in values.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False)
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            self._jsonl.write(line.encode() + b"\n")
            self._jsonl.flush()
            self._add_event(step=step, summary=Summary(value=scalars))
            self._track(step, values)
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Shows a text in TensorBoard; OSError as `write`."""
        self._add_event(step=step, summary=summary.text(name, markdown))

    def write_histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Shows by name in TensorBoard how values are spread; OSError as `write`."""
        for name, x in found.items():
            numbers = x.edges[0], x.edges[-1], x.counts.sum(), x.sum, x.sum_squares
            buckets = x.edges[1:].tolist(), x.counts.tolist()
            made = summary.histogram_raw(name, *map(float, numbers), *buckets)
            self._add_event(step=step, summary=made)

    def _add_event(self, **content) -> None:
        self._tensorboard.write(Event(wall_time=time.time(), **content).SerializeToString())
        self._tensorboard.flush()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        # What could not be written fails here once more, which would hide where it failed first.
        for log in (self._jsonl, self._tensorboard):
            with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
                log.close()


def read_metrics(workdir: Path) -> list[dict]:
    """The rows of `workdir/metrics.jsonl` in file order; none when there is no such file.

    The file may belong to a run in progress: a last line that is cut is left out. UserError where
    any other line is not a JSON object with a `step`.
    """
    return [row for _, row in _whole_lines(workdir / "metrics.jsonl")]


def read_whole_rows(workdir: Path) -> tuple[list[dict], int]:
    """The rows whose values are numbers that a curve can go through, and how many are not."""
    largest = sys.float_info.max
    lines = _lines(workdir / "metrics.jsonl")
    rows = [
        row
        for _, row in lines
        if row and all(type(x) in (int, float) and -largest <= x <= largest for x in row.values())
    ]
    return rows, len(lines) - len(rows)


def _lines(path: Path) -> list[tuple[bytes, dict | None]]:
    """Each line, without its newline, and the row that it holds, or None."""
    content = path.read_bytes().rstrip(b"\n") if path.exists() else b""
    return [(line, _parse_row(line)) for line in content.split(b"\n")] if content else []


def _whole_lines(path: Path) -> list[tuple[bytes, dict]]:
    """As `_lines`, without a last line that is cut; UserError where another one is no row."""
    lines = _lines(path)
    if lines and lines[-1][1] is None:
        lines.pop()
    for number, (_, row) in enumerate(lines, 1):
        if row is None:
            raise UserError(f"{path}, line {number}: not a JSON object with a step")
    return lines


def _parse_row(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
