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
from electra_jax.finetune.heads.token import Tagging
from electra_jax.finetune.scores import ACCURACY, Score
from electra_jax.finetune.tasks import tag_schemes
from electra_jax.finetune.tasks.base import TRAIN, Files, Labels, Scores, Task
from electra_jax.finetune.tasks.conll import Example, read_sentences
from electra_jax.finetune.tasks.tag_schemes import OUTSIDE, SCHEMES, Entity, convert, type_of
from electra_jax.settings import one_of, setting


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The tags of a sentence in the scheme of the files, and the probabilities of these."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...]
    entities: tuple[Entity, ...]  # none in the scheme `plain`
    probabilities: tuple[float, ...]


ENTITY_SCORES = {
    "f1": Score("F1", console="f1"),
    "precision": Score("precision", figure=None, tile=""),
    "recall": Score("recall", figure=None, tile=""),
}


class TaggingTask(Task):
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
        return Tagging(labels=self._tags(self._learned), style=self.style)

    @property
    def metrics(self) -> dict[str, Score]:
        """F1 of entities, or accuracy of `plain` tags, is the main score."""
        return (ENTITY_SCORES if self.scheme != "plain" else {}) | {"accuracy": ACCURACY}

    def resolved(self) -> dict[str, Any]:
        """See `Task.resolved`."""
        return super().resolved() | {"scheme": self.scheme}

    @cached_property
    def _training(self) -> tuple[list[Example], int | None]:
        """The sentences of the training file, and its number of columns; None: there is none."""
        return read_sentences(self.files[TRAIN], None) if TRAIN in self.files else ([], None)

    @property
    def _learned(self) -> str:
        return "plain" if self.scheme == "plain" else "BIOES"

    def _tags(self, scheme: str) -> tuple[str, ...]:
        if scheme == "plain":
            return tuple(self.types)
        return OUTSIDE, *(f"{prefix}-{x}" for x in self.types for prefix in SCHEMES[scheme])

    def is_labeled(self, example: Example) -> bool:
        """See `Task.is_labeled`."""
        return example.tags is not None

    def read_file(self, split: str, path: str) -> list[Example]:
        """See `Task.read`. All tags must be of the scheme and the types."""
        _, expected = self._training
        examples, columns = read_sentences(path, expected)
        if examples and 1 < columns < (expected or 0):
            self.log(
                f"{path}: {columns} columns, the training file has {expected}: taken to have no "
                "tags"
            )
        allowed, out_of_place = self._tags(self.scheme), []
        for example in examples:
            tags = example.tags or ()
            for line, tag in enumerate(tags, example.line):
                if tag not in allowed:
                    raise UserError(
                        f"{path}, line {line}: tag {tag!r}; allowed in the scheme {self.scheme}: "
                        f"{', '.join(allowed)}; config.data.labels names other types"
                    )
            places = tag_schemes.broken(tags, self.scheme)
            out_of_place += [example.line + place for place in places]
        if out_of_place:
            self.log(
                f"{path}: {len(out_of_place):,} tags continue or end an entity that is not there, "
                f"the first in line {out_of_place[0]}; taken to begin one"
            )
        return examples

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """See `Task.features`. A label is at the first token of a word; a word without tokens, such
        as a control character, is the unknown token.

        Sentences that do not fit are divided into windows that overlap by half. Each word counts in
        one of them, where most is shown around it. For predictions there is `word` int32 [N, L]:
        the number of the word that starts at a token and counts there, else -1.
        """
        pieces = iter(tokenizer.encode_batch([word for x in examples for word in x.words]))
        room = max_length - 2
        segments, owning, words = [], [], []  # of each row
        for index, example in enumerate(examples):
            of_words = [next(pieces) or [tokenizer.unk_id] for _ in example.words]
            ids = [i for word in of_words for i in word]
            firsts = np.cumsum([0, *map(len, of_words)])[:-1]
            spans = list(windows(len(ids), room, max(1, room // 2)))
            owner = owners(len(ids), spans)[firsts]
            for number, (begin, end) in enumerate(spans):
                here = np.flatnonzero(owner == number)
                word = np.full(max_length, -1, np.int32)
                word[firsts[here] - begin + 1] = here
                segments.append((ids[begin:end],))
                owning.append(index)
                words.append(word)
        arrays = pack(tokenizer, segments, max_length)
        arrays["example"] = np.array(owning, np.int32)
        if not training:
            arrays["word"] = np.array(words, np.int32).reshape(-1, max_length)
        if all(map(self.is_labeled, examples)):
            ids_of = {label: i for i, label in enumerate(self.head.labels)}
            of_tags = [[ids_of[tag] for tag in convert(x.tags, self._learned)] for x in examples]
            targets = [np.array([*ids, -1], np.int32) for ids in of_tags]  # -1 is that of no word
            label = [targets[index][word] for index, word in zip(owning, words, strict=True)]
            arrays["label"] = np.array(label, np.int32).reshape(-1, max_length)
        return arrays

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

    def compare(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> Scores:
        """See `Task.compare`. The accuracy is of words; all else, of whole entities."""
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
