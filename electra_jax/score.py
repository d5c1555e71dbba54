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
from typing import Any

from absl import flags

from electra_jax.data.opening import read_json
from electra_jax.errors import UserError
from electra_jax.finetune.tasks.squad_files import check_ids, questions_of
from electra_jax.finetune.tasks.squad_scores import score_v1, score_v2


def main() -> None:
    """Print the scores of a file of predictions."""
    from electra_jax import cli

    values = flags.FlagValues()
    flags.DEFINE_string("null_odds", None, "file of odds by question id", flag_values=values)
    flags.DEFINE_float("null_threshold", 1.0, "greater odds: no answer", flag_values=values)
    paths = cli.parse_arguments(values, __doc__, ("DATA.json", "PREDICTIONS.json"))
    print(json.dumps(_score_files(*paths, values.null_odds, values.null_threshold), indent=1))


def _score_files(
    data: str, predictions: str, null_odds: str | None, null_threshold: float
) -> dict[str, float]:
    document = read_json(data)
    examples = list(questions_of(document, data))
    check_ids(examples, data)
    gold = {}
    for example in examples:
        if example.answers is None:
            raise UserError(f"{data}: question {example.id!r} has no answers; nothing to score")
        gold[example.id] = [answer.text for answer in example.answers]
    texts = _by_id(predictions, str, "text")
    if all(gold.values()) and not str(document.get("version", "")).startswith("v2"):
        if null_odds is not None:
            raise UserError(f"--null_odds is given, but all questions of {data} have an answer")
        scores = score_v1(gold, texts)
    else:
        odds = None
        if null_odds is not None:
            found = _by_id(null_odds, int | float, "a number")
            odds = {key: float(value) for key, value in found.items()}
        scores = score_v2(gold, texts, odds, null_threshold)
    return {
        **scores,
        "missing_ids": len(gold.keys() - texts.keys()),
        "unknown_ids": len(texts.keys() - gold.keys()),
    }


def _by_id(path: str, kind: Any, expected: str) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: found {type(found).__name__}; expected an object by question id")
    for key, value in found.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: {key!r} is {str(value)[:40]!r}; expected {expected}")
    return found


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
