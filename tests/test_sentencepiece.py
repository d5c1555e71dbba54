import gzip
import io
import json
import lzma
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import sentencepiece as library
from stores import CASED, LINES

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers import sentencepiece
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.sentencepiece import SentencePiece, SentencePieceTrainer
from electra_jax.errors import UserError


def model(lines: Sequence[str] = LINES, **options) -> bytes:
    """A model as the library trains it, whatever ours have."""
    made = io.BytesIO()
    options = {"vocab_size": 500, "hard_vocab_limit": False, "minloglevel": 2, **options}
    library.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=made, **options)
    return made.getvalue()


given = cache(model)


def processor(content: bytes) -> library.SentencePieceProcessor:
    made = library.SentencePieceProcessor()
    made.LoadFromSerializedProto(content)
    return made


def normalized(line: str) -> str:
    """What the library's rule nmt_nfkc makes of a line, up to the composition of accents."""
    line = re.sub("[\u200b\u200c\u200e\u200f\ufeff\ufffd]", " ", line)
    parts = [unicodedata.normalize("NFKC", part) for part in line.split("\uff5e")]
    return " ".join("\uff5e".join(parts).split())


def test_a_given_model_gives_the_ids_of_the_library():
    tokenizer = SentencePiece(given(), **CASED)
    assert tokenizer.encode_batch(LINES) == processor(given()).encode(LINES)
    for line in LINES[:100]:
        ids, pieces, offsets = tokenizer.encode_with_offsets(line)
        assert ids == processor(given()).encode(line)
        surfaces = [line[start:end] for start, end in offsets]
        assert "".join(surfaces) == "".join(line.split())
        for piece, surface in zip(pieces, surfaces, strict=True):
            assert piece.removeprefix("\u2581") in (surface, "<unk>")


def test_special_tokens_that_a_model_lacks_come_after_its_pieces():
    tokenizer = SentencePiece(given(), **CASED)
    size = processor(given()).piece_size()
    assert tokenizer.special_ids == (size, 0, size + 1, size + 2, size + 3)
    assert tokenizer.vocab[size:] == ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.settings["special_tokens"] == ["[PAD]", "<unk>", *SPECIAL_TOKENS[2:]]
    assert tokenizer.starts_word[size:].all()
    [ids] = tokenizer.encode_batch(["the€"])
    assert tokenizer.unk_id in ids
    assert tokenizer.decode([size + 1, *ids, size + 3]) == "[CLS] the <unk> [MASK]"

    names = ("[PAD]", "<unk>", "<s>", "</s>", "the")
    tokenizer = SentencePiece(given(), special_tokens=names, **CASED)
    assert tokenizer.special_ids == (size, 0, 1, 2, tokenizer.vocab.index("the"))


@pytest.mark.parametrize("names", [["<unk>", "b", "c", "d", "e"], ["a", "b", "c", "<unk>", "e"]])
def test_the_unknown_token_has_no_other_role(tmp_path, names):
    path = tmp_path / "spm.model"
    path.write_bytes(given())
    with pytest.raises(UserError, match=rf"^{path}: the special tokens, .* are not different"):
        SentencePiece.from_file(path, special_tokens=names, **CASED)


@pytest.mark.parametrize("text", ["the [MASK] the", "the[MASK]", "\uff3bMASK\uff3d[MASK]"])
@pytest.mark.parametrize("role", ["user_defined_symbols", "control_symbols"])
def test_text_cannot_forge_a_symbol_of_the_model(text, role):
    content = given(**{role: "[MASK]"})
    found = [processor(content).piece_to_id("[MASK]") in processor(content).encode(text)]
    assert found == [role == "user_defined_symbols"], "nothing to protect from"
    tokenizer = SentencePiece(content, **CASED)
    ids, tokens, offsets = tokenizer.encode_with_offsets(text)
    assert [ids] == tokenizer.encode_batch([text])
    assert set(ids).isdisjoint({*tokenizer.special_ids} - {tokenizer.unk_id})
    assert "M" in tokens
    assert tokenizer.decode(ids) == unicodedata.normalize("NFKC", text)
    assert len(offsets) == len(ids)
    covered = "".join(text[i] for i in sorted({i for span in offsets for i in range(*span)}))
    assert covered == text.replace(" ", "")


