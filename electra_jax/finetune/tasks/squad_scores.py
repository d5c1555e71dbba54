"""The official scores of SQuAD 1.1 and 2.0 (Rajpurkar et al., 2016 and 2018; spec 6.4).

No library has them: torchmetrics knows 1.1 alone and needs PyTorch, `evaluate` downloads its code
when it is called. The tests compare with what the official programs print.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from electra_jax.data.opening import read_json
from electra_jax.errors import UserError
from electra_jax.finetune.tasks.squad_files import check_ids, read_squad

_ARTICLES = re.compile(r"\b(a|an|the)\b")

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))

Gold = Mapping[str, Sequence[str]]  # the texts of the answers by question id; none: no answer
Texts = Mapping[str, str]
Odds = Mapping[str, int | float]


def score_files(
    data: str, predictions: str, null_odds: str | None, null_threshold: float
) -> dict[str, float]:
    """The scores of files: a data set, predictions and null odds by question id.

    SQuAD 2.0 is what says so, or has a question without an answer.

    Returns:
      As `score_v1` or `score_v2`; and `missing_ids`, how many questions have no prediction, and
      `unknown_ids`, how many predictions have no question.

    Raises:
      UserError: a file cannot be read, or does not fit; names it.
    """
    version, examples = read_squad(data)
    check_ids(examples, data)
    gold = {}
    for example in examples:
        if example.answers is None:
            raise UserError(f"{data}: question {example.id!r} has no answers; nothing to score")
        gold[example.id] = [answer.text for answer in example.answers]
    texts = _by_id(predictions, str, "text")
    if all(gold.values()) and not version.startswith("v2"):
        if null_odds is not None:
            raise UserError(f"--null_odds is given, but all questions of {data} have an answer")
        scores = score_v1(gold, texts)
    else:
        odds = None if null_odds is None else _by_id(null_odds, int | float, "a number")
        scores = score_v2(gold, texts, odds, null_threshold)
    return {
        **scores,
        "missing_ids": len(gold.keys() - texts.keys()),
        "unknown_ids": len(texts.keys() - gold.keys()),
    }


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and superfluous white space."""
    without = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without).split())


def f1(gold: str, predicted: str) -> float:
    """F1 of the words, repetitions counted, that two normalized answers share."""
    gold_words, words = gold.split(), predicted.split()
    shared = (Counter(gold_words) & Counter(words)).total()
    if not shared:
        return 0.0
    # As the official programs compute it, to the last digit.
    precision, recall = shared / len(words), shared / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def score_v1(gold: Gold, predicted: Texts) -> dict[str, float]:
    """`exact_match` and `f1` in percent, each the best over the answers of a question."""
    scores = _scores_by_id(gold, predicted)
    return {
        "exact_match": _percent(scores["exact"].values()),
        "f1": _percent(scores["f1"].values()),
    }


def score_v2(
    gold: Gold, predicted: Texts, null_odds: Odds | None = None, null_threshold: float = 1.0
) -> dict[str, float]:
    """The scores of SQuAD 2.0, in percent.

    Args:
      predicted: answers; with `null_odds`, these are the best that are not "", for the thresholds.
      null_threshold: answers with greater odds count as "".

    Returns:
      `exact`, `f1` and `total`; the same of questions that have an answer (`HasAns_...`) and of
      those that have none (`NoAns_...`), as far as there are any; and, with `null_odds`, the best
      scores that any threshold gives, and that threshold: `best_exact`, `best_exact_thresh`,
      `best_f1`, `best_f1_thresh`.
    """
    # An answer that is only punctuation or an article is none to compare with, but is one.
    words = {key: [text for text in texts if normalize(text)] for key, texts in gold.items()}
    raw = _scores_by_id({key: texts or [""] for key, texts in words.items()}, predicted)
    odds = null_odds or {}
    none = {key for key in gold if key in predicted and odds.get(key, 0.0) > null_threshold}
    finals = {
        name: {key: float(not gold[key]) if key in none else x for key, x in scores.items()}
        for name, scores in raw.items()
    }
    keys_of = {
        "": [*gold],
        "HasAns_": [key for key in gold if gold[key]],
        "NoAns_": [key for key in gold if not gold[key]],
    }
    result: dict[str, float] = {}
    for prefix, keys in keys_of.items():
        if keys:
            for name, scores in finals.items():
                result[prefix + name] = _percent(scores[key] for key in keys)
            result[f"{prefix}total"] = len(keys)
    if null_odds is not None:
        for name, scores in raw.items():
            best, threshold = best_threshold(gold, predicted, scores, null_odds)
            result[f"best_{name}"], result[f"best_{name}_thresh"] = best, threshold
    return result


def best_threshold(
    gold: Gold, predicted: Texts, scores: Mapping[str, float], null_odds: Odds
) -> tuple[float, float]:
    """The best mean score in percent that any threshold on the odds gives, and the threshold.

    As the official program finds it, but where no answer at all is best: its threshold of 0 then
    says so only if all odds are greater. Here it is less than all odds.

    Args:
      scores: of the answers in `predicted`, which are given up to the threshold.
      null_odds: equal ones count in this order. A question that has none is never answered.
    """
    answered = sorted((key for key in null_odds if key in scores), key=null_odds.__getitem__)
    current = best = sum(not texts for texts in gold.values())
    threshold = 0.0
    if answered and null_odds[answered[0]] <= threshold:
        threshold = null_odds[answered[0]] - 1.0
    for key in answered:
        if gold[key]:
            current += scores[key]
        elif predicted.get(key):
            current -= 1
        if current > best:
            best, threshold = current, null_odds[key]
    return 100 * best / max(1, len(gold)), float(threshold)


def _scores_by_id(gold: Gold, predicted: Texts) -> dict[str, dict[str, float]]:
    """`exact` and `f1` of each question, the best over its answers; 0 if it is missing."""
    exact, overlap = dict.fromkeys(gold, 0.0), dict.fromkeys(gold, 0.0)
    for key, texts in gold.items():
        if key in predicted:
            answer = normalize(predicted[key])
            answers = {normalize(text) for text in {*texts}}
            exact[key] = float(answer in answers)
            # Two answers without words are equal, and share no words to count.
            overlap[key] = max((f1(text, answer) for text in answers), default=0.0)
            if texts == [""]:
                overlap[key] = exact[key]
    return {"exact": exact, "f1": overlap}


def _percent(scores: Iterable[float]) -> float:
    scores = [*scores]
    return 100 * sum(scores) / max(1, len(scores))


def _by_id(path: str, kind: Any, expected: str) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: found {type(values).__name__}; expected an object by question id")
    for key, value in values.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: {key!r} is {str(value)[:40]!r}; expected {expected}")
    return values
