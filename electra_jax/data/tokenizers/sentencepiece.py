"""SentencePiece tokenization with a given or trained model, carried by the `sentencepiece` library.

SentencePiece cuts a line without splitting it into words first, and keeps its spaces as part of the
pieces (as U+2581), so that it works the same for every script and text can be put together again.
Lower-casing and removal of accents happen in front of the model, character by character; the
model's own normalization follows. Models trained here hold every byte as a piece, so that no
character is unknown.

A special token that is typed in a text, such as `[MASK]`, is cut like any other text. Where a given
model would find it whole, it is spelled out: each of its characters becomes the piece for that
character, or the unknown token if there is none.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sentencepiece
from tokenizers import normalizers

from electra_jax.data.tokenizers import base
from electra_jax.data.tokenizers.base import Encoded, Tokenizer, Trainer, well_formed
from electra_jax.errors import UserError

SPACE = "\u2581"

# The library skips lines of more than 4192 bytes, which 1000 characters cannot have. Lines are cut
# at white space, where there is some.
_SENTENCE = re.compile(r"(?s)\S.{0,998}(?!\S)|\S.{0,999}")

# It also skips lines with the character that it uses for unknown ones.
_RESERVED = "\u2585"

_TOO_SMALL = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


class SentencePiece(Tokenizer):
    """A SentencePiece model, special tokens, and the settings under which the model was made.

    Special tokens that the model does not hold get the ids after its last piece. What the model
    itself uses for unknown characters is always the unknown token; `settings` have its name.

    Raises:
      UserError: the content is no model's, or the model has fewer tokens for the five names.
    """

    family = "sentencepiece"
    vocab_file = "spm.model"
    setting_names = ("special_tokens", "lower_case", "strip_accents")

    def __init__(self, model: bytes, **settings: Any):
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
            pieces = self._model.id_to_piece([*range(self._model.piece_size())])
        except (RuntimeError, UnicodeDecodeError) as error:
            raise UserError("not a SentencePiece model") from error
        pad, _, cls, sep, mask = settings.get("special_tokens", base.SPECIAL_TOKENS)
        special_tokens = [pad, pieces[self._model.unk_id()], cls, sep, mask]
        if len(set(special_tokens)) != len(special_tokens):
            raise UserError(
                f"the special tokens, {', '.join(special_tokens)}, are not different; the model's "
                "own name of the unknown token is the second"
            )
        settings["special_tokens"] = special_tokens
        vocab = [*pieces, *(name for name in special_tokens if name not in pieces)]
        super().__init__(vocab, lambda token: token.startswith(SPACE), model, settings)
        # A model may find these in text: user-defined symbols, and in some versions of the library
        # control symbols of one character.
        self._spelled = {
            i: [self._spell(character) for character in self.vocab[i]]
            for i in self.special_ids
            if i < len(pieces) and i != self.unk_id
        }

    def _spell(self, character: str) -> int:
        i = self._model.piece_to_id(character)
        return self.unk_id if i in self.special_ids else i

    def encode_batch(self, lines: list[str]) -> list[list[int]]:
        """The ids of each line, without start and end token. Runs on one core."""
        encoded = self._model.encode([self._prepare(line) for line in lines], num_threads=1)
        return [self._spell_out(ids) for ids in encoded]

    def encode_with_offsets(self, line: str) -> Encoded:
        """See `Tokenizer.encode_with_offsets`."""
        encoded = self._model.encode(self._prepare(line), return_type="offset_mapping")
        # Where in the line each character comes from that the model is given; the end.
        origin: Sequence[int] = range(len(line) + 1)
        if self.settings["lower_case"]:
            table = _LOWER_CASED[self.settings["strip_accents"]]
            origin = [i for i, c in enumerate(well_formed(line)) for _ in table[ord(c)]]
            origin.append(len(line))
        ids, offsets = encoded["ids"], []
        for i, (start, end) in zip(ids, encoded["offsets"], strict=True):
            start, end = origin[start], origin[end]
            if self.vocab[i].startswith(SPACE):
                while start < end and not self._model.normalize(line[start]):
                    start += 1
            offsets.append((start, end))
        # Of the pieces that are made of one character, the library gives its range to the last.
        for k in reversed(range(len(ids) - 1)):
            (start, end), (next_start, next_end) = offsets[k : k + 2]
            if start == end == next_start and self.vocab[ids[k]].strip(SPACE):
                offsets[k] = start, next_end
        offsets = [
            span for i, span in zip(ids, offsets, strict=True) for _ in self._spelled.get(i, [i])
        ]
        ids = self._spell_out(ids)
        return ids, [self.vocab[i] for i in ids], offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text for ids; without special tokens exactly the normalized text that gave them.

        Special tokens show by their names, between spaces.
        """
        parts: list[str] = []
        for special, run in groupby(ids, self.special_ids.__contains__):
            run = [*run]
            parts += [self.vocab[i] for i in run] if special else [self._model.decode(run)]
        return " ".join(parts)

    def _prepare(self, text: str) -> str:
        return _prepare(text, self.settings["lower_case"], self.settings["strip_accents"])

    def _spell_out(self, ids: list[int]) -> list[int]:
        """Replaces special tokens, which only text that looks like them can have given."""
        if self._spelled.keys().isdisjoint(ids):
            return ids
        return [j for i in ids for j in self._spelled.get(i, [i])]


