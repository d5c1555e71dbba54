"""Text to token ids: one interface, two families, WordPiece and SentencePiece.

    python -m electra_jax.data.tokenizer --vocab=vocab.txt --lower_case --strip_accents < lines.txt

shows how text is tokenised. It reads UTF-8 lines on standard input and prints a JSON object for
each, without [CLS] and [SEP]; offsets are ranges of characters in the line:

    {"ids": [2009, 15811], "tokens": ["it", "rains"], "offsets": [[0, 2], [3, 8]]}

    --vocab=FILE           one word piece a line, or a SentencePiece model (*.model)
    --vocab=DIR            a saved tokenizer, such as data/STORE/tokenizer, which has its own
                           settings; the flags below are for files
    --lower_case           lower-case the text
    --strip_accents        remove accents; only together with --lower_case
    --max_word_chars=200   longer words become [UNK]; WordPiece only
    --special_tokens=...   names of padding, unknown, start, end and mask token, with commas
    --keep_special_tokens  those that are typed in the text stay whole, as in Hugging Face's
                           tokenizers; otherwise they are text like any other
"""

import hashlib
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from absl import flags

from electra_jax.errors import UserError

# The families are imported where they are used, as they build on this module; so is what needs
# JAX, because the processes that tokenise a corpus must start quickly.

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_SETTINGS_FILE = "tokenizer_config.json"
_CHUNK_LINES = 10_000
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "special_tokens": (
        lambda x: (
            isinstance(x, list)
            and all(isinstance(name, str) and name for name in x)
            and len(set(x)) == len(x) == 5
        ),
        "five different names: padding, unknown, start, end, mask",
    ),
    "lower_case": (lambda x: isinstance(x, bool), "true or false"),
    "strip_accents": (lambda x: isinstance(x, bool), "true or false"),
    "max_word_chars": (lambda x: type(x) is int and x >= 1, "a number, at least 1"),
}


