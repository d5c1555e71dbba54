"""Tokenizers in Hugging Face's files: ids are the same, settings come back."""

import gzip
import json
from functools import cache

import pytest
from sentencepiece import sentencepiece_model_pb2
from stdlib_text import stdlib_documents
from tokenizers import Tokenizer as Pipeline

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.data.tokenizers.sentencepiece import SentencePiece
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.interop.tokenizer_files import read_tokenizer, to_pipeline, write_tokenizer

KINDS = ("wordpiece", "unigram", "bpe")
CASES = {"lower": (True, True), "accents": (True, False), "cased": (False, False)}
SCRIPTS = [  # and odd spaces, accents, words
    *(
        "Crème brûlée, naïve façade",
        "Größe ÄÖÜ",
        "세 계 인 권 선 언",
        "吾輩は猫である。",
        "ΑΒΓ άέή",
    ),
    *("  two   spaces ", "\t", "", "a\u0301 e\u0301", "zero\u200bwidth", "😀 emoji", "xyzzyx" * 40),
]


def lines() -> list[str]:
    return [line for document in stdlib_documents() for line in document]


@cache
def trained(kind: str, case: str) -> Tokenizer:
    lower_case, strip_accents = CASES[case]
    settings = {"lower_case": lower_case, "strip_accents": strip_accents, "max_word_chars": 100}
    return tokenizers.train(kind, lines(), 900, **settings)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_written_tokenizer_gives_our_ids_and_is_read_again(kind, case, tmp_path):
    tokenizer = trained(kind, case)
    write_tokenizer(tokenizer, tmp_path, 128)
    pipeline = Pipeline.from_file(str(tmp_path / "tokenizer.json"))
    texts = lines()[:500] + SCRIPTS
    ours = tokenizer.encode_batch(texts)
    theirs = [x.ids for x in pipeline.encode_batch(texts, add_special_tokens=False)]
    assert theirs == ours
    assert read_tokenizer(tmp_path).hash == tokenizer.hash


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_pairs(kind):
    tokenizer = trained(kind, "lower")
    pipeline = to_pipeline(tokenizer)
    cls, sep, mask = tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id
    first, second = tokenizer.encode_batch(["a text", "another"])
    encoding = pipeline.encode("a text", "another")
    assert encoding.ids == [cls, *first, sep, *second, sep]
    assert encoding.type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert mask in pipeline.encode("fill [MASK] in").ids
    assert pipeline.decode(first).strip() == "a text"


@pytest.mark.parametrize(
    "vocab, oracle",
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("bert-base-uncased", "bert-base-uncased.keep_accents"),
        ("koelectra-v1", "koelectra-v1"),
        ("sentencepiece_test_model.model", "bert-base-uncased"),
        ("sentencepiece_test_ja_model.model", "bert-base-uncased"),
    ],
)
def test_real_vocabularies_and_lines(vocab, oracle, shared_data):
    """All lines but that with special tokens, and with SentencePiece that of piled-up accents."""
    lower = "uncased" in vocab
    tokenizer = tokenizers.from_file(
        shared_data / "vocab" / (vocab if "." in vocab else f"{vocab}.vocab.txt"),
        lower_case=lower,
        strip_accents=lower and "keep" not in oracle,
        max_word_chars=200,
    )
    with gzip.open(shared_data / "tokenizer_oracle" / f"{oracle}.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["text"] for line in file]
    ours = tokenizer.encode_batch(texts)
    theirs = to_pipeline(tokenizer).encode_batch(texts, add_special_tokens=False)
    differing = [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b.ids]
    expected = ["[MASK] and [CLS] inside text [SEP]"]
    piled_up = [text for text in texts if "a\u0300\u0301\u0302b" in text]
    assert differing == expected + piled_up * isinstance(tokenizer, SentencePiece)


def model(**changes) -> bytes:
    proto = sentencepiece_model_pb2.ModelProto.FromString(trained("unigram", "cased").content)
    for name, value in changes.items():
        setattr(proto.trainer_spec, name, value)
    return proto.SerializeToString()


def test_kinds_of_sentencepiece_without_a_counterpart_are_refused():
    settings = {"lower_case": False, "strip_accents": False}
    with pytest.raises(UserError, match=r"the kind 'word' \(allowed: unigram, bpe\)"):
        to_pipeline(SentencePiece(model(model_type=3), **settings))
    proto = sentencepiece_model_pb2.ModelProto.FromString(model())
    proto.pieces[300].type = proto.pieces[300].USER_DEFINED
    with pytest.raises(UserError, match="user-defined symbols"):
        to_pipeline(SentencePiece(proto.SerializeToString(), **settings))


VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]


