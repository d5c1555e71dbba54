import gzip
import json
import os
import subprocess
import sys

import pytest
from stdlib_text import stdlib_documents

from electra_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from electra_jax.errors import UserError

SETTINGS = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
CASED = {"lower_case": False, "strip_accents": True, "max_word_chars": 200}
WORDS = [
    "rain",
    "##s",
    "##ing",
    "it",
    "cafe",
    "café",
    "It",
    "[",
    "]",
    "mask",
    "中",
    ",",
    "a",
    "##a",
]
VOCAB = [*SPECIAL_TOKENS, *WORDS]


def tokens(tokenizer: Tokenizer, line: str) -> list[str]:
    [ids] = tokenizer.encode_batch([line])
    return [tokenizer.vocab[i] for i in ids]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("It rains, raining", ["it", "rain", "##s", ",", "rain", "##ing"]),
        ("CAFÉ cafe\u0301", ["cafe", "cafe"]),
        ("it\u00a0it\tit\u3000it\u200bit", ["it", "it", "it", "[UNK]"]),
        ("it中it", ["it", "中", "it"]),
        ("rainy rain", ["[UNK]", "rain"]),
        ("a" * 200, ["a", *["##a"] * 199]),
        ("a" * 201, ["[UNK]"]),
        ("[MASK]", ["[", "mask", "]"]),
        ("[PAD]a", ["[", "[UNK]", "]", "a"]),
        ("", []),
        (" \u00ad\x00\ufffd ", []),
    ],
)
def test_words_are_cut_as_in_electra(line, expected):
    assert tokens(Tokenizer(VOCAB, **SETTINGS), line) == expected


def test_ids_are_line_numbers():
    tokenizer = Tokenizer(VOCAB, **SETTINGS)
    assert tokenizer.encode_batch(["it rains", ""]) == [[8, 5, 6], []]
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.vocab_size) == (0, 4, len(VOCAB))
    assert tokenizer.decode([2, 8, 5, 6, 3]) == "[CLS] it rains [SEP]"


def test_accents_are_stripped_only_when_lower_casing():
    assert tokens(Tokenizer(VOCAB, **CASED), "It café") == ["It", "café"]
    keep = {**SETTINGS, "strip_accents": False}
    assert tokens(Tokenizer(VOCAB, **keep), "It CAFÉ") == ["it", "café"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_vocab_file_line_number_is_the_id(tmp_path, newline):
    path = tmp_path / "vocab.txt"
    vocab = ["[PAD]", "a\u2028b", "\u3000", *SPECIAL_TOKENS[1:]]
    path.write_text(newline.join(vocab), encoding="utf-8", newline="")
    assert Tokenizer.from_vocab_file(path, **SETTINGS).vocab == vocab
    path.write_text(newline.join(vocab) + newline, encoding="utf-8", newline="")
    assert Tokenizer.from_vocab_file(path, **SETTINGS).vocab == vocab


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n", r"lacks \[MASK\]"),
        (b"", r"lacks \[PAD\]"),
        ("\n".join([*VOCAB, "it"]).encode(), r"holds 'it' 2 times"),
        (b"[PAD]\n\xff", r"not UTF-8 at byte 6"),
        (None, r"cannot read"),
    ],
)
def test_bad_vocab_file_is_named(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: .*{message}"):
        Tokenizer.from_vocab_file(path, **SETTINGS)


def test_saved_tokenizer_loads_the_same(tmp_path):
    saved = Tokenizer([*VOCAB, "\u3000"], **CASED)
    saved.save(tmp_path / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "tokenizer")
    assert loaded.hash == saved.hash
    assert (loaded.vocab, loaded.settings) == (saved.vocab, CASED)


def test_hash_covers_vocabulary_and_settings():
    tokenizers = [
        Tokenizer(VOCAB, **SETTINGS),
        Tokenizer(VOCAB, **CASED),
        Tokenizer(VOCAB, **{**SETTINGS, "max_word_chars": 100}),
        Tokenizer(VOCAB[::-1], **SETTINGS),
    ]
    assert len({tokenizer.hash for tokenizer in tokenizers}) == 4


@pytest.mark.parametrize("content", [None, "{", "[]", '{"lower_case": true}'])
def test_bad_settings_file_is_named(tmp_path, content):
    Tokenizer(VOCAB, **SETTINGS).save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"^{path}: "):
        Tokenizer.load(tmp_path)


def test_training_gives_a_useful_vocabulary():
    tokenizer = Tokenizer.train(stdlib_documents(), 1000, **SETTINGS)
    assert tokenizer.vocab_size == 1000
    assert tuple(tokenizer.vocab[:5]) == SPECIAL_TOKENS
    assert {"the", "return", "##ing"} <= set(tokenizer.vocab)
    encoded = tokenizer.encode_batch(["Return the string."])
    assert tokenizer.decode(encoded[0]) == "return the string."


def test_training_is_the_same_in_every_process():
    # The trainer's hash tables are seeded anew in each process.
    program = (
        "from stdlib_text import stdlib_documents\n"
        "from electra_jax.data.tokenizer import Tokenizer\n"
        f"print(Tokenizer.train(stdlib_documents(), 1000, **{SETTINGS}).hash)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True
        ).stdout
        for _ in range(2)
    }
    assert len(hashes) == 1


def test_rarest_characters_stay_out_of_a_trained_vocabulary():
    documents = [["the cat sat on the mat"] * 1000, ["ᚠ rune"]]
    tokenizer = Tokenizer.train(documents, 100, **SETTINGS)
    assert "ᚠ" not in tokenizer.vocab
    assert tokens(tokenizer, "ᚠ cat") == ["[UNK]", "cat"]


def test_vocab_size_below_the_alphabet_is_refused():
    with pytest.raises(UserError, match=r"^data\.vocab_size: 20 is too small.* need \d+$"):
        Tokenizer.train(stdlib_documents(), 20, **SETTINGS)


# Lines where ELECTRA's tokenizer and Hugging Face's differ, by what is in them.
SPECIAL_TOKENS_IN_TEXT = 1414
LONG_WORDS = 1422


@pytest.mark.parametrize(
    ("oracle", "vocab", "lower_case", "strip_accents"),
    [
        ("bert-base-uncased", "bert-base-uncased", True, True),
        ("bert-base-uncased.keep_accents", "bert-base-uncased", True, False),
        ("bert-base-chinese", "bert-base-chinese", True, True),
        ("koelectra-v1", "koelectra-v1", False, False),
    ],
)
def test_ids_equal_the_reference_tokenizers(shared_data, oracle, vocab, lower_case, strip_accents):
    with gzip.open(shared_data / f"tokenizer_oracle/{oracle}.jsonl.gz", "rt") as file:
        records = [json.loads(line) for line in file]
    assert len(records) == 722

    def differing(max_word_chars: int, key: str) -> list[int]:
        tokenizer = Tokenizer.from_vocab_file(
            shared_data / f"vocab/{vocab}.vocab.txt",
            lower_case=lower_case,
            strip_accents=strip_accents,
            max_word_chars=max_word_chars,
        )
        encoded = tokenizer.encode_batch([record["text"] for record in records])
        return [
            record["i"]
            for record, ids in zip(records, encoded, strict=True)
            if ids != record.get(key, record["electra_ids"])
        ]

    assert differing(200, "electra_ids") == []
    assert differing(100, "electra_ids") == [LONG_WORDS]
    assert differing(100, "hf_ids") == [SPECIAL_TOKENS_IN_TEXT]