def test_spelling_a_symbol_out_gives_no_other_special_token():
    content = given(user_defined_symbols="[MASK],M")
    names = ["[PAD]", "<unk>", "[CLS]", "M", "[MASK]"]
    tokenizer = SentencePiece(content, special_tokens=names, **CASED)
    _, tokens, _ = tokenizer.encode_with_offsets("the [MASK] M")
    assert tokens == ["\u2581the", "\u2581", "[", "<unk>", "A", "S", "K", "]", "\u2581", "<unk>"]


@pytest.mark.parametrize(
    "content", [b"", b"[PAD]\n[UNK]\n", bytes(100), given()[:-100]], ids=range(4)
)
def test_bad_model_file_is_named(tmp_path, content, capfd):
    path = tmp_path / "spm.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: not a SentencePiece model"):
        SentencePiece.from_file(path, **CASED)
    assert capfd.readouterr() == ("", "")


def test_training_is_silent(capfd):
    tokenizers.train("unigram", LINES, 400, **CASED)
    with pytest.raises(UserError):
        tokenizers.train("bpe", LINES, 20, **CASED)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_special_tokens_of_trained_models_are_those_of_the_library(kind):
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    tokenizer = tokenizers.train(kind, LINES, 400, special_tokens=names, **CASED)
    trained = processor(tokenizer.content)
    assert (trained.pad_id(), trained.unk_id(), trained.bos_id(), trained.eos_id()) == (0, 1, 2, 3)
    assert trained.id_to_piece([0, 1, 2, 3, 4]) == names
    assert trained.is_control([0, 1, 2, 3, 4]) == [True, False, True, True, True]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_trained_models_know_every_character(kind):
    tokenizer = tokenizers.train(kind, LINES, 600, **CASED)
    assert tokenizer.vocab[5:261] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert not tokenizer.starts_word[5:261].any()
    line = "ᚠ日本語 \U0001f468\u200d\U0001f469 e\u0301 the"
    ids, tokens, offsets = tokenizer.encode_with_offsets(line)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", line)
    # Each of the bytes of a character comes from it.
    assert tokens[1:4] == ["<0xE1>", "<0x9A>", "<0xA0>"]
    assert offsets[1:4] == [(0, 1)] * 3
    assert line[slice(*offsets[-1])] == tokens[-1].removeprefix("\u2581")


