"""Tokenizers as Hugging Face's libraries keep them, from and to ours.

What is written gives the same ids as ours for every text without special tokens. Those typed in a
text, such as `[MASK]`, are found whole there, which filling masks needs, and are spelled out here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from electra_jax.data.tokenizers.base import SPECIAL_TOKENS, Tokenizer, check_setting
from electra_jax.data.tokenizers.sentencepiece import SPACE, SentencePiece
from electra_jax.data.tokenizers.wordpiece import CONTINUATION, WordPiece
from electra_jax.errors import UserError, located
from electra_jax.files import read_json, write_json

CONFIG, PIPELINE = "tokenizer_config.json", "tokenizer.json"
SPECIAL_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
MAX_WORD_CHARS = 100  # Hugging Face's default, where the original has 200


def read_tokenizer(directory: Path, max_word_chars: int = MAX_WORD_CHARS) -> Tokenizer | None:
    """The tokenizer beside someone's weights; None where there is no vocabulary.

    Settings are those of `tokenizer_config.json`, then those of `tokenizer.json`, then BERT's.

    Args:
      max_word_chars: holds where no file says otherwise.

    Raises:
      UserError: a file is damaged, or asks for what ours cannot do.
    """
    files = [directory / family.vocab_file for family in (SentencePiece, WordPiece)]
    pieces, words, path = (*files, directory / PIPELINE)
    if not any(file.is_file() for file in (pieces, words, path)):
        return None
    config, pipeline = (
        read_json(file) if file.is_file() else {} for file in (directory / CONFIG, path)
    )
    model = _section(pipeline, "model")
    settings = _settings(directory, config, _section(pipeline, "normalizer"))
    if pieces.is_file():
        return SentencePiece.from_file(pieces, **settings)
    name = "max_input_chars_per_word"
    settings["max_word_chars"] = model.get(name, max_word_chars)
    check_setting(f"{path}: {name}", "max_word_chars", settings["max_word_chars"])
    if words.is_file():
        return WordPiece.from_file(words, **settings)
    with located(path):
        return WordPiece(_vocab(model), **settings)


def _section(pipeline: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = pipeline.get(name)
    return section if isinstance(section, dict) else {}


def _settings(
    directory: Path, config: Mapping[str, Any], normalizer: Mapping[str, Any]
) -> dict[str, Any]:
    def setting(name: str, theirs: str, default: bool) -> bool:
        value = config.get(name, normalizer.get(theirs))
        value = default if value is None else value
        check_setting(f"{directory}: {name}", "lower_case", value)
        return value

    lower_case = setting("do_lower_case", "lowercase", True)
    strip_accents = setting("strip_accents", "strip_accents", lower_case)
    if strip_accents and not lower_case:
        raise UserError(
            f"{directory}: strip_accents is true and do_lower_case is false; our tokenizers strip "
            "accents of lower-cased text only"
        )
    if not setting("tokenize_chinese_chars", "handle_chinese_chars", True):
        raise UserError(
            f"{directory}: tokenize_chinese_chars is false; our tokenizers always split them"
        )
    tokens = [config.get(*pair) for pair in zip(SPECIAL_NAMES, SPECIAL_TOKENS, strict=True)]
    tokens = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    check_setting(f"{directory}: ({', '.join(SPECIAL_NAMES)})", "special_tokens", tokens)
    return {"special_tokens": tokens, "lower_case": lower_case, "strip_accents": strip_accents}


def _vocab(model: Mapping[str, Any]) -> list[str]:
    vocab = model.get("vocab")
    if model.get("type") != "WordPiece" or not isinstance(vocab, dict):
        raise UserError(
            f"the model is {model.get('type')!r}; allowed: 'WordPiece', or a directory with "
            f"{WordPiece.vocab_file} or {SentencePiece.vocab_file}"
        )
    if {*map(repr, vocab.values())} != {*map(repr, range(len(vocab)))}:
        raise UserError(f"the ids are not 0 to {len(vocab) - 1}, each once")
    return sorted(vocab, key=vocab.get)


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
    to_pipeline(tokenizer).save(str(directory / PIPELINE))
    (directory / tokenizer.vocab_file).write_bytes(tokenizer.content)
    write_json(directory / CONFIG, config)


def to_pipeline(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The content of `tokenizer.json`: `[CLS] A [SEP]`, or `[CLS] A [SEP] B [SEP]` for pairs.

    Raises:
      UserError: a SentencePiece model is of a kind that the `tokenizers` library does not have.
    """
    ids = {token: i for i, token in enumerate(tokenizer.vocab)}
    names = [tokenizer.vocab[i] for i in tokenizer.special_ids]
    _, unknown, cls, sep, _ = names
    if isinstance(tokenizer, WordPiece):
        pipeline = _wordpiece(ids, unknown, tokenizer.settings)
    else:
        pipeline = _sentencepiece(ids, unknown, tokenizer)
    pipeline.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    pipeline.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
    return pipeline


