"""The archive that the GLUE server takes, from fine-tuned runs."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

from electra_jax.errors import UserError
from electra_jax.files import read_json, write_bytes
from electra_jax.finetune.tasks.glue import SUBMISSION
from electra_jax.run.workdir import RESULTS


def submission_files(run: Path) -> list[Path]:
    """The TSV files that a run has predicted, of its best trial if there are several.

    Raises:
      UserError: the run is not finished, or has predicted nothing to submit.
    """
    results = read_json(run / RESULTS)
    if "trials" in results:
        metric = results["main_metric"]
        scores = [next(iter(trial["scores"].values()))[metric] for trial in results["trials"]]
        run = run / f"trial_{scores.index(max(scores))}"
    found = sorted((run / "predictions").glob("*.tsv"))
    if not found:
        raise UserError(f"{run / 'predictions'}: there is nothing to submit to GLUE")
    return found


def zip_submission(files: Sequence[Path], path: Path) -> Path:
    """The archive that the GLUE server takes, of the files that `GlueTask.write` has written.

    Args:
      files: one for each of `SUBMISSION`, such as `CoLA.tsv`, from wherever they are.
      path: of the archive.

    Raises:
      UserError: a file is missing or there twice; the server accepts all or none.
    """
    found: dict[str, Path] = {}
    for file in files:
        if found.setdefault(file.stem, file) != file:
            raise UserError(f"{path}: {found[file.stem]} and {file} are both for {file.stem}")
    missing = [name for name in SUBMISSION if name not in found or not found[name].is_file()]
    if missing:
        raise UserError(
            f"{path}: {', '.join(f'{name}.tsv' for name in missing)} missing; a submission has "
            "predictions of all tasks"
        )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SUBMISSION:
            archive.write(found[name], f"{name}.tsv")
    return write_bytes(path, content.getvalue())