class Tokenizer(ABC):
    """Cuts lines of text into tokens of a vocabulary.

    Text cannot forge special tokens: those for padding, start, end and mask are never the outcome
    of encoding, whatever is typed in a line. A lone surrogate, which no UTF-8 text can hold, counts
    as a question mark.

    Attributes:
      family: "wordpiece" or "sentencepiece".
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

    @abstractmethod
    def encode_batch(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, without start and end token."""

    @abstractmethod
    def encode_with_offsets(self, line: str) -> tuple[list[int], list[str], list[tuple[int, int]]]:
        """Ids as from `encode_batch`, their tokens, and where in the line these come from.

        Offsets are ranges of characters, (start, end), without the white space around a word. What
        normalisation makes of one character has the range of that character.
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
        (directory / _SETTINGS_FILE).write_text(settings, encoding="utf-8")


class Trainer(ABC):
    """Learns a vocabulary from any amount of text in bounded memory.

    A corpus is summarised in pieces, by many processes at once if it is large, and the summaries
    are added up in one:

        trainer = tokenizer.trainer("unigram", 32000, lower_case=False, ...)
        for summary in pool.imap(trainer.summarize, chunks):
            trainer.add(summary)
        made = trainer.finish()

    The vocabulary depends on the text, not on how it was cut into chunks, nor on the number of
    cores. (Only a WordPiece corpus of more distinct words than `wordpiece.MAX_WORDS` is cut
    differently by differently cut chunks.)

    Attributes:
      summarize: a function from a list of lines to their summary. Pure; pickles without the state
        of the trainer.
    """

    summarize: Callable[[list[str]], Any]

    @abstractmethod
    def add(self, summary: Any) -> None:
        """Takes in what `summarize` has made of a chunk."""

    @abstractmethod
    def finish(self) -> Tokenizer:
        """The tokenizer learnt from all chunks added.

        Raises:
          UserError: the vocabulary size is too small for the characters of the text, or there is
            no text.
        """


def trainer(
    kind: str,
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    lower_case: bool,
    strip_accents: bool,
    max_word_chars: int,
) -> Trainer:
    """A trainer for a vocabulary of at most `vocab_size` tokens.

    Args:
      kind: "wordpiece", or "unigram" or "bpe" for these kinds of SentencePiece models.
      vocab_size: a small corpus may give fewer tokens.
      special_tokens: names of padding, unknown, start, end and mask token. They get ids 0 to 4.
      lower_case: whether text is lower-cased.
      strip_accents: whether accents are removed. As in ELECTRA, only when lower-casing, too.
      max_word_chars: longer words become the unknown token. WordPiece only.
    """
    from electra_jax.data.sentencepiece import SentencePieceTrainer
    from electra_jax.data.wordpiece import WordPieceTrainer

    settings = {
        "special_tokens": special_tokens,
        "lower_case": lower_case,
        "strip_accents": strip_accents,
    }
    if kind == "wordpiece":
        return WordPieceTrainer(vocab_size, max_word_chars=max_word_chars, **settings)
    return SentencePieceTrainer(kind, vocab_size, **settings)


def train(kind: str, lines: Iterable[str], vocab_size: int, **settings: Any) -> Tokenizer:
    """Learns a vocabulary from lines in this process. Arguments and errors as of `trainer`."""
    learner = trainer(kind, vocab_size, **settings)
    lines = iter(lines)
    while chunk := list(islice(lines, _CHUNK_LINES)):
        learner.add(learner.summarize(chunk))
    return learner.finish()


def from_file(
    path: str | Path,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    lower_case: bool,
    strip_accents: bool,
    max_word_chars: int,
) -> Tokenizer:
    """The tokenizer of a vocabulary file; the settings are as for `trainer`.

    A file whose name ends in `.model` is a SentencePiece model, any other a WordPiece vocabulary,
    one token a line.

    Raises:
      UserError: the file is unreadable or not such a file, or the special tokens do not fit it.
    """
    from electra_jax.data.sentencepiece import SentencePiece
    from electra_jax.data.wordpiece import WordPiece

    settings = {
        "special_tokens": special_tokens,
        "lower_case": lower_case,
        "strip_accents": strip_accents,
    }
    if Path(path).suffix == ".model":
        return SentencePiece.from_file(path, **settings)
    return WordPiece.from_file(path, max_word_chars=max_word_chars, **settings)


def load(directory: str | Path) -> Tokenizer:
    """Reads what `Tokenizer.save` has written.

    Raises:
      UserError: a file is missing or damaged.
    """
    from electra_jax.data.sentencepiece import SentencePiece
    from electra_jax.data.wordpiece import WordPiece

    path = Path(directory, _SETTINGS_FILE)
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as tokenizer settings: {error}") from error
    families = {family.family: family for family in (WordPiece, SentencePiece)}
    found = settings.pop("family", None) if isinstance(settings, dict) else None
    if not isinstance(found, str) or found not in families:
        raise UserError(f"{path}: family is {found!r}; allowed: {', '.join(families)}")
    family = families[found]
    if settings.keys() != set(family.setting_names):
        raise UserError(
            f"{path}: found the settings {', '.join(settings)}; expected "
            f"{', '.join(family.setting_names)}"
        )
    for name, value in settings.items():
        _check_setting(f"{path}: {name}", name, value)
    return family.from_file(Path(directory, family.vocab_file), **settings)


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
    """`line` with question marks for lone surrogates, which cannot be tokenised. As long as it."""
    return line.encode("utf-8", "replace").decode("utf-8")


def _check_setting(where: str, name: str, value: Any) -> None:
    is_allowed, allowed = _SETTINGS[name]
    if not is_allowed(value):
        raise UserError(f"{where} is {value!r}; allowed: {allowed}")


def main() -> None:
    """Print the tokens of each line of standard input."""
    from electra_jax import cli

    values = cli.parse(_flags(), __doc__)
    tokenizer = _from_flags(values)
    encode = tokenizer.encode_with_offsets
    if values.keep_special_tokens:
        encode = partial(encode_with_special_tokens, tokenizer)
    try:
        for number, line in enumerate(sys.stdin.buffer, start=1):  # only "\n" ends a line here
            try:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"standard input: line {number} is not UTF-8 at byte {error.start}"
                ) from error
            ids, tokens, offsets = encode(text)
            shown = {"ids": ids, "tokens": tokens, "offsets": offsets}
            print(json.dumps(shown), flush=True)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("vocab", None, "vocabulary file or saved tokenizer", flag_values=values)
    flags.DEFINE_bool("lower_case", False, "lower-case the text", flag_values=values)
    flags.DEFINE_bool("strip_accents", False, "remove accents", flag_values=values)
    flags.DEFINE_integer("max_word_chars", 200, "longest word", flag_values=values)
    flags.DEFINE_list("special_tokens", [*SPECIAL_TOKENS], "their names", flag_values=values)
    flags.DEFINE_bool(
        "keep_special_tokens", False, "where they are typed in the text", flag_values=values
    )
    return values


def _from_flags(values: flags.FlagValues) -> Tokenizer:
    """The tokenizer that the command line asks for."""
    if not values.vocab:
        raise UserError("--vocab is missing; give a vocabulary file or a saved tokenizer")
    settings = {name: values[name].value for name in _SETTINGS}
    given = [name for name in _SETTINGS if values[name].present]
    for name in given:
        _check_setting(f"--{name}", name, settings[name])
    if Path(values.vocab).is_dir():
        if given:
            raise UserError(
                f"--{given[0]} is given, but {values.vocab} has settings of its own; allowed: no "
                "flags but --vocab"
            )
        return load(values.vocab)
    if settings["strip_accents"] and not settings["lower_case"]:
        raise UserError("--strip_accents is given, which works only together with --lower_case")
    if "max_word_chars" in given and values.vocab.endswith(".model"):
        raise UserError(f"--max_word_chars is given, but has no meaning for {values.vocab}")
    return from_file(values.vocab, **settings)


if __name__ == "__main__":
    # By its own name, because the families build on the module of that name, not on `__main__`.
    from electra_jax import cli
    from electra_jax.data import tokenizer

    cli.run(tokenizer.main)
