"""Tokenizers as Hugging Face's libraries keep them, from and to ours.

What is written gives the same ids as ours for every text without special tokens. Those typed in a
text, such as `[MASK]`, are found whole there, which filling masks needs, and are spelt out here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from electra_jax.data.tokenizers.base import SPECIAL_TOKENS, Tokenizer
from electra_jax.data.tokenizers.sentencepiece import SPACE, SentencePiece
from electra_jax.data.tokenizers.wordpiece import CONTINUATION, WordPiece
from electra_jax.errors import UserError
from electra_jax.files import read_json

SPECIAL_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
MAX_WORD_CHARS = 100  # Hugging Face's default, where the original has 200
VOCABULARIES = (WordPiece.vocab_file, SentencePiece.vocab_file, "tokenizer.json")


def read_tokenizer(directory: Path, max_word_chars: int = MAX_WORD_CHARS) -> Tokenizer | None:
    """The tokenizer beside someone's weights; None where there is no vocabulary.

    Settings are those of `tokenizer_config.json`, then those of `tokenizer.json`, then BERT's.

    Args:
      max_word_chars: what holds where no file says so.

    Raises:
      UserError: a file is damaged, or asks for what ours cannot do.
    """
    if not any((directory / name).is_file() for name in VOCABULARIES):
        return None
    paths = (directory / name for name in ("tokenizer_config.json", "tokenizer.json"))
    config, pipeline = (read_json(path) if path.is_file() else {} for path in paths)
    settings = _settings(directory, config, pipeline)
    if (directory / SentencePiece.vocab_file).is_file():
        return SentencePiece.from_file(directory / SentencePiece.vocab_file, **settings)
    model = pipeline.get("model")
    model = model if isinstance(model, dict) else {}
    max_word_chars = model.get("max_input_chars_per_word", max_word_chars)
    if type(max_word_chars) is not int or max_word_chars < 1:
        raise UserError(
            f"{directory / 'tokenizer.json'}: max_input_chars_per_word is {max_word_chars!r}; "
            "allowed: a number, at least 1"
        )
    settings["max_word_chars"] = max_word_chars
    if (directory / WordPiece.vocab_file).is_file():
        return WordPiece.from_file(directory / WordPiece.vocab_file, **settings)
    return WordPiece(_vocab(directory / "tokenizer.json", model, settings), **settings)


def _settings(directory: Path, config: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Any]:
    normalizer = pipeline.get("normalizer")
    normalizer = normalizer if isinstance(normalizer, dict) else {}

    def setting(name: str, theirs: str, default: bool | None) -> bool | None:
        value = config.get(name, normalizer.get(theirs))
        value = default if value is None else value
        if not isinstance(value, bool | None):
            raise UserError(f"{directory}: {name} is {value!r}; allowed: true or false")
        return value

    lower_case = setting("do_lower_case", "lowercase", True)
    strip_accents = setting("strip_accents", "strip_accents", lower_case)
    if strip_accents and not lower_case:
        raise UserError(
            f"{directory}: strip_accents is true and do_lower_case is false, which our tokenizers "
            "do not do"
        )
    if not setting("tokenize_chinese_chars", "handle_chinese_chars", True):
        raise UserError(
            f"{directory}: tokenize_chinese_chars is false; our tokenizers always split them"
        )
    names = []
    for name, default in zip(SPECIAL_NAMES, SPECIAL_TOKENS, strict=True):
        token = config.get(name, default)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str) or not token or token in names:
            raise UserError(f"{directory}: {name} is {token!r}; allowed: a name of its own")
        names.append(token)
    return {"special_tokens": names, "lower_case": lower_case, "strip_accents": strip_accents}


def _vocab(path: Path, model: dict[str, Any], settings: dict[str, Any]) -> Sequence[str]:
    vocab = model.get("vocab")
    if model.get("type") != "WordPiece" or not isinstance(vocab, dict):
        raise UserError(
            f"{path}: the model is {model.get('type')!r}; allowed: 'WordPiece', or a directory "
            f"with {WordPiece.vocab_file} or {SentencePiece.vocab_file}"
        )
    if {*map(repr, vocab.values())} != {*map(repr, range(len(vocab)))}:
        raise UserError(f"{path}: the ids are not 0 to {len(vocab) - 1}, each once")
    tokens = sorted(vocab, key=vocab.get)
    missing = {*settings["special_tokens"]} - {*tokens}
    if missing:
        raise UserError(f"{path}: the vocabulary lacks {', '.join(sorted(missing))}")
    return tokens


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the vocabulary.

    Args:
      max_length: tokens that the model has positions for.

    Raises:
      UserError: as `to_pipeline`.
    """
    settings = tokenizer.settings
    names = [tokenizer.vocab[i] for i in tokenizer.special_ids]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # which takes tokenizer.json as it is
        **dict(zip(SPECIAL_NAMES, names, strict=True)),
        "do_lower_case": settings["lower_case"],
        "strip_accents": settings["lower_case"] and settings["strip_accents"],
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    to_pipeline(tokenizer).save(str(directory / "tokenizer.json"))
    (directory / tokenizer.vocab_file).write_bytes(tokenizer.content)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def to_pipeline(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The content of `tokenizer.json`: `[CLS] A [SEP]`, or `[CLS] A [SEP] B [SEP]` for pairs.

    Raises:
      UserError: a SentencePiece model is of a kind that the `tokenizers` library does not have.
    """
    if isinstance(tokenizer, WordPiece):
        pipeline = _wordpiece(tokenizer)
    else:
        pipeline = _sentencepiece(tokenizer)
    names = [tokenizer.vocab[i] for i in tokenizer.special_ids]
    pipeline.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    _, _, cls, sep, _ = names
    pipeline.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
    return pipeline


def _wordpiece(tokenizer: WordPiece) -> tokenizers.Tokenizer:
    settings = tokenizer.settings
    pipeline = tokenizers.Tokenizer(
        models.WordPiece(
            {token: i for i, token in enumerate(tokenizer.vocab)},
            unk_token=tokenizer.vocab[tokenizer.unk_id],
            max_input_chars_per_word=settings["max_word_chars"],
        )
    )
    pipeline.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=settings["lower_case"] and settings["strip_accents"],
        lowercase=settings["lower_case"],
    )
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(CONTINUATION)
    return pipeline


def _sentencepiece(tokenizer: SentencePiece) -> tokenizers.Tokenizer:
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.content)
    _check_carried(model, tokenizer)
    spec, trained = model.normalizer_spec, model.trainer_spec
    if trained.model_type == trained.UNIGRAM:
        scores = {piece.piece: piece.score for piece in model.pieces}
        vocab = [(token, scores.get(token, 0.0)) for token in tokenizer.vocab]
        pipeline = tokenizers.Tokenizer(
            models.Unigram(vocab, tokenizer.unk_id, trained.byte_fallback)
        )
    else:
        pipeline = tokenizers.Tokenizer(
            models.BPE(
                {token: i for i, token in enumerate(tokenizer.vocab)},
                _merges(model),
                unk_token=tokenizer.vocab[tokenizer.unk_id],
                fuse_unk=True,
                byte_fallback=trained.byte_fallback,
            )
        )
    steps: list[normalizers.Normalizer] = []
    if tokenizer.settings["lower_case"]:
        steps.append(
            normalizers.BertNormalizer(
                clean_text=False,
                handle_chinese_chars=False,
                strip_accents=tokenizer.settings["strip_accents"],
                lowercase=True,
            )
        )
    if tokenizer.settings["lower_case"] and tokenizer.settings["strip_accents"]:
        # That took Hangul syllables apart. The model's table joins them again, the library's way to
        # read it only what is shorter than 6 bytes.
        steps.append(normalizers.NFC())
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(tokenizers.Regex("^ +| +$"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    pipeline.normalizer = normalizers.Sequence(steps)
    prepend = "always" if spec.add_dummy_prefix else "never"
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend, split=False)
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix
    )
    return pipeline


def _check_carried(model: Any, tokenizer: SentencePiece) -> None:
    spec, trained = model.normalizer_spec, model.trainer_spec
    if trained.model_type not in (trained.UNIGRAM, trained.BPE):
        kind = trained.ModelType.Name(trained.model_type).lower()
        raise UserError(
            f"the SentencePiece model is of the kind {kind!r}, for which Hugging Face has no "
            "tokenizer with the same ids; allowed: unigram, bpe"
        )
    special = {tokenizer.vocab[i] for i in tokenizer.special_ids}
    symbols = {x.piece for x in model.pieces if x.type == x.USER_DEFINED} - special
    if symbols or trained.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        found = (
            f"user-defined symbols ({', '.join(sorted(symbols)[:5])})"
            if symbols
            else "its own spaces"
        )
        raise UserError(
            f"the SentencePiece model has {found}, for which Hugging Face has no tokenizer with "
            "the same ids"
        )


def _merges(model: Any) -> list[tuple[str, str]]:
    """Pairs of pieces in the order in which BPE joins them: by the score of what they become."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    order = {piece: i for i, piece in enumerate(scores)}
    pairs = [
        (-score, order[piece[:k]], order[piece[k:]])
        for piece, score in scores.items()
        for k in range(1, len(piece))
        if piece[:k] in scores and piece[k:] in scores
    ]
    pieces = [*scores]
    return [(pieces[left], pieces[right]) for _, left, right in sorted(pairs)]
