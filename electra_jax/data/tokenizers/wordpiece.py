"""WordPiece tokenization as in BERT and ELECTRA, carried by the `tokenizers` library.

Text is cleaned, split at white space, punctuation and CJK characters, and every word is cut into
the longest pieces that the vocabulary holds. Pieces that continue a word start with `##`. A word
that cannot be cut so, or that is too long, becomes the unknown token.

A special token that is typed in a text, such as `[MASK]`, is split like any other text.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import Any

from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from electra_jax.data.tokenizers.base import Encoded, Tokenizer, Trainer, well_formed
from electra_jax.errors import UserError

CONTINUATION = "##"


class WordPiece(Tokenizer):
    """A vocabulary of word pieces and the settings under which it was made."""

    family = "wordpiece"
    vocab_file = "vocab.txt"
    setting_names = ("special_tokens", "lower_case", "strip_accents", "max_word_chars")

    def __init__(self, vocab: Sequence[str], **settings: Any):
        content = "".join(f"{token}\n" for token in vocab).encode()
        super().__init__(vocab, lambda token: not token.startswith(CONTINUATION), content, settings)
        # What the library does not know, it cannot find in a text, whatever the name.
        hidden = {*self.special_ids} - {self.unk_id}
        ids = {token: i for i, token in enumerate(self.vocab) if i not in hidden}
        self._pipeline = Pipeline(
            models.WordPiece(
                ids,
                unk_token=self.vocab[self.unk_id],
                max_input_chars_per_word=settings["max_word_chars"],
            )
        )
        self._pipeline.normalizer = _normalizer(settings["lower_case"], settings["strip_accents"])
        self._pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @staticmethod
    def parsed(content: bytes) -> list[str]:
        """The tokens, one per line; the line number is the id."""
        try:
            text = content.decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"the vocabulary is not UTF-8 at byte {error.start}") from error
        # Only newlines end a token: `str.splitlines` would split at others that tokens may hold.
        return [line.removesuffix("\r") for line in text.split("\n")]

    def encode_batch(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, without start and end token.

        Runs on all cores, or on one if the environment variable `TOKENIZERS_PARALLELISM` is false.
        """
        encodings = self._pipeline.encode_batch_fast([well_formed(line) for line in lines])
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, line: str) -> Encoded:
        """See `Tokenizer.encode_with_offsets`."""
        encoding = self._pipeline.encode(well_formed(line))
        return encoding.ids, encoding.tokens, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return decoders.WordPiece(CONTINUATION).decode([self.vocab[i] for i in ids])


def count_words(lines: list[str], *, lower_case: bool, strip_accents: bool) -> Counter[str]:
    """How often each word, normalized and split at white space only, is in some lines."""
    normalizer = _normalizer(lower_case, strip_accents)
    words: Counter[str] = Counter()
    for line in lines:
        words.update(normalizer.normalize_str(well_formed(line)).split())
    return words


def _normalizer(lower_case: bool, strip_accents: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=lower_case and strip_accents,
        lowercase=lower_case,
    )


@dataclass
class WordPieceTrainer(Trainer):
    """Learns a WordPiece vocabulary from the counts of words.

    The special tokens come first, then the characters that continue words, then those that start
    them, then merged pieces, most useful first.

    Attributes:
      coverage: share of the text whose characters are in the vocabulary. On web text, thousands of
        rare ones would take the places of useful pieces.
      max_words: distinct words that are held at most.
      train_words: words that the library is shown, about. The counts of a larger corpus are scaled
        down: a vocabulary depends on their ratios.
    """

    summary = staticmethod(count_words)

    coverage: float = 0.9999
    max_words: int = 2_000_000
    train_words: int = 20_000_000
    _words: Counter[str] = field(default_factory=Counter, init=False)

    def add(self, summary: Counter[str]) -> None:
        """Adds the words of a chunk. The rarest are forgotten when there are too many."""
        self._words.update(summary)
        if len(self._words) > self.max_words:
            self._words = Counter(dict(_by_frequency(self._words)[: self.max_words // 2]))

    def finish(self) -> WordPiece:
        """See `Trainer.finish`. Without any text, only the special tokens are in."""
        alphabet = _alphabet(self._words, self.coverage)
        words = {word: count for word, count in self._words.items() if alphabet.issuperset(word)}
        # Divided so that their sum is about `train_words`; none becomes 0.
        total = max(self.train_words, sum(words.values()))
        words = {word: -(-count * self.train_words // total) for word, count in words.items()}
        vocab = _train_vocab(words, self.vocab_size, self.settings["special_tokens"])
        return WordPiece(vocab, **self.settings)


def _train_vocab(
    words: Mapping[str, int], vocab_size: int, special_tokens: Sequence[str]
) -> list[str]:
    """Trains WordPiece on normalized words with their counts.

    The library's trainer numbers the continuation characters in the order of a hash table, and
    breaks ties between merges by these numbers, so that each run would give another vocabulary.
    It keeps the numbers of tokens it is given as special, so it is given these characters, sorted.
    """
    split = pre_tokenizers.BertPreTokenizer()
    continuations = {
        f"{CONTINUATION}{character}"
        for word in words
        for piece, _ in split.pre_tokenize_str(word)
        for character in piece[1:]
    }
    pipeline = Pipeline(models.WordPiece(unk_token=special_tokens[1]))
    pipeline.pre_tokenizer = split
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*special_tokens, *sorted(continuations)],
        show_progress=False,
    )
    corpus = chain.from_iterable(repeat(word, count) for word, count in words.items())
    pipeline.train_from_iterator(corpus, trainer)
    ids = pipeline.get_vocab()
    if len(ids) > vocab_size:
        raise UserError(
            f"data.vocab_size: {vocab_size} is too small; the characters of this text alone need "
            f"{len(ids)}"
        )
    return sorted(ids, key=ids.__getitem__)


def _alphabet(words: Mapping[str, int], coverage: float) -> set[str]:
    """The most frequent characters that together make up this share of the text."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    by_frequency = _by_frequency(counts)
    before = accumulate((count for _, count in by_frequency), initial=0)
    limit = coverage * counts.total()
    return {x for (x, _), covered in zip(by_frequency, before, strict=False) if covered < limit}


def _by_frequency(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Most frequent first; in alphabetic order where counts are equal."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
