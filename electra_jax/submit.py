"""The archive that the GLUE server takes, from fine-tuned runs.

    python -m electra_jax.submit --out=glue.zip runs/cola runs/sst2 ...

One run for each of the nine tasks. Of a run with several trials, the one with the best score on
the development set is taken.
"""

import json
from pathlib import Path

from absl import flags

from electra_jax import cli
from electra_jax.errors import UserError
from electra_jax.finetune.tasks.glue import zip_submission


def submission_files(run: Path) -> list[Path]:
    """The TSV files that a run has predicted, of its best trial if there are several.

    Raises:
      UserError: there is no finished run, or it has predicted nothing to submit.
    """
    try:
        results = json.loads((run / "results.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{run}: there is no finished run: {error}") from error
    if "trials" in results:
        metric = results["main_metric"]
        scores = [next(iter(trial["scores"].values()))[metric] for trial in results["trials"]]
        run = run / f"trial_{scores.index(max(scores))}"
    found = sorted((run / "predictions").glob("*.tsv"))
    if not found:
        raise UserError(f"{run / 'predictions'}: there is nothing to submit to GLUE")
    return found


def main() -> None:
    """Write the archive."""
    values = flags.FlagValues()
    out = flags.DEFINE_string("out", "glue.zip", "the archive to write", flag_values=values)
    runs = cli.parse_arguments(values, __doc__, ("RUN...",))
    files = [file for run in runs for file in submission_files(Path(run))]
    print(zip_submission(files, Path(out.value)))


if __name__ == "__main__":
    cli.run(main)
