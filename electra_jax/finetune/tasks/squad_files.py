"""Files in the format of SQuAD, and TensorFlow's data sets of the same.

{"data": [{"paragraphs": [{"context": TEXT, "qas": [
    {"id": ID, "question": TEXT, "is_impossible": BOOL,
     "answers": [{"text": TEXT, "answer_start": INDEX}]}]}]}]}
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """A question on a context.

    Attributes:
      id: unique in its file.
      answers: those that are right; empty if there is none; None if they are not known.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None


def read_squad(path: str | Path) -> Iterator[Example]:
    """Yields the questions of a file in SQuAD's format.

    Raises:
      UserError: the file cannot be read or lacks something; names the place in it.
    """
    return questions_of(read_json(path), path)


def questions_of(document: Any, path: str | Path) -> Iterator[Example]:
    """As `read_squad`, from the parsed content of the file at `path`."""
    for a, article in enumerate(_get(document, "data", list, f"{path}: ")):
        at = f"{path}: data[{a}]."
        for p, paragraph in enumerate(_get(article, "paragraphs", list, at)):
            at = f"{path}: data[{a}].paragraphs[{p}]."
            context = _get(paragraph, "context", str, at)
            for q, entry in enumerate(_get(paragraph, "qas", list, at)):
                yield _example(entry, context, f"{at}qas[{q}].")


def _example(entry: Any, context: str, at: str) -> Example:
    question = _get(entry, "question", str, at)
    key = entry.get("id")
    if type(key) not in (str, int):
        raise UserError(f"{at}id: found {_shown(key)}; expected text")
    answers = None
    if entry.get("is_impossible") is True:
        answers = ()
    elif "answers" in entry:
        found = enumerate(_get(entry, "answers", list, at))
        answers = tuple(_answer(answer, f"{at}answers[{number}].") for number, answer in found)
    return Example(str(key), question, context, answers)


def _answer(answer: Any, at: str) -> Answer:
    return Answer(_get(answer, "text", str, at), _get(answer, "answer_start", int, at))


def _get(mapping: Any, name: str, kind: type, at: str) -> Any:
    value = mapping.get(name) if isinstance(mapping, dict) else None
    if not isinstance(value, kind):
        names = {list: "a list", str: "text", int: "a number"}
        raise UserError(f"{at}{name}: found {_shown(value)}; expected {names[kind]}")
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


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


def check_answers(
    examples: Sequence[Example], path: str, is_training: bool, unanswerable: bool
) -> None:
    """Checks that either all questions have answers or none has; these can only be predicted.

    Raises:
      UserError: names the question.
    """
    is_labeled = is_training or any(example.answers is not None for example in examples)
    for example in examples:
        if example.answers is None and is_labeled:
            others = "the network cannot be trained on it" if is_training else "others have"
            raise UserError(f"{path}: question {example.id!r} lacks answers, but {others}")
        if example.answers == () and not unanswerable:
            raise UserError(
                f"{path}: question {example.id!r} has no answer, which only data sets with "
                "unanswerable questions may have"
            )
