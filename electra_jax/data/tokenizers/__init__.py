"""Tokenizers from a vocabulary, from a saved run, or trained on text."""

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from electra_jax.data.tokenizers.base import (
    _CHUNK_LINES,
    _SETTINGS_FILE,
    SPECIAL_TOKENS,
    Tokenizer,
    Trainer,
    _check_setting,
)
from electra_jax.errors import UserError


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
    from electra_jax.data.tokenizers.sentencepiece import SentencePieceTrainer
    from electra_jax.data.tokenizers.wordpiece import WordPieceTrainer

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
    from electra_jax.data.tokenizers.sentencepiece import SentencePiece
    from electra_jax.data.tokenizers.wordpiece import WordPiece

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
    from electra_jax.data.tokenizers.sentencepiece import SentencePiece
    from electra_jax.data.tokenizers.wordpiece import WordPiece

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
