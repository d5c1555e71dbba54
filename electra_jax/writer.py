"""What a run logs: `metrics.jsonl`, a JSON object a line, and the same numbers for TensorBoard."""

import json
import math
from pathlib import Path

from tensorboardX import SummaryWriter

from electra_jax.errors import UserError


class MetricWriter:
    """Appends the metrics of a run to `workdir/metrics.jsonl` and `workdir/tensorboard/`.

    A run that resumes from `start_step` logs the later steps again, so what an earlier attempt
    logged after `start_step` is dropped first. Nothing else in the file changes. One process of a
    run writes; the others must not create a writer.

    Args:
      workdir: The run directory; created when missing.
      start_step: The step that the run starts from: 0, or that of the restored checkpoint.

    Raises:
      UserError: A line of an existing `metrics.jsonl`, other than a cut last one, is not a row.
    """

    def __init__(self, workdir: Path, start_step: int):
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / "metrics.jsonl"
        _drop_lines_after(path, start_step)
        self._jsonl = path.open("ab")
        self._tensorboard = SummaryWriter(
            str(workdir / "tensorboard"),
            purge_step=start_step + 1,
            # Event files are named after the second they are opened in; without the step, a run
            # that fails at once and resumes would overwrite its own events.
            filename_suffix=f".{start_step}",
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """Logs finite `values` by metric name at `step`; the line is flushed on return.

        Raises:
          ValueError: A value is not finite, which JSON cannot hold. Nothing is written.
        """
        values = {name: float(value) for name, value in values.items()}
        not_finite = [name for name, value in values.items() if not math.isfinite(value)]
        if not_finite:
            raise ValueError(f"metrics at step {step} are not finite: {', '.join(not_finite)}")
        self._jsonl.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._jsonl.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes both logs, and with that flushes the events for TensorBoard."""
        self._jsonl.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read_metrics(workdir: Path) -> list[dict]:
    """The rows of `workdir/metrics.jsonl` in file order; none when there is no such file.

    The file may belong to a run in progress: a last line that is cut is left out.

    Raises:
      UserError: Any other line is not a JSON object with a `step`.
    """
    return [row for _, row in _read_lines(workdir / "metrics.jsonl")]


def _read_lines(path: Path) -> list[tuple[bytes, dict]]:
    """Each whole line, without its newline, and the row it holds."""
    if not path.exists():
        return []
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    rows = [_parse_row(line) for line in lines]
    if rows[-1] is None:
        lines, rows = lines[:-1], rows[:-1]
    if None in rows:
        raise UserError(f"{path}, line {rows.index(None) + 1}: not a JSON object with a step")
    return list(zip(lines, rows, strict=True))


def _parse_row(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _drop_lines_after(path: Path, step: int) -> None:
    kept = b"".join(line + b"\n" for line, row in _read_lines(path) if row["step"] <= step)
    if path.exists() and path.read_bytes() != kept:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(kept)
        temporary.replace(path)