def _bert_normalizer(settings: Mapping[str, Any], cleans: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=cleans,
        handle_chinese_chars=cleans,
        strip_accents=settings["lower_case"] and settings["strip_accents"],
        lowercase=settings["lower_case"],
    )


def _wordpiece(
    ids: dict[str, int], unknown: str, settings: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    longest = settings["max_word_chars"]
    model = models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=longest)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = _bert_normalizer(settings, cleans=True)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(CONTINUATION)
    return pipeline


def _sentencepiece(
    ids: dict[str, int], unknown: str, tokenizer: SentencePiece
) -> tokenizers.Tokenizer:
    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.content)
    spec, trained = proto.normalizer_spec, proto.trainer_spec
    _check_carried(proto, {tokenizer.vocab[i] for i in tokenizer.special_ids})
    if trained.model_type == trained.UNIGRAM:
        scores = {piece.piece: piece.score for piece in proto.pieces}
        vocab = [(token, scores.get(token, 0.0)) for token in ids]
        model = models.Unigram(vocab, ids[unknown], trained.byte_fallback)
    else:
        model = models.BPE(
            ids,
            _merges(proto),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )
    pipeline = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if tokenizer.settings["lower_case"]:
        steps.append(_bert_normalizer(tokenizer.settings, cleans=False))
    if tokenizer.settings["lower_case"] and tokenizer.settings["strip_accents"]:
        # That took Hangul syllables apart. The model's table joins them again; as the library reads
        # that table, it joins only what is shorter than 6 bytes.
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


def _check_carried(proto: Any, special: set[str]) -> None:
    spec, trained = proto.normalizer_spec, proto.trainer_spec
    symbols = {x.piece for x in proto.pieces if x.type == x.USER_DEFINED} - special
    kind = trained.ModelType.Name(trained.model_type).lower()
    for is_carried, found in (
        (kind in ("unigram", "bpe"), f"the kind {kind!r} (allowed: unigram, bpe)"),
        (not symbols, f"user-defined symbols ({', '.join(sorted(symbols)[:5])})"),
        (spec.escape_whitespaces and not trained.treat_whitespace_as_suffix, "its own spaces"),
    ):
        if not is_carried:
            raise UserError(
                f"the SentencePiece model has {found}, for which Hugging Face has no tokenizer "
                "with the same ids"
            )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Pairs of pieces in the order in which BPE joins them: by the score of the joined piece."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    order = {piece: i for i, piece in enumerate(scores)}
    pairs = [
        (-score, order[piece[:k]], order[piece[k:]])
        for piece, score in scores.items()
        for k in range(1, len(piece))
        if piece[:k] in scores and piece[k:] in scores
    ]
    pieces = [*scores]
    return [(pieces[left], pieces[right]) for _, left, right in sorted(pairs)]
