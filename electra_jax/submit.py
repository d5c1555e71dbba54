"""The archive that the GLUE server takes, from fine-tuned runs.

    python -m electra_jax.submit --out=glue.zip runs/cola runs/sst2 ...

One run for each of the nine tasks. Of a run with several trials, the one with the best score on
the development set is taken.
"""

from pathlib import Path

from absl import flags

from electra_jax import cli
from electra_jax.finetune.tasks.glue import zip_submission


def main() -> None:
    """Write the archive."""
    values = flags.FlagValues()
    out = flags.DEFINE_string("out", "glue.zip", "the archive to write", flag_values=values)
    runs = cli.parse(values, __doc__, "RUN...")
    print(zip_submission(map(Path, runs), Path(out.value)))


if __name__ == "__main__":
    cli.run(main)
