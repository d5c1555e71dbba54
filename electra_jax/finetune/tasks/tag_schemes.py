"""How tags stand for entities.

`BIO` (an entity begins with B), `IOB1` (B only where two entities of a type touch), `BIOES` (single
words are S, last words E), and `plain` for tags that are no entities, such as parts of speech.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

OUTSIDE = "O"
SCHEMES = {"BIO": "BI", "IOB1": "BI", "BIOES": "BIES", "plain": ""}  # and their prefixes

_ENTITY_TAG = re.compile(r"([BIES])-(.+)", re.DOTALL)

Entity = tuple[int, int, str]  # first word, word after the last, type
Tags = Sequence[str]


def detect(sentences: Sequence[Tags]) -> str:
    """The scheme of the tags of a training file."""
    prefixes = {tag[0] for tags in sentences for tag in tags if _ENTITY_TAG.fullmatch(tag)}
    if not prefixes:
        return "plain"
    if prefixes & {"E", "S"}:
        return "BIOES"
    # Where B follows something else, it is needed to begin an entity; where I does, it is not.
    follows = {"B": False, "I": False}
    for tags in sentences:
        for before, tag in pairwise((OUTSIDE, *tags)):
            if tag[:2] in ("B-", "I-") and before[1:] != tag[1:]:
                follows[tag[0]] = True
    return "IOB1" if follows["I"] and not follows["B"] else "BIO"


def type_of(tag: str, scheme: str) -> str:
    """The type of entity that a tag stands for, or a type as it is; "" for O.

    In the scheme `plain`, each tag is a type.
    """
    if tag == OUTSIDE and scheme != "plain":
        return ""
    match = None if scheme == "plain" else _ENTITY_TAG.fullmatch(tag)
    return match[2] if match else tag


def entities(tags: Iterable[str]) -> list[Entity]:
    """The entities that tags of any scheme but `plain` stand for, by the rules of conlleval.

    I or E continues what B or I of the same type has begun; any other tag but O begins an entity.
    """
    found: list[Entity] = []
    before = OUTSIDE
    for place, tag in enumerate(tags):
        if _continues(before, tag):
            start, _, kind = found.pop()
            found.append((start, place + 1, kind))
        elif tag != OUTSIDE:
            found.append((place, place + 1, tag[2:]))
        before = tag
    return found


def convert(tags: Tags, scheme: str) -> list[str]:
    """Tags for the same entities in another scheme. To `plain`, they stay as they are."""
    if scheme == "plain":
        return list(tags)
    converted = [OUTSIDE] * len(tags)
    for start, end, kind in entities(tags):
        touches = start > 0 and converted[start - 1][2:] == kind
        first = "I" if scheme == "IOB1" and not touches else "B"
        converted[start:end] = [f"{first}-{kind}", *[f"I-{kind}"] * (end - start - 1)]
        if scheme == "BIOES":
            converted[end - 1] = f"{'S' if end - start == 1 else 'E'}-{kind}"
    return converted


def _continues(before: str, tag: str) -> bool:
    return tag[:2] in ("I-", "E-") and before[:2] in ("B-", "I-") and before[2:] == tag[2:]


def broken(tags: Tags, scheme: str) -> list[int]:
    """Places of tags that continue or end an entity which has not begun."""
    if scheme not in ("BIO", "BIOES"):
        return []
    return [
        place
        for place, (before, tag) in enumerate(pairwise((OUTSIDE, *tags)))
        if tag[:2] in ("I-", "E-") and not _continues(before, tag)
    ]


def entity_scores(gold: Sequence[Tags], predicted: Sequence[Tags]) -> dict[str, float]:
    """`f1`, `precision` and `recall` of exact entities over all sentences; 0 if there are none.

    They are those of conlleval. Ours, because seqeval, the library for them, has had no release
    since 2020.
    """
    correct = num_predicted = num_gold = 0
    for tags, guesses in zip(gold, predicted, strict=True):
        expected, found = {*entities(tags)}, {*entities(guesses)}
        correct += len(expected & found)
        num_predicted += len(found)
        num_gold += len(expected)
    return {
        "f1": 2 * correct / max(1, num_predicted + num_gold),
        "precision": correct / max(1, num_predicted),
        "recall": correct / max(1, num_gold),
    }
