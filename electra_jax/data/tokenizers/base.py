"""One interface for all tokenizers, and for what trains them."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from electra_jax.errors import UserError
from electra_jax.settings import Check

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

    Text cannot forge special tokens: those for padding, start, end and mask are never the outcome
    of encoding, whatever is typed in a line. A lone surrogate, which no UTF-8 text can hold, counts
    as a question mark.

    Attributes:
      family: its key in `tokenizers.FAMILIES`.
      vocab_file: name of the file that holds the vocabulary of a saved tokenizer.
      setting_names: keyword arguments of the constructor.
      vocab: the tokens; a token's place is its id.
      starts_word: bool [vocab_size]: whether a token begins a word. Special tokens do.
      settings: the keyword arguments of the constructor, fit for JSON.
      special_ids: of padding, unknown, start, end and mask token, in this order; they are also
        `pad_id`, `unk_id`, `cls_id`, `sep_id` and `mask_id`.
      hash: the sha256 of family, vocabulary and settings: equal hashes give equal ids for every
        text.
    """

    family: ClassVar[str]
    vocab_file: ClassVar[str]
    setting_names: ClassVar[tuple[str, ...]]

    def __init__(
        self, vocab: Sequence[str], begins: Callable[[str], bool], content: bytes, settings: dict
    ):
        """Called by the families.

        Args:
          vocab: the tokens. Holds all special tokens, no duplicates.
          begins: whether a token that is not special begins a word.
          content: of the vocabulary's file.
          settings: the keyword arguments of the family's constructor.
        """
        self.vocab = list(vocab)
        self.settings = settings
        ids = {token: i for i, token in enumerate(self.vocab)}
        self.special_ids = tuple(ids[name] for name in settings["special_tokens"])
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self.starts_word = np.array([begins(token) for token in self.vocab])
        self.starts_word[list(self.special_ids)] = True
        self.content = content
        identity = json.dumps({"family": self.family, **settings}, sort_keys=True)
        self.hash = hashlib.sha256(f"{identity}\n".encode() + content).hexdigest()

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocab)

    @classmethod
    @abstractmethod
    def from_file(
        cls, path: str | Path, *, special_tokens: Sequence[str] = SPECIAL_TOKENS, **settings: Any
    ) -> "Tokenizer":
        """The tokenizer with the vocabulary of a file; settings as for the constructor.

        Raises:
          UserError: the file is unreadable or not such a file, or the special tokens do not fit it.
        """

    @abstractmethod
    def encode_batch(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, without start and end token."""

    @abstractmethod
    def encode_with_offsets(self, line: str) -> tuple[list[int], list[str], list[tuple[int, int]]]:
        """Ids as from `encode_batch`, their tokens, and where in the line these come from.

        Offsets are ranges of characters, (start, end), without the white space around a word. What
        normalization makes of one character has the range of that character.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Readable text for ids, special tokens included."""

    def save(self, directory: str | Path) -> None:
        """Writes the vocabulary and `tokenizer_config.json` into a directory, for `load`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self.vocab_file).write_bytes(self.content)
        settings = json.dumps({"family": self.family, **self.settings}, indent=2) + "\n"
        (directory / SETTINGS_FILE).write_text(settings, encoding="utf-8")


class Trainer(ABC):
    """Learns a vocabulary from any amount of text in bounded memory.

    A corpus is summarized in chunks, by many processes at once if it is large, and the summaries
    are added up in one:

        trainer = tokenizers.trainer("unigram", 32000, lower_case=False, ...)
        for summary in pool.imap(trainer.summarize, chunks):
            trainer.add(summary)
        made = trainer.finish()

    The vocabulary depends on the text, not on how it was cut into chunks, nor on the number of
    cores. (Only of a WordPiece corpus with more distinct words than `max_words`, the way
    it is cut decides which rare words are forgotten.)

    Attributes:
      tokenizer: the family of what is learned.
      summarize: a function from a list of lines to their summary. Pure; pickles without the state
        of the trainer.
    """

    tokenizer: ClassVar[type[Tokenizer]]
    summarize: Callable[[list[str]], Any]

    @abstractmethod
    def __init__(self, kind: str, vocab_size: int, settings: dict[str, Any]):
        """For a vocabulary of at most `vocab_size` tokens; settings are those of `tokenizer`."""

    @abstractmethod
    def add(self, summary: Any) -> None:
        """Takes in what `summarize` has made of a chunk."""

    @abstractmethod
    def finish(self) -> Tokenizer:
        """The tokenizer learned from all chunks added.

        Raises:
          UserError: the vocabulary size is too small for the characters of the text, or there is
            no text.
        """


def encode_with_special_tokens(
    tokenizer: Tokenizer, line: str
) -> tuple[list[int], list[str], list[tuple[int, int]]]:
    """As `Tokenizer.encode_with_offsets`, but special tokens typed in the line are what they say.

    For text that is trusted, such as a sentence with a `[MASK]` to be filled.
    """
    names = [tokenizer.vocab[i] for i in tokenizer.special_ids]
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