def test_lower_casing_and_removal_of_accents_come_first():
    line = "\u0130 CAFÉ cafe\u0301 \ud55c STRING"  # lower-cased alone, the first is two characters
    for lower_case, strip_accents, text in (
        (False, False, "\u0130 CAFÉ café 한 STRING"),
        (False, True, "\u0130 CAFÉ café 한 STRING"),
        (True, False, "i\u0307 café café 한 string"),
        (True, True, "i cafe cafe 한 string"),
    ):
        settings = {"lower_case": lower_case, "strip_accents": strip_accents}
        tokenizer = SentencePiece(given(byte_fallback=True), **settings)
        ids, _, offsets = tokenizer.encode_with_offsets(line)
        assert [ids] == tokenizer.encode_batch([line])
        assert tokenizer.decode(ids) == text
        words = [line[offsets[k][0]] for k in tokenizer.starts_word[ids].nonzero()[0]]
        assert words == ["\u0130", "C", "c", "한", "S"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_long_lines_and_reserved_characters_do_not_keep_text_from_training(kind):
    line = " \u2585 ".join(LINES)
    assert len(line.encode()) > 5 * 4192  # of which the library skips lines
    vocab = set(tokenizers.train(kind, [line], 600, **CASED).vocab)
    expected = set(tokenizers.train(kind, LINES, 600, **CASED).vocab)
    assert len(vocab & expected) > 500
    unbroken = tokenizers.train(kind, ["ab" * 5000], 300, **CASED)
    assert any({*piece} == {"a", "b"} for piece in unbroken.vocab)


def test_sentences_hold_all_text_and_are_cut_at_white_space():
    lines = ["x" * 2500, "words " * 1000, "  a b\t" + "y" * 999 + " c ", "", " \n"]
    sentences = sentencepiece.hash_sentences(lines, lower_case=False, strip_accents=False)
    assert [sentence.split() for sentence in sentences] == [  # of equal ones, one is left
        ["x" * 1000],
        ["x" * 500],
        ["words"] * 166,
        ["words"] * 4,
        ["a", "b"],
        ["y" * 999],
        ["c"],
    ]
    assert max(map(len, sentences)) == 1000
    assert max(sentences.values()) > 2**60


def test_training_sees_a_bounded_sample_that_depends_on_the_text_alone():
    lines = sorted(set(LINES))
    characters = sum(map(len, lines))
    samples = []
    for order, size in ((lines, 10), (lines, 1000), (lines[::-1], 77), (lines * 3, 100)):
        trainer = SentencePieceTrainer("unigram", 500, CASED, max_characters=characters // 3)
        for start in range(0, len(order), size):
            trainer.add(trainer.summarize(order[start : start + size]))
        samples.append(trainer.sentences())
    assert samples[0] == samples[1] == samples[2] == samples[3]
    assert characters // 8 < sum(map(len, samples[0])) <= characters // 3
    assert set(samples[0]) <= set(lines)


@pytest.mark.parametrize(
    ("lines", "mask", "facts"),
    [
        (["", " \u3000"], "[MASK]", r"data\.source: there is no text"),
        (LINES, "<0x41>", r"data\.tokenizer: .* no bpe model: .*<0x41> is"),
    ],
)
def test_what_cannot_be_trained_is_reported(lines, mask, facts):
    names = [*SPECIAL_TOKENS[:4], mask]
    with pytest.raises(UserError, match=f"^{facts}"):
        tokenizers.train("bpe", lines, 500, special_tokens=names, **CASED)


def text(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [line for line in file.read().split("\n") if line.strip()]


def contexts(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    return [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]


def in_arabic(path: Path) -> list[str]:
    script = re.compile("[\u0600-\u06ff]")
    return [line for line in text(path) if len(script.findall(line)) > len(line) / 2]


CORPORA = {
    "korean": lambda data: contexts(data / "korean/KorQuAD_v1.0_dev.json.gz")[:200],
    "hindi": lambda data: contexts(data / "xquad/xquad.hi.json.gz")[:120],
    "chinese": lambda data: text(data / "text/zh_wikipedia_cmrc_paragraphs.txt.xz")[:200],
    "japanese": lambda data: text(data / "text/ja_wagahai_neko.txt.xz")[:500],
    "arabic": lambda data: in_arabic(data / "text/udhr_multiscript.txt.xz"),
    "71 languages": lambda data: text(data / "text/udhr_multiscript.txt.xz")[::8],
}


@pytest.mark.parametrize("lower_case", [False, True])
@pytest.mark.parametrize(
    ("language", "kind", "vocab_size"),
    [
        ("korean", "unigram", 3000),
        ("chinese", "unigram", 5000),
        ("japanese", "unigram", 4000),
        ("japanese", "bpe", 4000),
        ("arabic", "unigram", 1000),
        ("hindi", "unigram", 2000),
        ("71 languages", "unigram", 6000),
    ],
)
def test_every_language_round_trips(shared_data, language, kind, vocab_size, lower_case):
    lines = CORPORA[language](shared_data)
    assert sum(map(len, lines)) > 35_000
    settings = {**CASED, "lower_case": lower_case}
    tokenizer = tokenizers.train(kind, lines, vocab_size, **settings)
    assert tokenizer.vocab_size == vocab_size
    ids = tokenizer.encode_batch(lines)
    assert tokenizer.unk_id not in chain.from_iterable(ids)
    assert sum(map(len, ids)) < 0.8 * sum(map(len, lines))
    change = str.casefold if lower_case else str
    for line, encoded in zip(lines, ids, strict=True):
        # SentencePiece leaves some accents that Unicode would compose.
        decoded = unicodedata.normalize("NFC", tokenizer.decode(encoded))
        assert change(decoded) == change(normalized(line))


@pytest.mark.parametrize(
    ("name", "size", "file"),
    [
        ("sentencepiece_test_model", 1000, "en_wikipedia_squad_articles"),
        ("sentencepiece_test_ja_model", 8000, "ja_wagahai_neko"),
    ],
)
def test_given_models_of_others(shared_data, name, size, file):
    path = shared_data / f"vocab/{name}.model"
    lines = text(shared_data / f"text/{file}.txt.xz")[:1000]
    tokenizer = tokenizers.from_file(path, **CASED)
    reference = library.SentencePieceProcessor(model_file=str(path))
    expected = reference.encode(lines)
    assert tokenizer.encode_batch(lines) == expected
    found = [tokenizer.encode_with_offsets(line)[0] for line in lines[:100]]
    assert found == expected[:100]
    assert tokenizer.special_ids == (size, 0, size + 1, size + 2, size + 3)
