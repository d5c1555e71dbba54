"""Question answering in the format of SQuAD: answers are spans of a text (spec 6.4).

    {"data": [{"paragraphs": [{"context": TEXT, "qas": [
        {"id": ID, "question": TEXT, "is_impossible": BOOL,
         "answers": [{"text": TEXT, "answer_start": INDEX}]}]}]}]}

A context that does not fit is divided into windows that overlap. Answers are ranges of characters
of the context from the beginning to the end: targets follow from them, predictions are them. So a
predicted text is `context[start:end]`, in every script, with all its spaces and accents.
"""

import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from electra_jax.data.text import read_data_set, read_json
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.encoding import owners, pack, windows
from electra_jax.finetune.squad_metrics import score_v1, score_v2
from electra_jax.finetune.task import TRAIN, Arrays, FileTask, Head, Log

MAX_QUESTION = 64  # tokens of a question that are kept
N_BEST = 20  # answers that are kept of each question; starts that are tried in each window

_CHUNK = 2048  # rows whose spans are compared at once

# Invisible characters that belong to the one before: joiners, and the tags of emoji.
_JOINED = {"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}


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
      answers: those that are right; empty when there is none; None when they are not known.
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None


@dataclass(frozen=True)
class Span:
    """A possible answer: `context[start:end]` is `text`.

    Attributes:
      score: the sum of two logarithms of probabilities, or of two logits.
      probability: among the spans that were kept of the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What is answered to a question.

    Attributes:
      id: of the example.
      text: the answer; "" for none, which with `null_odds` above the threshold is the answer.
      null_odds: how likely it is that there is no answer: a logit. 0 where there always is one.
      n_best: possible answers with different texts, the best first; none of them is empty.
    """

    id: str
    text: str
    null_odds: float
    n_best: tuple[Span, ...]


class SquadTask(FileTask):
    """Questions on texts.

    Args:
      files: the file of each split, compressed or not; or `tfds:squad/v1.1` and the like.
      unanswerable: whether questions may have no answer, as in SQuAD 2.0.
      null_threshold: null odds above it mean that there is no answer. The default is the
        original's for its joint head; for independent ends, 0 is the neutral choice.
      max_answer_length: in tokens, of what is predicted. 30 suits English; a vocabulary that cuts a
        language into small pieces needs more.
      doc_stride: how many tokens later the next window starts, if that leaves no gap.
      answerability: the label of a window that lacks the answer its question has: `window` says
        that there is none; `question` says that there is one, as in the original, whose published
        numbers come from that.
      log: takes a line when questions cannot be trained on.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        unanswerable: bool,
        null_threshold: float = -2.75,
        max_answer_length: int = 30,
        doc_stride: int = 128,
        answerability: str = "window",
        name: str = "squad",
        log: Log = print,
    ):
        if answerability not in ("window", "question"):
            raise UserError(f"answerability is {answerability!r}; allowed: window, question")
        for number, value in (("doc_stride", doc_stride), ("max_answer_length", max_answer_length)):
            if value < 1:
                raise UserError(f"{number} is {value}; allowed: at least 1")
        self.name = name
        self.head = Head("qa")
        self.main_metric = "f1"
        self._files = dict(files)
        self._examples: dict[str, list[Example]] = {}
        self._unanswerable = unanswerable
        self._null_threshold = float(null_threshold)
        self._max_answer_length = max_answer_length
        self._doc_stride = doc_stride
        self._answerability = answerability
        self._log = log

    def is_labelled(self, examples: Sequence[Example]) -> bool:
        """See `FileTask.is_labelled`."""
        return all(example.answers is not None for example in examples)

    def read(self, split: str) -> list[Example]:
        """See `Task.read`. Answers may be anywhere, even where their text is not."""
        path = self._path(split)
        if split not in self._examples:
            if path.startswith("tfds:"):
                found = _data_set_examples(path, split, self._unanswerable)
            else:
                found = read_squad(path)
            self._examples[split] = list(found)
            check_ids(self._examples[split], path)
            _check_answers(self._examples[split], path, split == TRAIN, self._unanswerable)
        return self._examples[split]

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """See `Task.features`. A row is a window.

        For predictions there are also, int32 [N, L], `char_start` and `char_end`, the range of each
        token of the context (-1 elsewhere), and `max_context`, 1 where no other window shows a
        token with more around it. Rows to train on leave out questions whose answers are not in
        their context; the target is the first answer that is.
        """
        labelled = self.is_labelled(examples)
        questions = tokenizer.encode_batch([example.question for example in examples])
        contexts: dict[str, _Context] = {}
        found: list[_Window] = []
        lost = 0
        for index, (example, question) in enumerate(zip(examples, questions, strict=True)):
            if example.context not in contexts:
                contexts[example.context] = _encode(tokenizer, example.context)
            context, question = contexts[example.context], question[:MAX_QUESTION]
            target = _target(example, context)
            if training and example.answers and target is None:
                lost += 1
                continue
            room = max_length - len(question) - 3
            if room < 1:
                raise UserError(
                    f"max_length is {max_length}; with questions of up to {MAX_QUESTION} tokens, "
                    f"it must be greater than {MAX_QUESTION + 3}"
                )
            for begin, end in windows(len(context.ids), room, self._doc_stride):
                found.append(_Window(index, question, context, begin, end, target))
        if lost:
            self._log(f"left out: {lost:,} questions whose answers are not in their contexts")
        segments = [
            (window.question, window.context.ids[window.begin : window.end]) for window in found
        ]
        arrays = pack(tokenizer, segments, max_length)
        # The last [SEP] is allowed, too, as in the original; no prediction ends there.
        arrays["allowed"] = arrays["token_type_ids"].copy()
        arrays["allowed"][:, 0] = 1
        arrays["example"] = np.array([window.example for window in found], np.int32)
        if labelled:
            arrays |= self._targets(examples, found)
        if not training:
            arrays |= _places(found, max_length)
        return arrays

    def _targets(self, examples: Sequence[Example], found: Sequence["_Window"]) -> Arrays:
        spans = np.array([window.span for window in found], np.int32).reshape(-1, 2)
        is_impossible = np.array([not examples[window.example].answers for window in found], bool)
        if self._answerability == "window":
            is_impossible |= spans[:, 0] == 0
        return {
            "start": spans[:, 0],
            "end": spans[:, 1],
            "is_impossible": is_impossible.astype(np.int32),
        }

    def predict(
        self, examples: Sequence[Example], features: Arrays, outputs: Arrays
    ) -> list[Prediction]:
        """See `Task.predict`.

        Spans start where no other window shows more around, have at most
        `max_answer_length` tokens, and are ranked over all windows of a question. Its null odds are
        the least of its windows.
        """
        found = _spans(features, outputs, self._max_answer_length)
        odds = _null_odds(features, outputs, len(examples), found)
        predictions = []
        for index, example in enumerate(examples):
            n_best = _n_best(example.context, found.get(index, _NO_SPANS))
            answered = n_best and not (self._unanswerable and odds[index] > self._null_threshold)
            predictions.append(
                Prediction(
                    example.id,
                    n_best[0].text if answered else "",
                    float(odds[index]) if self._unanswerable else 0.0,
                    n_best,
                )
            )
        return predictions

    def score(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """See `Task.score`; the keys of the official programs, in percent."""
        pairs = zip(examples, predictions, strict=True)
        pairs = [(example, guess) for example, guess in pairs if example.answers is not None]
        if not pairs:
            return {}
        gold = {example.id: [answer.text for answer in example.answers] for example, _ in pairs}
        texts = {guess.id: guess.n_best[0].text if guess.n_best else "" for _, guess in pairs}
        if not self._unanswerable:
            return score_v1(gold, texts)
        odds = {guess.id: guess.null_odds for _, guess in pairs}
        return score_v2(gold, texts, odds, self._null_threshold)

    def floor(self, examples: Sequence[Example]) -> float:
        """See `Task.floor`: that of no answer, ever."""
        return 100 * sum(not example.answers for example in examples) / len(examples)

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Writes JSON objects by question id.

        `SPLIT.predictions.json` has the answers, for the official programs and servers;
        `SPLIT.nbest.json` possible answers with characters, scores and probabilities; and
        `SPLIT.null_odds.json`, where questions may have no answer, the null odds.
        """
        contents: dict[str, dict[str, Any]] = {
            "predictions": {guess.id: guess.text for guess in predictions},
            "nbest": {guess.id: [vars(span) for span in guess.n_best] for guess in predictions},
        }
        if self._unanswerable:
            contents["null_odds"] = {guess.id: guess.null_odds for guess in predictions}
        return [
            write_text(directory / f"{split}.{name}.json", json.dumps(content, indent=1) + "\n")
            for name, content in contents.items()
        ]


# Reading


def read_squad(path: str | Path) -> Iterator[Example]:
    """The questions of a file in SQuAD's format.

    Raises:
      UserError: the file cannot be read or lacks something; names the place in it.
    """
    return questions_of(read_json(path), path)


def questions_of(document: Any, path: str | Path) -> Iterator[Example]:
    """As `read_squad`, of what the file at `path` holds."""
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


def _data_set_examples(name: str, split: str, unanswerable: bool) -> Iterator[Example]:
    fields = ["id", "question", "context", "answers", *(["is_impossible"] * unanswerable)]
    for record in read_data_set(name, split.replace("dev", "validation"), *fields):
        answers = record["answers"]
        texts = [text.decode("utf-8") for text in answers["text"]]
        starts = [int(start) for start in answers["answer_start"]]
        found = tuple(map(Answer, texts, starts)) if not record.get("is_impossible") else ()
        yield Example(record["id"], record["question"], record["context"], found)


def check_ids(examples: Sequence[Example], path: str) -> None:
    """UserError where two questions have the same id."""
    seen = set()
    for example in examples:
        if example.id in seen:
            raise UserError(f"{path}: the id {example.id!r} is there twice; ids are unique")
        seen.add(example.id)


def _check_answers(
    examples: Sequence[Example], path: str, is_training: bool, unanswerable: bool
) -> None:
    """All questions have answers, or none has any, which is well for those to predict only."""
    is_labelled = is_training or any(example.answers is not None for example in examples)
    for example in examples:
        if example.answers is None and is_labelled:
            others = "the network cannot be trained on it" if is_training else "others have"
            raise UserError(f"{path}: question {example.id!r} lacks answers, but {others}")
        if example.answers == () and not unanswerable:
            raise UserError(
                f"{path}: question {example.id!r} has no answer, which only data sets with "
                "unanswerable questions may have"
            )


# From characters to tokens


@dataclass(frozen=True)
class _Context:
    """The tokens of a context, and the range of characters of each."""

    text: str
    ids: list[int]
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class _Window:
    """The tokens of a context from `begin` to `end`, and those of the answer in the context."""

    example: int
    question: list[int]
    context: _Context
    begin: int
    end: int
    target: tuple[int, int] | None

    @property
    def offset(self) -> int:
        """What to add to the place of a token in the context to have its place in the row."""
        return len(self.question) + 2 - self.begin

    @property
    def span(self) -> tuple[int, int]:
        """First and last token of the answer in the row; (0, 0) if not all of it is there."""
        if self.target is None or self.target[0] < self.begin or self.target[1] >= self.end:
            return 0, 0
        return self.target[0] + self.offset, self.target[1] + self.offset


def _encode(tokenizer: Tokenizer, text: str) -> _Context:
    ids, _, offsets = tokenizer.encode_with_offsets(text)
    spans = np.array(offsets, np.int32).reshape(-1, 2)
    return _Context(text, ids, spans[:, 0], spans[:, 1])


def _target(example: Example, context: _Context) -> tuple[int, int] | None:
    """First and last token of the first answer that is in the context."""
    for answer in example.answers or ():
        start = _find(context.text, answer)
        if start is not None:
            first = int(np.searchsorted(context.ends, start, "right"))
            last = int(np.searchsorted(context.starts, start + len(answer.text), "left")) - 1
            if first <= last:
                return first, last
    return None


def _find(text: str, answer: Answer) -> int | None:
    """Where an answer is: where it says, or else nearest to there."""
    if not answer.text or text.startswith(answer.text, max(0, answer.start)):
        return max(0, answer.start) if answer.text else None
    after = text.find(answer.text, max(0, answer.start))
    before = text.rfind(answer.text, 0, max(0, answer.start) + len(answer.text))
    found = [place for place in (before, after) if place >= 0]
    return min(found, key=lambda place: abs(place - answer.start)) if found else None


def _places(found: Sequence[_Window], max_length: int) -> Arrays:
    """What predictions need to know of the tokens of each window; see `SquadTask.features`."""
    names = ("char_start", "char_end", "max_context")
    arrays = {name: np.full((len(found), max_length), -1, np.int32) for name in names}
    by_example: dict[int, list[int]] = defaultdict(list)
    for row, window in enumerate(found):
        by_example[window.example].append(row)
    ends: dict[int, np.ndarray] = {}
    for rows in by_example.values():
        context = found[rows[0]].context
        if id(context) not in ends:
            ends[id(context)] = _whole_characters(context)
        owner = owners(len(context.ids), [(found[row].begin, found[row].end) for row in rows])
        for number, row in enumerate(rows):
            window = found[row]
            tokens = slice(window.begin, window.end)
            place = row, slice(window.begin + window.offset, window.end + window.offset)
            arrays["char_start"][place] = context.starts[tokens]
            arrays["char_end"][place] = ends[id(context)][tokens]
            arrays["max_context"][place] = owner[tokens] == number
    arrays["max_context"] = np.maximum(arrays["max_context"], 0)
    return arrays


def _whole_characters(context: _Context) -> np.ndarray:
    """The ends of tokens, so that what belongs to a character stays with it.

    Tokenizers drop accents, vowel signs and joiners, which would be cut off the end of an answer.
    """
    if context.text.isascii() or not context.ids:
        return context.ends
    ends = context.ends.copy()
    limits = [*context.starts[1:], len(context.text)]
    for token, limit in enumerate(limits):
        while ends[token] < limit and _continues(context.text[ends[token]]):
            ends[token] += 1
    return ends


def _continues(character: str) -> bool:
    return unicodedata.category(character).startswith("M") or character in _JOINED


# From outputs to answers


@dataclass(frozen=True)
class _Spans:
    """Spans of an example, as ranges of characters, the best first."""

    starts: np.ndarray
    ends: np.ndarray
    scores: np.ndarray


_NO_SPANS = _Spans(np.zeros(0, int), np.zeros(0, int), np.zeros(0))


def _spans(features: Arrays, outputs: Arrays, max_length: int) -> dict[int, _Spans]:
    """All possible spans of at most `max_length` tokens, the best first, by example."""
    parts = []
    count = len(features["example"])
    for begin in range(0, count, _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        chunk = {name: array[rows] for name, array in features.items()}
        of_chunk = {name: array[rows] for name, array in outputs.items()}
        parts.append(_possible(chunk, of_chunk, max_length))
    if not parts:
        return {}
    example, starts, ends, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
    # Best first within each example, equal scores in the order of the rows.
    order = np.lexsort((-scores, example))
    example, starts, ends, scores = (x[order] for x in (example, starts, ends, scores))
    present, firsts = np.unique(example, return_index=True)
    bounds = [*firsts, len(example)]
    return {
        int(index): _Spans(starts[a:b], ends[a:b], scores[a:b])
        for index, a, b in zip(present, bounds[:-1], bounds[1:], strict=True)
    }


def _possible(features: Arrays, outputs: Arrays, max_length: int) -> tuple[np.ndarray, ...]:
    """Example, first and last character and score of each possible span of some rows."""
    start, end, score = _candidates(features, outputs, max_length)
    rows = np.arange(len(start))[:, None, None]
    first, last = features["char_start"][rows, start], features["char_end"][rows, end]
    possible = (
        (first >= 0)
        & (last > first)  # so it does not end before it starts, or where there is no context
        & (features["max_context"][rows, start] == 1)
        & (end < start + max_length)
    )
    rows = np.broadcast_to(features["example"][:, None, None], possible.shape)
    return rows[possible], first[possible], last[possible], score[possible]


def _candidates(
    features: Arrays, outputs: Arrays, max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and score of spans that the network proposes, each [rows, starts, ends]."""
    if "start_top" in outputs:
        start, end = outputs["start_top"][:, :, None], outputs["end_top"]
        score = outputs["start_log_prob"].astype(np.float64)[:, :, None] + outputs["end_log_prob"]
        return np.broadcast_to(start, end.shape), end, score
    length = outputs["start_logits"].shape[1]
    can_start = (features["char_start"] >= 0) & (features["max_context"] == 1)
    logits = np.where(can_start, outputs["start_logits"], -np.inf).astype(np.float64)
    start = np.argsort(-logits, axis=1, kind="stable")[:, :N_BEST]
    end = start[:, :, None] + np.arange(max_length)
    end = np.minimum(end, length - 1)  # which is [SEP] or padding: no answer ends there
    rows = np.arange(len(start))[:, None]
    score = logits[rows, start][:, :, None] + outputs["end_logits"][rows[:, :, None], end]
    return np.broadcast_to(start[:, :, None], end.shape), end, score


def _null_odds(
    features: Arrays, outputs: Arrays, count: int, found: Mapping[int, _Spans]
) -> np.ndarray:
    """Of each example the least over its windows."""
    odds = np.full(count, np.inf)
    if "answerable_logit" in outputs:
        np.minimum.at(odds, features["example"], outputs["answerable_logit"])
        return odds
    null = outputs["start_logits"][:, 0].astype(np.float64) + outputs["end_logits"][:, 0]
    np.minimum.at(odds, features["example"], null)
    for index, spans in found.items():
        odds[index] -= spans.scores[0]
    return odds


def _n_best(context: str, spans: _Spans) -> tuple[Span, ...]:
    """The best spans, which are given best first; each text once."""
    best: dict[str, tuple[int, int, float]] = {}
    for start, end, score in zip(spans.starts, spans.ends, spans.scores, strict=True):
        # A token of SentencePiece may be a space alone.
        found = context[start:end]
        text = found.strip()
        if text and text not in best:
            start += len(found) - len(found.lstrip())
            best[text] = int(start), int(start) + len(text), float(score)
            if len(best) == N_BEST:
                break
    scores = np.array([score for *_, score in best.values()])
    shares = np.exp(scores - scores.max(initial=-np.inf))
    shares /= shares.sum() or 1.0
    return tuple(
        Span(text, start, end, score, float(share))
        for (text, (start, end, score)), share in zip(best.items(), shares, strict=True)
    )