def write_files(directory, vocab=VOCAB, config=None, pipeline=None) -> None:
    if vocab:
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in vocab))
    for name, content in (("tokenizer_config.json", config), ("tokenizer.json", pipeline)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))


UNCASED = {"lower_case": True, "strip_accents": True, "max_word_chars": 100}
CASED = {"lower_case": False, "strip_accents": False, "max_word_chars": 100}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, UNCASED),
        ({"config": {"do_lower_case": False, "strip_accents": None}}, CASED),
        (
            {
                "config": {},
                "pipeline": {
                    "normalizer": {"lowercase": False, "strip_accents": False},
                    "model": {"max_input_chars_per_word": 7},
                },
            },
            CASED | {"max_word_chars": 7},
        ),
    ],
)
def test_settings_of_other_peoples_files(files, expected, tmp_path):
    assert read_tokenizer(tmp_path) is None
    write_files(tmp_path, **files)
    assert read_tokenizer(tmp_path).settings.items() >= expected.items()
    longest = read_tokenizer(tmp_path, 200).settings["max_word_chars"]
    assert longest == (7 if "pipeline" in files else 200)


def test_a_vocabulary_in_tokenizer_json_alone(tmp_path):
    ids = {token: i for i, token in enumerate(VOCAB)}
    shuffled = dict(sorted(ids.items(), key=lambda item: item[0]))
    write_files(tmp_path, vocab=None, pipeline={"model": {"type": "WordPiece", "vocab": shuffled}})
    assert read_tokenizer(tmp_path).vocab == VOCAB


@pytest.mark.parametrize(
    "files, message",
    [
        ({"config": {"do_lower_case": "yes"}}, "do_lower_case is 'yes'; allowed: true or false"),
        ({"config": {"do_lower_case": False, "strip_accents": True}}, "ours|our tokenizers"),
        ({"config": {"tokenize_chinese_chars": False}}, "tokenize_chinese_chars is false"),
        ({"config": {"mask_token": "<mask>"}}, "the vocabulary lacks <mask>"),
        ({"config": {"mask_token": 7}}, r"mask_token\) is \[.*7\]; allowed: five"),
        ({"config": {"mask_token": "[SEP]"}}, "'\\[SEP\\]'\\]; allowed: five different names"),
        ({"config": []}, "tokenizer_config.json: .*JSON object"),
        ({"pipeline": {"model": {"max_input_chars_per_word": -1}}}, "is -1; allowed: a number"),
        ({"vocab": None, "pipeline": {"model": {"type": "BPE"}}}, "the model is 'BPE'; allowed"),
        ({"vocab": None, "pipeline": {"model": None}}, "the model is None; allowed"),
        (
            {"vocab": None, "pipeline": {"model": {"type": "WordPiece", "vocab": {"a": 1}}}},
            "the ids are not 0 to 0, each once",
        ),
        (
            {"vocab": None, "pipeline": {"model": {"type": "WordPiece", "vocab": {"a": 0}}}},
            r"the vocabulary lacks \[PAD\]",
        ),
    ],
)
def test_tokenizers_that_ours_cannot_be_are_refused(files, message, tmp_path):
    write_files(tmp_path, **files)
    with pytest.raises(UserError, match=message) as error:
        read_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_names_of_special_tokens_may_be_objects(tmp_path):
    vocab = [token.strip("[]").lower() for token in VOCAB]
    names = {
        f"{name}_token": {"content": name, "lstrip": True}
        for name in ("pad", "unk", "cls", "sep", "mask")
    }
    write_files(tmp_path, vocab, config=names)
    tokenizer = read_tokenizer(tmp_path)
    assert isinstance(tokenizer, WordPiece)
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
