import gzip
import json

import pytest
from stores import LINES
from stores import UNCASED as SETTINGS

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers import wordpiece
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS, encode_with_special_tokens
from electra_jax.data.tokenizers.wordpiece import WordPiece, WordPieceTrainer
from electra_jax.errors import UserError

WORDS = ["rain", "##s", "##ing", "it", "cafe", "café", "It", "[", "]", "mask", "中", ","]
VOCAB = [*SPECIAL_TOKENS, *WORDS, "a", "##a"]


def tokens(tokenizer: WordPiece, line: str) -> list[str]:
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
    assert tokens(WordPiece(VOCAB, **SETTINGS), line) == expected


def test_words_start_with_pieces_that_have_no_prefix():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "##mask"]
    tokenizer = WordPiece([*names, *WORDS], special_tokens=names, **SETTINGS)
    continuations = [tokenizer.vocab[i] for i in (~tokenizer.starts_word).nonzero()[0]]
    assert continuations == ["##s", "##ing"]
    assert tokens(tokenizer, "itmask") == ["[UNK]"]


def test_accents_are_stripped_only_when_lower_casing():
    cased, accented = ({**SETTINGS, name: False} for name in ("lower_case", "strip_accents"))
    assert tokens(WordPiece(VOCAB, **cased), "It café") == ["It", "café"]
    assert tokens(WordPiece(VOCAB, **accented), "It CAFÉ") == ["it", "café"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_number_is_the_id(tmp_path, newline):
    path = tmp_path / "vocab.txt"
    vocab = ["[PAD]", "a\u2028b", "\u3000", *SPECIAL_TOKENS[1:]]
    for end in ("", newline):
        path.write_text(newline.join(vocab) + end, encoding="utf-8", newline="")
        assert WordPiece.from_file(path, **SETTINGS).vocab == vocab


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n", r"\[MASK\]; .*\[PAD\], "),
        (b"", r"\[PAD\]"),
        ("\n".join([*VOCAB, "it"]).encode(), "'it' 2 times"),
        (b"[PAD]\n\xff", "UTF-8 at byte 6"),
    ],
)
def test_bad_vocab_file_is_named(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: .*{message}"):
        WordPiece.from_file(path, **SETTINGS)


def test_rarest_characters_stay_out_of_a_trained_vocabulary():
    lines = [*["the cat sat on the mat"] * 1000, "ᚠ rune"]
    tokenizer = tokenizers.train("wordpiece", lines, 100, **SETTINGS)
    assert "ᚠ" not in tokenizer.vocab
    assert tokens(tokenizer, "ᚠ cat") == ["[UNK]", "cat"]


def vocabulary(*chunks: list[str], vocab_size: int = 100, **limits) -> list[str]:
    trainer = WordPieceTrainer("wordpiece", vocab_size, SETTINGS, **limits)
    for lines in chunks:
        trainer.add(trainer.summarize(lines))
    return trainer.finish().vocab


def test_counts_of_a_large_corpus_are_scaled_down():
    options = {"vocab_size": 1000, "coverage": 1.0}
    words = wordpiece.count_words(LINES, lower_case=True, strip_accents=True).total()
    scaled = vocabulary(LINES * 10, train_words=2 * words, **options)
    assert scaled == vocabulary(LINES * 2, **options)


def test_scaled_counts_are_rounded_up():
    lines = [*["common"] * 1000, *["twice"] * 2]
    assert "twice" in vocabulary(lines)
    scaled = vocabulary(lines, train_words=10)
    # A word seen once is not merged, but its characters are there.
    assert {"common", "t", "##w"} <= set(scaled) and "twice" not in scaled


def test_the_rarest_words_are_forgotten_when_there_are_too_many():
    chunks = ["both both seldom first"], ["both last here too"], ["also here"], ["also"]
    vocab = set(vocabulary(*chunks, max_words=4))
    assert {"both", "also"} <= vocab
    # After the second chunk, the two most frequent words are left, "both" and "first".
    assert {token for token in vocab if len(token) == 1} == {*"both", *"first", *"also", *"here"}


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
    lines = [record["text"] for record in records]

    def differing(max_word_chars: int, key: str) -> tuple[WordPiece, list[int]]:
        settings = {"lower_case": lower_case, "strip_accents": strip_accents}
        path = shared_data / f"vocab/{vocab}.vocab.txt"
        tokenizer = WordPiece.from_file(path, max_word_chars=max_word_chars, **settings)
        return tokenizer, [
            record["i"]
            for record, ids in zip(records, tokenizer.encode_batch(lines), strict=True)
            if ids != record.get(key, record["electra_ids"])
        ]

    assert differing(200, "electra_ids")[1] == []
    assert differing(100, "electra_ids")[1] == [LONG_WORDS]
    tokenizer, different = differing(100, "hf_ids")
    assert different == [SPECIAL_TOKENS_IN_TEXT]
    for record in records:
        ids, _, offsets = tokenizer.encode_with_offsets(record["text"])
        assert [ids] == tokenizer.encode_batch([record["text"]])
        if "hf_offsets" in record and record["i"] != SPECIAL_TOKENS_IN_TEXT:
            assert [list(span) for span in offsets] == record["hf_offsets"], record["i"]
        ids, _, offsets = encode_with_special_tokens(tokenizer, record["text"])
        assert ids == record.get("hf_ids", record["electra_ids"]), record["i"]
        if "hf_offsets" in record:
            assert [list(span) for span in offsets] == record["hf_offsets"], record["i"]
    assert ("hf_offsets" in records[0]) == (oracle == "bert-base-uncased")
