"""The official scores of SQuAD 1.1 and 2.0 (Rajpurkar et al., 2016 and 2018; spec 6.4).

    python -m electra_jax.score dev.json predictions.json [--null_odds=FILE]

prints one JSON object with the keys and values of the official programs, in percent, and how many
questions have no prediction (`missing_ids`: these count as wrong) and how many predictions no
question (`unknown_ids`: these do not count). All files are JSON and may be compressed.

    predictions.json    answers by question id; "" says that there is none
    --null_odds=FILE    numbers by question id: how likely it is that there is no answer. With
                        them, the best thresholds and their scores are reported, too. 2.0 only
    --null_threshold=1  above it, the answer counts as "", whatever the prediction
"""

import json

from absl import flags

from electra_jax import cli
from electra_jax.finetune.tasks.squad_scores import score_files


def main() -> None:
    """Print the scores of a file of predictions."""
    values = flags.FlagValues()
    flags.DEFINE_string("null_odds", None, "file of odds by question id", flag_values=values)
    flags.DEFINE_float("null_threshold", 1.0, "greater odds: no answer", flag_values=values)
    paths = cli.parse(values, __doc__, "DATA.json", "PREDICTIONS.json")
    print(json.dumps(score_files(*paths, values.null_odds, values.null_threshold), indent=1))


if __name__ == "__main__":
    cli.run(main)
