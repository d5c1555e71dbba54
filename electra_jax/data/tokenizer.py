"""WordPiece tokenisation as in BERT and ELECTRA, carried by the `tokenizers` library.

Text is cleaned, split at white space, punctuation and CJK characters, and every word is cut into
the longest pieces that the vocabulary holds. Pieces that continue a word start with `##`. A word
that cannot be cut so, or that is too long, becomes `[UNK]`.

A special token that is typed in a text, such as `[MASK]`, is split like any other text, so that
input cannot forge special ids.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, repeat
from pathlib import Path

from tokenizers import Tokenizer as WordPieceTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from electra_jax.errors import UserError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"

# A vocabulary is trained without the rarest characters: on web text, thousands of them would take
# the places of useful pieces. Words with such a character become [UNK].
CHARACTER_COVERAGE = 0.9999

_VOCAB_FILE = "vocab.txt"
_SETTINGS_FILE = "tokenizer_config.json"


class Tokenizer:
    """A vocabulary and the settings under which it was made.

    Args:
      vocab: the tokens; a token's place is its id. Holds all of `SPECIAL_TOKENS`, no duplicates.
      lower_case: whether text is lower-cased.
      strip_accents: whether accents are removed. As in ELECTRA, only when lower-casing, too.
      max_word_chars: longer words become `[UNK]`. ELECTRA has 200, Hugging Face 100.
    """

    def __init__(
        self, vocab: Sequence[str], *, lower_case: bool, strip_accents: bool, max_word_chars: int
    ):
        self.vocab = list(vocab)
        self.lower_case = lower_case
        self.strip_accents = strip_accents
        self.max_word_chars = max_word_chars
        ids = {token: i for i, token in enumerate(self.vocab)}
        self.special_ids = tuple(ids[token] for token in SPECIAL_TOKENS)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = self.special_ids
        self._tokenizer = WordPieceTokenizer(
            models.WordPiece(ids, unk_token=UNK, max_input_chars_per_word=max_word_chars)
        )
        self._tokenizer.normalizer = _normalizer(lower_case, strip_accents)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._tokenizer.decoder = decoders.WordPiece(CONTINUATION)

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocab)

    @property
    def settings(self) -> dict:
        """The keyword arguments of the constructor."""
        return {
            "lower_case": self.lower_case,
            "strip_accents": self.strip_accents,
            "max_word_chars": self.max_word_chars,
        }

    @property
    def hash(self) -> str:
        """The sha256 of vocabulary and settings: equal hashes give equal ids for every text."""
        content = json.dumps({"vocab": self.vocab, **self.settings}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def encode_batch(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, without `[CLS]` and `[SEP]`. Runs on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(lines)]

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text for ids, special tokens included. Not an exact inverse of encoding."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def save(self, directory: str | Path) -> None:
        """Writes `vocab.txt` and `tokenizer_config.json` (the settings) into a new directory."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        vocab = "".join(f"{token}\n" for token in self.vocab)
        (directory / _VOCAB_FILE).write_text(vocab, encoding="utf-8", newline="\n")
        settings = json.dumps(self.settings, indent=2) + "\n"
        (directory / _SETTINGS_FILE).write_text(settings, encoding="utf-8")

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Reads what `save` has written.

        Raises:
          UserError: a file is missing or damaged.
        """
        path = Path(directory, _SETTINGS_FILE)
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not readable as tokenizer settings: {error}") from error
        try:
            return cls.from_vocab_file(Path(directory, _VOCAB_FILE), **settings)
        except TypeError as error:
            raise UserError(
                f"{path}: found {settings!r}; expected lower_case, strip_accents, max_word_chars"
            ) from error

    @classmethod
    def from_vocab_file(
        cls, path: str | Path, *, lower_case: bool, strip_accents: bool, max_word_chars: int
    ) -> "Tokenizer":
        """A tokenizer with the tokens of a text file, one per line; the line number is the id.

        Raises:
          UserError: the file is unreadable, lacks a special token or holds a token twice.
        """
        return cls(
            _read_vocab(path),
            lower_case=lower_case,
            strip_accents=strip_accents,
            max_word_chars=max_word_chars,
        )

    @classmethod
    def train(
        cls,
        documents: Iterable[list[str]],
        vocab_size: int,
        *,
        lower_case: bool,
        strip_accents: bool,
        max_word_chars: int,
    ) -> "Tokenizer":
        """Learns a vocabulary of at most `vocab_size` tokens from one pass over the documents.

        The special tokens come first, then the characters that continue words, then those that
        start them, then merged pieces, most useful first. The same documents give the same
        vocabulary.

        Raises:
          UserError: `vocab_size` is too small for the characters of the documents.
        """
        normalizer = _normalizer(lower_case, strip_accents)
        words: Counter[str] = Counter()
        for line in chain.from_iterable(documents):
            words.update(normalizer.normalize_str(line).split())
        vocab = _train_vocab(words, vocab_size)
        return cls(
            vocab,
            lower_case=lower_case,
            strip_accents=strip_accents,
            max_word_chars=max_word_chars,
        )


def _normalizer(lower_case: bool, strip_accents: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=lower_case and strip_accents,
        lowercase=lower_case,
    )


def _train_vocab(words: Mapping[str, int], vocab_size: int) -> list[str]:
    """Trains WordPiece on normalised words with their counts.

    The library's trainer numbers the continuation characters in the order of a hash table, and
    breaks ties between merges by these numbers, so that each run would give another vocabulary.
    It keeps the numbers of tokens it is given as special, so it is given these characters, sorted.
    """
    alphabet = _alphabet(words)
    words = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    split = pre_tokenizers.BertPreTokenizer()
    continuations = {
        f"{CONTINUATION}{character}"
        for word in words
        for piece, _ in split.pre_tokenize_str(word)
        for character in piece[1:]
    }
    tokenizer = WordPieceTokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.pre_tokenizer = split
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *sorted(continuations)],
        show_progress=False,
    )
    corpus = chain.from_iterable(repeat(word, count) for word, count in words.items())
    tokenizer.train_from_iterator(corpus, trainer)
    ids = tokenizer.get_vocab()
    if len(ids) > vocab_size:
        raise UserError(
            f"data.vocab_size: {vocab_size} is too small; the characters of this text alone need "
            f"{len(ids)}"
        )
    return sorted(ids, key=ids.__getitem__)


def _alphabet(words: Mapping[str, int]) -> set[str]:
    """The most frequent characters that together make up `CHARACTER_COVERAGE` of the text."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    by_frequency = sorted(counts, key=lambda character: (-counts[character], character))
    total = sum(counts.values())
    covered = accumulate(counts[character] for character in by_frequency)
    return {
        character
        for character, upto in zip(by_frequency, covered, strict=True)
        if upto - counts[character] < CHARACTER_COVERAGE * total
    }


def _read_vocab(path: str | Path) -> list[str]:
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the vocabulary: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the vocabulary is not UTF-8 at byte {error.start}") from error
    # Only newlines end a token: `str.splitlines` would split at others that tokens may hold.
    vocab = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    for token in SPECIAL_TOKENS:
        if token not in vocab:
            raise UserError(
                f"{path}: the vocabulary lacks {token}; all of {SPECIAL_TOKENS} must be in"
            )
    for token, count in Counter(vocab).items():
        if count > 1:
            raise UserError(
                f"{path}: the vocabulary holds {token!r} {count} times; once is allowed"
            )
    return vocab
