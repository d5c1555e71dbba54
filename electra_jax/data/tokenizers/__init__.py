"""Tokenizers of a vocabulary file, of a saved run, or trained on text."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from electra_jax.data.tokenizers.base import SETTINGS_FILE, Tokenizer, Trainer, check_setting
from electra_jax.data.tokenizers.sentencepiece import SentencePiece, SentencePieceTrainer
from electra_jax.data.tokenizers.wordpiece import WordPiece, WordPieceTrainer
from electra_jax.errors import UserError
from electra_jax.files import read_json

FAMILIES: dict[str, type[Tokenizer]] = {"wordpiece": WordPiece, "sentencepiece": SentencePiece}
TRAINERS: dict[str, type[Trainer]] = {  # by kind of vocabulary
    "wordpiece": WordPieceTrainer,
    "unigram": SentencePieceTrainer,
    "bpe": SentencePieceTrainer,
}
_CHUNK_LINES = 10_000


def train(kind: str, lines: Iterable[str], vocab_size: int, **settings: Any) -> Tokenizer:
    """Learns a vocabulary of at most `vocab_size` tokens from lines, in this process.

    Args:
      kind: a key of `TRAINERS`.
      settings: `special_tokens`, names of padding, unknown, start, end and mask token, which get
        ids 0 to 4; `lower_case`; `strip_accents`, which as in ELECTRA works only when lower-casing;
        `max_word_chars`: longer words become the unknown token (WordPiece only).

    Raises:
      UserError: see `Trainer.finish`.
    """
    trainer = TRAINERS[kind](kind, vocab_size, settings)
    lines = iter(lines)
    while chunk := list(islice(lines, _CHUNK_LINES)):
        trainer.add(trainer.summarize(chunk))
    return trainer.finish()


def from_file(path: str | Path, **settings: Any) -> Tokenizer:
    """The tokenizer of a vocabulary file; the settings are as for `train`.

    A file whose name ends in `.model` is a SentencePiece model, any other a WordPiece vocabulary,
    one token a line.

    Raises:
      UserError: the file is unreadable or not such a file, or the special tokens do not fit it.
    """
    family = SentencePiece if Path(path).suffix == ".model" else WordPiece
    return family.from_file(path, **settings)


def load(directory: str | Path) -> Tokenizer:
    """Reads what `Tokenizer.save` has written.

    Raises:
      UserError: a file is missing or damaged.
    """
    path = Path(directory, SETTINGS_FILE)
    settings = read_json(path)
    name = settings.pop("family", None)
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{path}: family is {name!r}; allowed: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if settings.keys() != set(family.setting_names):
        expected = ", ".join(family.setting_names)
        raise UserError(f"{path}: found the settings {', '.join(settings)}; expected {expected}")
    for name, value in settings.items():
        check_setting(f"{path}: {name}", name, value)
    return family.from_file(Path(directory, family.vocab_file), **settings)
