"""The archive that the GLUE server takes, from fine-tuned runs."""

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

from electra_jax.errors import UserError
from electra_jax.files import read_json, write_bytes
from electra_jax.finetune.tasks.glue import SUBMISSION
from electra_jax.run.workdir import RESULTS


def zip_submission(runs: Iterable[Path], path: Path) -> Path:
    """Writes the archive `path` with the TSV files that `GlueTask.write` has written in `runs`.

    Of a run with several trials, the best one counts.

    Raises:
      UserError: a run is not finished or has nothing to submit, or a file is missing or there
        twice; the server accepts all or none.
    """
    found: dict[str, Path] = {}
    for run in runs:
        results = read_json(run / RESULTS)
        if "trials" in results:
            metric = results["main_metric"]
            scores = [next(iter(trial["scores"].values()))[metric] for trial in results["trials"]]
            run = run / f"trial_{scores.index(max(scores))}"
        files = sorted((run / "predictions").glob("*.tsv"))
        if not files:
            raise UserError(f"{run / 'predictions'}: there is nothing to submit to GLUE")
        for file in files:
            if found.setdefault(file.stem, file) != file:
                raise UserError(f"{path}: {found[file.stem]} and {file} are both for {file.stem}")
    missing = [f"{name}.tsv" for name in SUBMISSION if name not in found]
    if missing:
        raise UserError(
            f"{path}: {', '.join(missing)} missing; a submission has predictions of all tasks"
        )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SUBMISSION:
            archive.write(found[name], f"{name}.tsv")
    return write_bytes(path, content.getvalue())
