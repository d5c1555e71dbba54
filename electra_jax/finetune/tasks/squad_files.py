"""Files in the format of SQuAD, and TensorFlow's data sets of the same.

{"data": [{"paragraphs": [{"context": TEXT, "qas": [
    {"id": ID, "question": TEXT, "is_impossible": BOOL,
     "answers": [{"text": TEXT, "answer_start": INDEX}]}]}]}]}
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from electra_jax.data.formats.tfds import records as read_data_set
from electra_jax.data.opening import read_json
from electra_jax.errors import UserError


@dataclass(frozen=True)
class Answer:
    """A text, and the character of the context that it starts at."""

    text: str
    start: int


@dataclass(frozen=True)
class Example:
    """A question on a context."""

    id: str  # unique in its file
    question: str
    context: str
    answers: tuple[Answer, ...] | None  # empty if there is none; None if they are not known


def read_squad(path: str) -> tuple[str, list[Example]]:
    """The version that a file in SQuAD's format says, or "", and its questions.

    Raises:
      UserError: the file cannot be read or lacks something; names the place in it.
    """
    document, examples = read_json(path), []
    for a, article in enumerate(_get(document, "data", list, f"{path}: ")):
        for p, paragraph in enumerate(_get(article, "paragraphs", list, f"{path}: data[{a}].")):
            at = f"{path}: data[{a}].paragraphs[{p}]."
            context = _get(paragraph, "context", str, at)
            for q, entry in enumerate(_get(paragraph, "qas", list, at)):
                examples.append(_example(entry, context, f"{at}qas[{q}]."))
    return str(document.get("version", "")), examples


def _example(entry: Any, context: str, at: str) -> Example:
    question, key = _get(entry, "question", str, at), _get(entry, "id", str | int, at)
    answers = None
    if entry.get("is_impossible") is True:
        answers = ()
    elif "answers" in entry:
        places = {f"{at}answers[{i}].": x for i, x in enumerate(_get(entry, "answers", list, at))}
        answers = tuple(
            Answer(_get(x, "text", str, place), _get(x, "answer_start", int, place))
            for place, x in places.items()
        )
    return Example(str(key), question, context, answers)


def _get(mapping: Any, name: str, kind: Any, at: str) -> Any:
    value = mapping.get(name) if isinstance(mapping, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        found = "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        expected = {list: "a list", int: "a number"}.get(kind, "text")
        raise UserError(f"{at}{name}: found {found}; expected {expected}")
    return value


def read_squad_data_set(name: str, split: str, unanswerable: bool) -> Iterator[Example]:
    """Yields the questions of a TensorFlow data set; `name` begins with `tfds:`."""
    fields = ["id", "question", "context", "answers", *(["is_impossible"] * unanswerable)]
    for record in read_data_set(name, split.replace("dev", "validation"), *fields):
        answers = record["answers"]
        texts = [text.decode("utf-8") for text in answers["text"]]
        starts = [int(start) for start in answers["answer_start"]]
        found = tuple(map(Answer, texts, starts)) if not record.get("is_impossible") else ()
        yield Example(record["id"], record["question"], record["context"], found)


def check_ids(examples: Sequence[Example], path: str) -> None:
    """Raises UserError if two questions have the same id."""
    seen = set()
    for example in examples:
        if example.id in seen:
            raise UserError(f"{path}: the id {example.id!r} is there twice; ids are unique")
        seen.add(example.id)
