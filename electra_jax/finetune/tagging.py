"""Sequence tagging: a tag for each word, most often to find entities (spec 6.3).

    EU      B-ORG
    rejects O
    German  B-MISC

    Peter   B-PER
    Blackburn   I-PER

A word a line, its tag in the last column, a blank line between sentences. Columns are separated by
tabs, or by spaces in a file whose first line has no tab. Lines that say `-DOCSTART-` are skipped.

Schemes: `BIO` (an entity begins with B), `IOB1` (B only where two entities of a type touch),
`BIOES` (single words are S, last words E), and `plain` for tags that are no entities, such as parts
of speech. As in the original, the network learns entities as BIOES, whatever the scheme of the
files; predictions are written in that of the files.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from scipy import special

from electra_jax.data.text import read_lines
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune import metrics
from electra_jax.finetune.encoding import owners, pack, windows
from electra_jax.finetune.task import TRAIN, Arrays, FileTask, Head, Log

OUTSIDE = "O"
SCHEMES = {"BIO": "BI", "IOB1": "BI", "BIOES": "BIES", "plain": ""}  # and their prefixes

_DOCUMENT = "-DOCSTART-"
_ENTITY_TAG = re.compile(r"([BIES])-(.+)", re.DOTALL)

Entity = tuple[int, int, str]  # first word, word after the last, type


@dataclass(frozen=True)
class Example:
    """The words of a sentence and their tags, as in the file.

    Attributes:
      id: the number of the sentence in its file, from 0.
      words: none of them is split or joined.
      tags: as many; None when they are not known.
    """

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None


@dataclass(frozen=True)
class Prediction:
    """The tags of a sentence.

    Attributes:
      id, words: of the example.
      tags: one for each word, in the scheme of the files.
      entities: (first word, word after the last, type); none in the scheme `plain`.
      probabilities: of what the network chose for each word.
    """

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...]
    entities: tuple[Entity, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class _Sentence:
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    line: int  # of the first word


class TaggingTask(FileTask):
    """Tagging of files of words in columns.

    A split without a column of tags is predicted, never scored: one of words alone, or with fewer
    columns than the training file.

    Args:
      files: the file of each split. `train` is needed unless `scheme` and `types` are given.
      scheme: one of `SCHEMES`. By default that of the training file.
      types: of entities, or tags of the scheme `plain`. By default those of the training file; what
        is not among them is an error.
      log: takes a line for tags that do not continue an entity but should. They begin one.

    Raises:
      UserError: an argument does not suit, or the training file cannot be read.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        *,
        scheme: str | None = None,
        types: Sequence[str] | None = None,
        name: str = "tagging",
        log: Log = print,
    ):
        if scheme is not None and scheme not in SCHEMES:
            raise UserError(f"scheme is {scheme!r}; allowed: {', '.join(SCHEMES)}")
        self.name = name
        self._files = dict(files)
        self._log = log
        self._read: dict[str, list[Example]] = {}
        if TRAIN not in files and (scheme is None or types is None):
            raise UserError(f"{name}: there is no train file, and scheme or types are not given")
        train, self._columns = _parse(files[TRAIN], None) if TRAIN in files else ([], None)
        self.scheme = scheme or _detect(train, files[TRAIN])
        found = {_type(tag, self.scheme) for sentence in train for tag in sentence.tags or ()}
        self._types = tuple(types if types is not None else sorted(found - {""}))
        self.head = Head("tagging", _labels(self._types, self.scheme))
        self.main_metric = "accuracy" if self.scheme == "plain" else "f1"

    def is_labelled(self, examples: Sequence[Example]) -> bool:
        """See `FileTask.is_labelled`."""
        return all(example.tags is not None for example in examples)

    def read(self, split: str) -> list[Example]:
        """See `Task.read`."""
        path = self._path(split)
        if split not in self._read:
            sentences, columns = _parse(path, self._columns)
            if sentences and 1 < columns < (self._columns or 0):
                self._log(
                    f"{path}: {columns} columns, the training file has {self._columns}: taken to "
                    "have no tags"
                )
            self._check(sentences, path)
            self._read[split] = [
                Example(str(number), sentence.words, sentence.tags)
                for number, sentence in enumerate(sentences)
            ]
        return self._read[split]

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """See `Task.features`. A label is at the first token of a word; a word without tokens, such
        as a control character, is the unknown token.

        Sentences that do not fit are divided into windows that overlap by half. Each word counts in
        one of them, where most is shown around it. For predictions there is `word` int32 [N, L]:
        the number of the word that starts at a token and counts there, else -1.
        """
        words = [word for example in examples for word in example.words]
        pieces = iter(tokenizer.encode_batch(words))
        room = max_length - 2
        segments: list[tuple[list[int]]] = []
        rows: list[int] = []
        counted: list[tuple[np.ndarray, np.ndarray]] = []  # words, and their places in the row
        for index, example in enumerate(examples):
            of_words = [next(pieces) or [tokenizer.unk_id] for _ in example.words]
            ids = [i for word in of_words for i in word]
            firsts = np.cumsum([0, *map(len, of_words)])[:-1]
            spans = list(windows(len(ids), room, max(1, room // 2)))
            owner = owners(len(ids), spans)[firsts]
            for number, (begin, end) in enumerate(spans):
                here = np.flatnonzero(owner == number)
                segments.append((ids[begin:end],))
                rows.append(index)
                counted.append((here, firsts[here] - begin + 1))
        arrays = pack(tokenizer, segments, max_length)
        arrays["example"] = np.array(rows, np.int32)
        word = np.full(arrays["input_ids"].shape, -1, np.int32)
        for row, (here, places) in enumerate(counted):
            word[row, places] = here
        if not training:
            arrays["word"] = word
        if self.is_labelled(examples):
            arrays["label"] = self._targets(examples, arrays["example"], word)
        return arrays

    def _targets(
        self, examples: Sequence[Example], rows: np.ndarray, word: np.ndarray
    ) -> np.ndarray:
        ids = {label: i for i, label in enumerate(self.head.labels)}
        targets = [
            np.array([ids[tag] for tag in convert(example.tags, self._learnt)], np.int32)
            for example in examples
        ]
        label = np.full(word.shape, -1, np.int32)
        for row, index in enumerate(rows):
            here = word[row] >= 0
            label[row, here] = targets[index][word[row, here]]
        return label

    def predict(
        self, examples: Sequence[Example], features: Arrays, outputs: Arrays
    ) -> list[Prediction]:
        """See `Task.predict`."""
        chosen = [np.zeros(len(example.words), int) for example in examples]
        shares = [np.zeros(len(example.words)) for example in examples]
        for row, index in enumerate(features["example"]):
            here = features["word"][row] >= 0
            word, logits = features["word"][row, here], outputs["logits"][row, here]
            chosen[index][word] = logits.argmax(axis=-1)
            shares[index][word] = special.softmax(logits.astype(np.float64), axis=-1).max(axis=-1)
        predictions = []
        for example, ids, probabilities in zip(examples, chosen, shares, strict=True):
            learnt = [self.head.labels[i] for i in ids]
            tags = convert(learnt, self.scheme)
            predictions.append(
                Prediction(
                    example.id,
                    example.words,
                    tuple(tags),
                    tuple(() if self.scheme == "plain" else entities(learnt)),
                    tuple(probabilities.tolist()),
                )
            )
        return predictions

    def score(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """See `Task.score`.

        `f1`, `precision` and `recall` of whole entities, by the rules of conlleval, but for the
        scheme `plain`; and `accuracy`, the share of words with the right tag.
        """
        pairs = zip(examples, predictions, strict=True)
        pairs = [(example, guess) for example, guess in pairs if example.tags is not None]
        if not pairs:
            return {}
        gold = [convert(example.tags, self._learnt) for example, _ in pairs]
        found = [convert(guess.tags, self._learnt) for _, guess in pairs]
        words = [*zip(chain(*gold), chain(*found), strict=True)]
        accuracy = {"accuracy": sum(a == b for a, b in words) / max(1, len(words))}
        return accuracy if self.scheme == "plain" else {**entity_scores(gold, found), **accuracy}

    def floor(self, examples: Sequence[Example]) -> float:
        """See `Task.floor`."""
        if self.scheme != "plain":
            return 0.0  # no entities
        tags = Counter(tag for example in examples for tag in example.tags)
        return max(tags.values()) / tags.total()

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Writes `SPLIT.conll`, words and tags between tabs, and `SPLIT.jsonl`.

        The latter has `id`, `words`, `tags`, `probabilities`, and `entities` by first word, word
        after the last, and type.
        """
        columns = [
            "".join(f"{word}\t{tag}\n" for word, tag in zip(guess.words, guess.tags, strict=True))
            for guess in predictions
        ]
        lines = [json.dumps(vars(guess)) + "\n" for guess in predictions]
        return [
            write_text(directory / f"{split}.conll", "\n".join(columns)),
            write_text(directory / f"{split}.jsonl", "".join(lines)),
        ]

    @property
    def _learnt(self) -> str:
        return "plain" if self.scheme == "plain" else "BIOES"

    def _check(self, sentences: Sequence[_Sentence], path: str) -> None:
        """Tags are of the scheme and the types."""
        prefixes, broken = SCHEMES[self.scheme], []
        for sentence in sentences:
            for line, tag in enumerate(sentence.tags or (), sentence.line):
                match = _ENTITY_TAG.fullmatch(tag)
                fits = tag == OUTSIDE or bool(match and match[1] in prefixes)
                if self.scheme != "plain" and not fits:
                    raise UserError(
                        f"{path}, line {line}: tag {tag!r} is not of the scheme {self.scheme}: "
                        f"{OUTSIDE}, {', '.join(f'{prefix}-TYPE' for prefix in prefixes)}"
                    )
                if (kind := _type(tag, self.scheme)) and kind not in self._types:
                    raise UserError(
                        f"{path}, line {line}: tag {tag!r} is not known; the training file has "
                        f"{', '.join(self._types)}; config.data.labels names others"
                    )
            broken += [sentence.line + place for place in _broken(sentence, self.scheme)]
        if broken:
            self._log(
                f"{path}: {len(broken):,} tags continue or end an entity that is not there, the "
                f"first in line {broken[0]}; taken to begin one"
            )


# Files


def read_words(path: str) -> list[tuple[str, ...]]:
    """The words of the sentences of a file, whatever its other columns hold."""
    return [sentence.words for sentence in _parse(path, None)[0]]


def _parse(path: str, expected: int | None) -> tuple[list[_Sentence], int]:
    """The sentences of a file, and its number of columns.

    Tags are None if there are fewer columns than `expected`, the training file's.
    """
    lines = read_lines(path)
    tabs = "\t" in next((line for line in lines if line.strip()), "")
    groups: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(lines, 1):
        # Other white space, such as that without a break, may be part of a word.
        fields = line.split("\t") if tabs else re.split(" +", line.strip(" "))
        if line.strip(" \t") and fields[0] != _DOCUMENT:
            groups[-1].append((number, fields))
        else:
            groups.append([])
    groups = [group for group in groups if group]
    columns = len(groups[0][0][1]) if groups else 0
    for number, fields in (row for group in groups for row in group):
        if len(fields) != columns or not fields[-1]:
            raise UserError(
                f"{path}, line {number}: found the columns {fields}; the first line of words has "
                f"{columns}, and a tag is not empty"
            )
    if expected is not None and columns > expected:
        raise UserError(f"{path}: {columns} columns; the training file has {expected}")
    labelled = columns >= (expected or 2)
    sentences = [
        _Sentence(
            words=tuple(fields[0] for _, fields in group),
            tags=tuple(fields[-1] for _, fields in group) if labelled else None,
            line=group[0][0],
        )
        for group in groups
    ]
    return sentences, columns


def _detect(sentences: Sequence[_Sentence], path: str) -> str:
    """The scheme of a training file."""
    tags = {tag for sentence in sentences for tag in sentence.tags or ()}
    if len(tags) < 2:
        raise UserError(
            f"{path}: the tags are {sorted(tags)}; at least two are needed to learn anything"
        )
    prefixes = {match[1] for match in map(_ENTITY_TAG.fullmatch, tags) if match}
    if not prefixes:
        return "plain"
    if prefixes & {"E", "S"}:
        return "BIOES"
    # Where B follows something else, it is needed to begin an entity; where I does, it is not.
    follows = {"B": False, "I": False}
    for sentence in sentences:
        for before, tag in pairwise((OUTSIDE, *(sentence.tags or ()))):
            if tag[:2] in ("B-", "I-") and before[1:] != tag[1:]:
                follows[tag[0]] = True
    return "IOB1" if follows["I"] and not follows["B"] else "BIO"


# Tags and entities


def entities(tags: Iterable[str]) -> list[Entity]:
    """The entities that tags of any scheme but `plain` stand for, by the rules of conlleval.

    I or E continues what B or I of the same type has begun; whatever else is not O begins anew.
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


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """Tags for the same entities in another scheme. To `plain`, they stay as they are."""
    if scheme == "plain":
        return list(tags)
    made = [OUTSIDE] * len(tags)
    for start, end, kind in entities(tags):
        touches = start > 0 and made[start - 1][2:] == kind
        first = "I" if scheme == "IOB1" and not touches else "B"
        made[start:end] = [f"{first}-{kind}", *[f"I-{kind}"] * (end - start - 1)]
        if scheme == "BIOES":
            made[end - 1] = f"{'S' if end - start == 1 else 'E'}-{kind}"
    return made


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """`f1`, `precision` and `recall` of exact entities over all sentences; 0 if there are none."""
    right = guessed = there = 0
    for tags, found in zip(gold, predicted, strict=True):
        expected, given = {*entities(tags)}, {*entities(found)}
        right += len(expected & given)
        guessed += len(given)
        there += len(expected)
    return {
        "f1": metrics.f1_of_counts(right, guessed, there),
        "precision": right / max(1, guessed),
        "recall": right / max(1, there),
    }


def _continues(before: str, tag: str) -> bool:
    return tag[:2] in ("I-", "E-") and before[:2] in ("B-", "I-") and before[2:] == tag[2:]


def _broken(sentence: _Sentence, scheme: str) -> list[int]:
    """Places of tags that continue or end an entity which has not begun."""
    if scheme not in ("BIO", "BIOES") or sentence.tags is None:
        return []
    return [
        place
        for place, (before, tag) in enumerate(pairwise((OUTSIDE, *sentence.tags)))
        if tag[:2] in ("I-", "E-") and not _continues(before, tag)
    ]


def type_of(label: str) -> str:
    """The type of entity in a tag, or a type as it is; "" for O."""
    if label == OUTSIDE:
        return ""
    match = _ENTITY_TAG.fullmatch(label)
    return match[2] if match else label


def _type(tag: str, scheme: str) -> str:
    """The type of entity that a tag is of, or the tag itself if it is `plain`; "" for O."""
    if scheme == "plain":
        return tag
    return tag[2:]


def _labels(types: Sequence[str], scheme: str) -> tuple[str, ...]:
    """What the network chooses from."""
    if scheme == "plain":
        return tuple(types)
    return OUTSIDE, *(f"{prefix}-{kind}" for kind in types for prefix in SCHEMES["BIOES"])
