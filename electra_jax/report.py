"""The report of a run: final numbers, curves, texts and settings in one file, without network.

    python -m electra_jax.report RUN          writes RUN/report.html anew
    python -m electra_jax.report RUN RUN ...  overlays the curves of several runs, by steps, tokens
                                              and FLOPs, in comparison.html
    --output=FILE                             in another file

Training writes the report of a run at every evaluation. A run that is going on, or that has lost
some of its files, has a report of what there is, with a note about what is missing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from electra_jax import cli, objectives
from electra_jax.errors import UserError
from electra_jax.finetune import config as finetuning
from electra_jax.objectives.metrics import Metric
from electra_jax.reporting.page import write_comparison, write_report


def main() -> None:
    """Write the report of a run, or a comparison of several."""
    values = flags.FlagValues()
    flags.DEFINE_string("output", None, "the file to write", flag_values=values)
    workdirs = [Path(name) for name in cli.parse(values, __doc__, "RUN ...")]
    output = Path(values.output) if values.output else None
    if output and output.suffix not in (".html", ".htm"):
        raise UserError(f"--output is {output}; allowed: a file that ends in .html")
    if len(workdirs) == 1:
        print(write_report(workdirs[0], metrics_of, output))
    else:
        print(write_comparison(workdirs, metrics_of, output or Path("comparison.html")))


def metrics_of(config: Mapping[str, Any]) -> Mapping[str, Metric]:
    """What the parts of the run with this configuration say of their metrics."""
    of_task = finetuning if config.get("task") == "finetune" else objectives
    return of_task.metrics_of(config)


if __name__ == "__main__":
    cli.run(main)
