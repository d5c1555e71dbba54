"""One interface for all tokenizers, and for what trains them."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from electra_jax.errors import UserError
from electra_jax.settings import Check

# The ids of a line, their tokens, and where in the line these come from: ranges of characters,
# (start, end), without the white space around a word.
Encoded = tuple[list[int], list[str], list[tuple[int, int]]]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SETTINGS_FILE = "tokenizer_config.json"

FIVE_NAMES = Check(
    lambda x: (
        isinstance(x, list | tuple)
        and all(isinstance(name, str) and name for name in x)
        and len({*x}) == len(x) == 5
    ),
    "five different names: padding, unknown, start, end, mask",
)
_TRUTH = Check(lambda x: isinstance(x, bool), "true or false")
SETTINGS = {
    "special_tokens": FIVE_NAMES,
    "lower_case": _TRUTH,
    "strip_accents": _TRUTH,
    "max_word_chars": Check(lambda x: type(x) is int and x >= 1, "a number, at least 1"),
}


def check_setting(where: str, name: str, value: Any) -> None:
    """Raises UserError, which begins with `where`, if a setting cannot have this value."""
    if not SETTINGS[name].is_allowed(value):
        raise UserError(f"{where} is {value!r}; allowed: {SETTINGS[name]}")


class Tokenizer(ABC):
    """Cuts lines of text into tokens of a vocabulary.

    Text cannot forge special tokens: whatever is typed in a line, encoding never gives those for
    padding, start, end and mask. A lone surrogate, which no UTF-8 text can hold, counts as a
    question mark.

    Attributes:
      family: its key in `tokenizers.FAMILIES`.
      vocab_file: name of the vocabulary's file in the directory of a saved tokenizer.
      setting_names: the keys of `SETTINGS` that it has.
      content: of the vocabulary's file.
      vocab: the tokens; a token's place is its id.
      starts_word: bool [vocab_size]: whether a token begins a word. Special tokens do.
      settings: by name, as JSON has them.
      special_ids: of padding, unknown, start, end and mask token; also `pad_id`, `unk_id` ...
      hash: the sha256 of family, vocabulary and settings: equal hashes give equal ids.
    """

    family: ClassVar[str]
    vocab_file: ClassVar[str]
    setting_names: ClassVar[tuple[str, ...]]

    def __init__(
        self, vocab: Sequence[str], begins: Callable[[str], bool], content: bytes, settings: dict
    ):
        """Called by the families, each of which takes the settings that it has.

        Args:
          begins: whether a token that is not special begins a word.

        Raises:
          UserError: a special token is missing, or a token is there twice.
        """
        if unknown := sorted(settings.keys() - SETTINGS):
            raise TypeError(f"no settings of tokenizers: {', '.join(unknown)}")
        self.vocab = list(vocab)
        settings = {"special_tokens": SPECIAL_TOKENS, **settings}
        self.settings = {name: settings[name] for name in self.setting_names}
        self.settings["special_tokens"] = special_tokens = [*settings["special_tokens"]]
        ids = {token: i for i, token in enumerate(self.vocab)}
        for token in special_tokens:
            if token not in ids:
                allowed = f"all of {', '.join(special_tokens)} must be in"
                raise UserError(f"the vocabulary lacks {token}; {allowed}")
        if len(ids) < len(self.vocab):
            token, count = Counter(self.vocab).most_common(1)[0]
            raise UserError(f"the vocabulary holds {token!r} {count} times; once is allowed")
        self.special_ids = tuple(ids[name] for name in special_tokens)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.starts_word = np.array([begins(token) for token in self.vocab])
        self.starts_word[list(self.special_ids)] = True
        self.content = content
        identity = json.dumps({"family": self.family, **self.settings}, sort_keys=True)
        self.hash = hashlib.sha256(f"{identity}\n".encode() + content).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocab)

    @classmethod
    def from_file(cls, path: str | Path, **settings: Any) -> "Tokenizer":
        """See `tokenizers.from_file`."""
        try:
            return cls(cls.parsed(Path(path).read_bytes()), **settings)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    @staticmethod
    def parsed(content: bytes) -> Any:
        """The constructor's first argument, from the content of a vocabulary's file."""
        return content

    @abstractmethod
    def encode_batch(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, without start and end token."""

    @abstractmethod
    def encode_with_offsets(self, line: str) -> Encoded:
        """The ids of `encode_batch` with their tokens and offsets.

        What normalization makes of one character has the range of that character.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Readable text for ids, special tokens included. Not an exact inverse of encoding."""

    def save(self, directory: str | Path) -> None:
        """Writes the vocabulary and `tokenizer_config.json` into a directory, for `load`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self.vocab_file).write_bytes(self.content)
        settings = json.dumps({"family": self.family, **self.settings}, indent=2) + "\n"
        (directory / SETTINGS_FILE).write_text(settings, encoding="utf-8")


@dataclass
class Trainer(ABC):
    """Learns a vocabulary from any amount of text in bounded memory.

    Many processes may summarize chunks of a corpus at once; the summaries are added up in one:

        trainer = SentencePieceTrainer("unigram", 32000, {"lower_case": False, ...})
        for summary in pool.imap(trainer.summarize, chunks):
            trainer.add(summary)
        tokenizer = trainer.finish()

    The vocabulary depends on the text, not on how it was cut into chunks, nor on the number of
    cores. (Only where a WordPiece corpus has more distinct words than `max_words`, the cuts decide
    which rare words are forgotten.)
    """

    summary: ClassVar[Callable]  # of (lines, lower_case, strip_accents)

    kind: str  # a key of `tokenizers.TRAINERS`
    vocab_size: int  # at most; a small corpus may give fewer tokens
    settings: dict[str, Any]  # of the tokenizer

    def __post_init__(self):
        self.settings = {"special_tokens": SPECIAL_TOKENS, **self.settings}

    @property
    def summarize(self) -> Callable[[list[str]], Any]:
        """A pure function from lines to their summary; pickles without what has been added."""
        names = ("lower_case", "strip_accents")
        return partial(type(self).summary, **{name: self.settings[name] for name in names})

    @abstractmethod
    def add(self, summary: Any) -> None:
        """Adds the summary of a chunk."""

    @abstractmethod
    def finish(self) -> Tokenizer:
        """The tokenizer learned from all chunks added.

        Raises:
          UserError: the vocabulary size is too small for the characters of the text, or there is
            no text.
        """


def encode_with_special_tokens(tokenizer: Tokenizer, line: str) -> Encoded:
    """As `Tokenizer.encode_with_offsets`, but special tokens typed in the line are what they say.

    For text that is trusted, such as a sentence with a `[MASK]` to be filled.
    """
    names = tokenizer.settings["special_tokens"]
    ids, tokens, offsets, start = [], [], [], 0
    for part in re.split(f"({'|'.join(map(re.escape, names))})", line):
        if part in names:
            found = [tokenizer.vocab.index(part)], [part], [(0, len(part))]
        else:
            found = tokenizer.encode_with_offsets(part)
        ids += found[0]
        tokens += found[1]
        offsets += [(start + begin, start + end) for begin, end in found[2]]
        start += len(part)
    return ids, tokens, offsets


def well_formed(line: str) -> str:
    """`line` with question marks for lone surrogates, which cannot be tokenized. As long as it."""
    return line.encode("utf-8", "replace").decode("utf-8")