def hash_sentences(lines: list[str], *, lower_case: bool, strip_accents: bool) -> dict[str, int]:
    """The sentences of some lines, as training needs them, each with a 64-bit hash of its text.

    A sentence is a line, or a part of one that is longer than 1000 characters.
    """
    sentences: dict[str, int] = {}
    for line in lines:
        text = _prepare(line, lower_case, strip_accents).replace(_RESERVED, " ")
        for sentence in _SENTENCE.findall(text):
            digest = hashlib.blake2b(sentence.encode(), digest_size=8).digest()
            sentences[sentence] = int.from_bytes(digest, "big")
    return sentences


@dataclass
class SentencePieceTrainer(Trainer):
    """Learns a SentencePiece model from a sample of the sentences.

    Of each sentence one copy counts. Kept are those whose hash falls below a limit, which is halved
    whenever they become too many: a sample that depends on the text alone.

    The special tokens come first, then the 256 bytes, then the pieces, most useful first.

    Attributes:
      max_characters: size of the sample.
    """

    summary = staticmethod(hash_sentences)

    max_characters: int = 30_000_000
    _sample: dict[str, int] = field(default_factory=dict, init=False)
    _characters: int = field(default=0, init=False)
    _limit: int = field(default=2**64, init=False)

    def add(self, summary: dict[str, int]) -> None:
        """Adds the sentences of a chunk that belong to the sample."""
        for sentence, digest in summary.items():
            if digest < self._limit and sentence not in self._sample:
                self._sample[sentence] = digest
                self._characters += len(sentence)
        while self._characters > self.max_characters:
            self._limit //= 2
            kept = {key: digest for key, digest in self._sample.items() if digest < self._limit}
            self._sample, self._characters = kept, sum(map(len, kept))

    def sentences(self) -> list[str]:
        """The sample, in the order in which the library is shown it."""
        return sorted(self._sample, key=lambda sentence: (self._sample[sentence], sentence))

    def finish(self) -> SentencePiece:
        """See `Trainer.finish`."""
        if not self._sample:
            raise UserError("data.source: there is no text to train a vocabulary on")
        pad, unk, cls, sep, mask = self.settings["special_tokens"]
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(self.sentences()),
                model_writer=model,
                model_type=self.kind,
                vocab_size=self.vocab_size,
                hard_vocab_limit=False,  # a small text gives fewer pieces
                pad_id=0,
                unk_id=1,
                bos_id=2,
                eos_id=3,
                pad_piece=pad,
                unk_piece=unk,
                bos_piece=cls,
                eos_piece=sep,
                control_symbols=[mask],
                normalization_rule_name="nmt_nfkc",
                character_coverage=0.9995,  # of the text; other characters are spelled in bytes
                byte_fallback=True,
                num_threads=16,  # decides how sums are rounded: must not follow the cores
                minloglevel=2,
            )
        except RuntimeError as error:
            message = f"data.tokenizer: SentencePiece can train no {self.kind} model: {error}"
            if too_small := _TOO_SMALL.search(str(error)):
                message = (
                    f"data.vocab_size: {self.vocab_size} is too small; special tokens, bytes and "
                    f"the characters of this text alone need {too_small[1]}"
                )
            raise UserError(message) from error
        return SentencePiece(model.getvalue(), **self.settings)


def _prepare(text: str, lower_case: bool, strip_accents: bool) -> str:
    """Text as the model is given it. Concatenating texts concatenates the results."""
    text = well_formed(text)
    return text.translate(_LOWER_CASED[strip_accents]) if lower_case else text


class _LowerCased(dict[int, str]):
    """A table for `str.translate`: what lower-casing makes of each character that turned up.

    Ten times faster than the library on whole lines, and it shows where each character comes from.
    """

    def __init__(self, strip_accents: bool):
        self._normalizer = normalizers.BertNormalizer(
            clean_text=False,
            handle_chinese_chars=False,
            strip_accents=strip_accents,
            lowercase=True,
        )

    def __missing__(self, character: int) -> str:
        self[character] = self._normalizer.normalize_str(chr(character))
        return self[character]


_LOWER_CASED = {strip_accents: _LowerCased(strip_accents) for strip_accents in (False, True)}
