"""Sequence tagging: a tag for each word, most often to find entities (spec 6.3).

Files and schemes are those of `conll` and `tag_schemes`. As in the original, the network learns
entities as BIOES, whatever the scheme of the files; predictions are written in that of the files.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import special

from electra_jax.data.features import Arrays, owners, pack, windows
from electra_jax.data.opening import read_lines
from electra_jax.data.tables import is_json_lines, text_cell
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.heads import base
from electra_jax.finetune.heads.token import Tagging
from electra_jax.finetune.tasks import tag_schemes
from electra_jax.finetune.tasks.base import TRAIN, Files, FileTask, Labels
from electra_jax.finetune.tasks.conll import Sentence, read_sentences
from electra_jax.finetune.tasks.tag_schemes import OUTSIDE, SCHEMES, Entity, convert, type_of
from electra_jax.objectives.metrics import Metric
from electra_jax.settings import one_of, setting


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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


ACCURACY = {"accuracy": base.ACCURACY}
ENTITY_SCORES = {
    "f1": Metric("F1", better="higher", console="f1", figure="Scores", tile="{:.4g}"),
    "precision": Metric("precision", better="higher", figure=None),
    "recall": Metric("recall", better="higher", figure=None),
}


class TaggingTask(FileTask):
    """Tagging of files of words in columns.

    A split without a column of tags is predicted, never scored: one of words alone, or with fewer
    columns than the training file. Tags that continue an entity which has not begun are counted in
    the log; they begin one.
    """

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Files, Labels):
        """`labels` are types of entities, or tags; what is not among them is an error."""

        scheme: str = setting("", "default: that of the training file", one_of("", *SCHEMES))

    settings: Settings
    can_read_lines: ClassVar[bool] = True

    @cached_property
    def scheme(self) -> str:
        """That of all files, a key of `SCHEMES`."""
        if self.settings.scheme:
            return self.settings.scheme
        tags = [sentence.tags or () for sentence in self._training[0]]
        if len(different := {*chain(*tags)}) < 2:
            raise UserError(
                f"{self.files[TRAIN]}: the tags are {sorted(different)}; at least two are needed "
                "to learn anything"
            )
        return tag_schemes.detect(tags)

    @cached_property
    def types(self) -> list[str]:
        """Types of entities, or tags of the scheme `plain`, sorted."""
        tags = self.settings.labels or chain(*(x.tags or () for x in self._training[0]))
        return sorted({type_of(tag, self.scheme) for tag in tags} - {""})

    @cached_property
    def head(self) -> Tagging:
        """See `Task.head`."""
        labels = self.types
        if self.scheme != "plain":
            labels = [OUTSIDE, *(f"{prefix}-{x}" for x in labels for prefix in SCHEMES["BIOES"])]
        return Tagging(labels=tuple(labels), style=self.style)

    @property
    def metrics(self) -> dict[str, Metric]:
        """F1 of entities, or accuracy of `plain` tags, is the main score."""
        return ACCURACY if self.scheme == "plain" else ENTITY_SCORES | ACCURACY

    def resolved(self) -> dict[str, Any]:
        """See `Task.resolved`."""
        return super().resolved() | {"scheme": self.scheme}

    @cached_property
    def _training(self) -> tuple[list[Sentence], int | None]:
        """The sentences of the training file, and its number of columns; None: there is none."""
        return read_sentences(self.files[TRAIN], None) if TRAIN in self.files else ([], None)

    def is_labeled(self, example: Example) -> bool:
        """See `Task.is_labeled`."""
        return example.tags is not None

    def read_file(self, split: str, path: str) -> list[Example]:
        """See `Task.read`."""
        _, expected = self._training
        sentences, columns = read_sentences(path, expected)
        if sentences and 1 < columns < (expected or 0):
            self.log(
                f"{path}: {columns} columns, the training file has {expected}: taken to have no "
                "tags"
            )
        self._check(sentences, path)
        return [Example(str(i), x.words, x.tags) for i, x in enumerate(sentences)]

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
        if all(map(self.is_labeled, examples)):
            arrays["label"] = self._targets(examples, arrays["example"], word)
        return arrays

    def _targets(
        self, examples: Sequence[Example], rows: np.ndarray, word: np.ndarray
    ) -> np.ndarray:
        ids = {label: i for i, label in enumerate(self.head.labels)}
        targets = [
            np.array([ids[tag] for tag in convert(example.tags, self._learned)], np.int32)
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
            learned = [self.head.labels[i] for i in ids]
            tags = tuple(convert(learned, self.scheme))
            found = () if self.scheme == "plain" else tuple(tag_schemes.entities(learned))
            probabilities = tuple(probabilities.tolist())
            predictions.append(Prediction(example.id, example.words, tags, found, probabilities))
        return predictions

    def compare(
        self, examples: Sequence[Example], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        """See `Task.compare`.

        `f1`, `precision` and `recall` of whole entities, by the rules of conlleval, but for the
        scheme `plain`; and `accuracy`, the share of words with the right tag.
        """
        gold, found = (
            [convert(one.tags, self._learned) for one in ones] for ones in (examples, predictions)
        )
        words = [*zip(chain(*gold), chain(*found), strict=True)]
        accuracy = {"accuracy": sum(a == b for a, b in words) / max(1, len(words))}
        return (tag_schemes.entity_scores(gold, found) if self.scheme != "plain" else {}) | accuracy

    def floor(self, examples: Sequence[Example]) -> float:
        """See `Task.floor`."""
        if self.scheme != "plain":
            return 0.0  # no entities
        tags = Counter(tag for example in examples for tag in example.tags)
        return max(tags.values()) / tags.total()

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Writes `SPLIT.conll`, too: words and tags between tabs."""
        columns = [
            "".join(f"{word}\t{tag}\n" for word, tag in zip(guess.words, guess.tags, strict=True))
            for guess in predictions
        ]
        path = write_text(directory / f"{split}.conll", "\n".join(columns))
        return [path, *super().write(predictions, directory, split)]

    def example(self, number: int, values: Mapping[str, Any], where: str) -> Example:
        """See `Task.example`: an object with `words`, or `text` with spaces between the words."""
        words = values.get("words")
        if words is None:
            words = text_cell(values, "text", where).split()
        if not isinstance(words, list) or not all(isinstance(x, str) and x for x in words):
            raise UserError(f"{where}: words is {words!r}; allowed: a list of words")
        return Example(str(values.get("id", number)), tuple(words), None)

    def unlabeled(self, path: str, by_line: bool = False) -> list[Example]:
        """See `Task.unlabeled`: words in columns, a sentence a line, or JSON lines."""
        if is_json_lines(path):
            return super().unlabeled(path)
        if by_line:
            sentences = [line.split() for line in read_lines(path)]
        else:
            sentences = [sentence.words for sentence in read_sentences(path, None)[0]]
        return [Example(str(i), tuple(words), None) for i, words in enumerate(sentences)]

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        """See `Task.answer`."""
        return vars(prediction)

    @property
    def _learned(self) -> str:
        return "plain" if self.scheme == "plain" else "BIOES"

    def _check(self, sentences: Sequence[Sentence], path: str) -> None:
        """Checks that all tags are of the scheme and the types; counts those that are out of place.

        Raises:
          UserError: names the line.
        """
        scheme = self.scheme
        out_of_place = []
        for sentence in sentences:
            tags = sentence.tags or ()
            for line, tag in enumerate(tags, sentence.line):
                if not tag_schemes.is_tag(tag, scheme):
                    allowed = (OUTSIDE, *(f"{prefix}-TYPE" for prefix in SCHEMES[scheme]))
                    raise UserError(
                        f"{path}, line {line}: tag {tag!r} is not of the scheme {scheme}: "
                        f"{', '.join(allowed)}"
                    )
                if type_of(tag, scheme) not in ("", *self.types):
                    raise UserError(
                        f"{path}, line {line}: tag {tag!r} is not known; the training file has "
                        f"{', '.join(self.types)}; config.data.labels names others"
                    )
            out_of_place += [sentence.line + place for place in tag_schemes.broken(tags, scheme)]
        if out_of_place:
            self.log(
                f"{path}: {len(out_of_place):,} tags continue or end an entity that is not there, "
                f"the first in line {out_of_place[0]}; taken to begin one"
            )
