"""What holds for all tokenizers, whatever their family and whether trained or given."""

import json
import pickle
import subprocess
import sys
from functools import partial
from itertools import chain

import numpy as np
import pytest
from stores import ENVIRONMENT, LINES, trained
from stores import UNCASED as SETTINGS

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers import TRAINERS
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.sentencepiece import SentencePiece
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError

KINDS = ("wordpiece", "unigram", "bpe")
NAMES = ("pad", "unk", "cls", "sep", "mask")
START = {"wordpiece": "", "unigram": "\u2581", "bpe": "\u2581"}  # of the first piece of a word

all_kinds = pytest.mark.parametrize("kind", KINDS)


@all_kinds
def test_training_gives_a_useful_vocabulary(kind):
    tokenizer = trained(kind)
    assert isinstance(tokenizer, WordPiece if kind == "wordpiece" else SentencePiece)
    assert tokenizer.vocab_size == len(tokenizer.vocab) == 1000
    assert tuple(tokenizer.vocab[:5]) == SPECIAL_TOKENS
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    assert [getattr(tokenizer, f"{name}_id") for name in NAMES] == [0, 1, 2, 3, 4]
    assert {START[kind] + "the", START[kind] + "return"} <= set(tokenizer.vocab)
    [ids] = tokenizer.encode_batch(["Return  the string."])
    assert tokenizer.decode(ids) == "return the string."
    assert tokenizer.decode([2, *ids, 3, 0]) == "[CLS] return the string. [SEP] [PAD]"


@all_kinds
def test_special_tokens_may_have_any_names_but_are_never_found_in_text(kind):
    names = ("<pad>", "unknown", "(", "##s", "mask")
    for special_tokens in (SPECIAL_TOKENS, names):
        settings = {**SETTINGS, "special_tokens": special_tokens}
        tokenizer = tokenizers.train(kind, LINES * 2, 1000, **settings)
        assert tuple(tokenizer.vocab[:5]) == special_tokens
        [ids] = tokenizer.encode_batch([f"{' '.join(special_tokens)} {''.join(special_tokens)}"])
        assert ids
        assert set(ids).isdisjoint({*tokenizer.special_ids} - {tokenizer.unk_id})


@all_kinds
def test_word_starts(kind):
    tokenizer = trained(kind)
    assert tokenizer.starts_word.dtype == bool
    assert tokenizer.starts_word[list(tokenizer.special_ids)].all()
    [ids] = tokenizer.encode_batch(["Formatting formatted formatters"])
    assert len(ids) > 3
    assert np.count_nonzero(tokenizer.starts_word[ids]) == 3


@all_kinds
def test_offsets_are_where_tokens_come_from(kind):
    line = "  Return\t the CAFE\u0301\u3000\ufb01le of 10 ㍿ cafés "
    ids, tokens, offsets = trained(kind).encode_with_offsets(line)
    assert [ids] == trained(kind).encode_batch([line])
    assert tokens == [trained(kind).vocab[i] for i in ids]
    words, begin = {}, 0
    for i, (start, end) in zip(ids, offsets, strict=True):
        begin = start if trained(kind).starts_word[i] else begin
        words[begin] = line[begin:end].removesuffix("\u0301")
    words = [word for word in words.values() if word]
    assert words == ["Return", "the", "CAFE", "\ufb01le", "of", "10", "㍿", "cafés"]


HOSTILE = {
    "NUL": "return\x00the",
    "zero-width joiner": "return\u200dthe",
    "lone combining marks": "\u0301\u0308 return \u0e31",
    "byte order mark inside": "\ufeffreturn \ufeffthe",
    "emoji": "return \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1f0\U0001f1f7",
    "long word": "a" * 50_000,
    "long line": "return the " * 5_000,
    "empty": "",
    "white space": " \t\u3000\u00a0\u2029 ",
    "line separator": "return\u2028the",
    "controls": "return\x7f\x80\x1b the\r",
    "lone surrogate": "return \ud800 the",
    "private use, unassigned": "return \ue000 the \U000e0fff return",
    "unused scripts": "सभी मनुष्यों 한국어 \u1112\u1161\u11ab 中文 日本語",
    "reserved by SentencePiece": "return \u2581 the \u2585 \u2047 \t return",
}


@all_kinds
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_lines_lose_no_text(kind, what):
    line = HOSTILE[what]
    ids, _, offsets = trained(kind).encode_with_offsets(line)
    assert [ids] == trained(kind).encode_batch([line])
    assert all(0 <= start <= end <= len(line) for start, end in offsets)
    assert offsets == sorted(offsets)
    covered = set(chain.from_iterable(range(start, end) for start, end in offsets))
    assert covered >= {
        i for i, character in enumerate(line) if character.isalnum() or character > "\U0001f000"
    }
    if what == "white space":
        assert ids == []


@all_kinds
def test_a_saved_tokenizer_loads_the_same(kind, tmp_path):
    saved = trained(kind)
    saved.save(tmp_path / "tokenizer")
    loaded = tokenizers.load(tmp_path / "tokenizer")
    assert type(loaded) is type(saved)
    assert (loaded.hash, loaded.vocab, loaded.settings) == (saved.hash, saved.vocab, saved.settings)
    assert loaded.encode_batch(LINES) == saved.encode_batch(LINES)
    assert {path.name for path in (tmp_path / "tokenizer").iterdir()} == {
        "vocab.txt" if kind == "wordpiece" else "spm.model",
        "tokenizer_config.json",
    }


@all_kinds
def test_hash_covers_all_that_ids_depend_on(kind, tmp_path):
    trained(kind).save(tmp_path)
    path = tmp_path / trained(kind).vocab_file
    other = tokenizers.train(kind, LINES, 900, **SETTINGS)
    hashes = {other.hash, *(trained(each).hash for each in KINDS)}
    for change in (
        {},  # the trained one, once more
        {"lower_case": False},
        {"strip_accents": False},
        {"special_tokens": [*SPECIAL_TOKENS[:2], *SPECIAL_TOKENS[:1:-1]]},
        {"max_word_chars": 100},
    ):
        hashes.add(tokenizers.from_file(path, **{**SETTINGS, **change}).hash)
    assert len(hashes) == 1 + len(KINDS) + (4 if kind == "wordpiece" else 3)


@all_kinds
def test_training_does_not_depend_on_how_text_is_cut_into_chunks(kind):
    hashes = {trained(kind).hash}
    for size in (10, 1000):
        trainer = TRAINERS[kind](kind, 1000, SETTINGS)
        for start in range(0, len(LINES), size):
            trainer.add(trainer.summarize(LINES[start : start + size]))
        hashes.add(trainer.finish().hash)
    assert len(hashes) == 1


@all_kinds
def test_what_workers_run_does_not_carry_what_was_added(kind):
    trainer = TRAINERS[kind](kind, 1000, SETTINGS)
    summary = trainer.summarize(LINES)
    trainer.add(summary)
    pickled = pickle.dumps(trainer.summarize)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)(LINES) == summary  # noqa: S301


def test_training_is_the_same_in_every_process_and_on_one_core():
    # Hash tables are seeded anew in each process; threads may add up in another order.
    program = (
        "import os, sys\n"
        "from stdlib_text import stdlib_documents\n"
        "documents = stdlib_documents()\n"  # which grow with what is imported
        "if sys.argv[1:] and hasattr(os, 'sched_setaffinity'):\n"
        "    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from stores import trained\n"
        f"print([trained(kind).hash for kind in {KINDS}])\n"
        "assert 'jax' not in sys.modules, 'workers would start slowly'"
    )
    for argument in ([], ["one core"]):
        command = [sys.executable, "-c", program, *argument]
        done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == str([trained(kind).hash for kind in KINDS])
        assert done.stderr == ""


@all_kinds
def test_vocab_size_below_the_alphabet_is_refused(kind):
    with pytest.raises(UserError, match=r"^data\.vocab_size: 20 is too small.* need \d+$") as error:
        tokenizers.train(kind, LINES, 20, **SETTINGS)
    needed = int(str(error.value).split()[-1])
    assert tokenizers.train(kind, LINES, needed, **SETTINGS).vocab_size == needed
    with pytest.raises(UserError, match="too small"):
        tokenizers.train(kind, LINES, needed - 1, **SETTINGS)


@all_kinds
def test_a_small_text_gives_a_small_vocabulary(kind):
    tokenizer = tokenizers.train(kind, ["it rains", "it rains in"], 1000, **SETTINGS)
    assert 5 < tokenizer.vocab_size < 400
    [ids] = tokenizer.encode_batch(["rains it"])
    assert tokenizer.decode(ids) == "rains it"


VALID = {"family": "wordpiece", "special_tokens": [*SPECIAL_TOKENS], **SETTINGS}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("\udcff", "not JSON"),
        ("[]", "list"),
        ("{}", "family is None; allowed: wordpiece, sentencepiece"),
        ({**VALID, "family": "bpe"}, "family is 'bpe'"),
        ({**VALID, "family": []}, r"family is \[\]"),
        ({"family": "wordpiece", "lower_case": True}, "found the settings lower_case; expected"),
        ({**VALID, "more": 1}, "found .* more; expected special_tokens, lower_case"),
        ({**VALID, "family": "sentencepiece"}, "found .* max_word_chars; expected"),
        ({**VALID, "lower_case": 1}, "lower_case is 1; allowed: true or false"),
        ({**VALID, "max_word_chars": True}, "max_word_chars is True; allowed: a number"),
        ({**VALID, "max_word_chars": 0}, "max_word_chars is 0"),
        *(
            ({**VALID, "special_tokens": names}, "special_tokens is .*; allowed: five")
            for names in ("abcde", [*"abcd"], [*"abcda"], [*"abcd", []], [*"abcd", ""])
        ),
    ],
)
def test_bad_settings_file_is_named(tmp_path, content, message):
    trained("wordpiece").save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.unlink()
    if content is not None:
        content = content if isinstance(content, str) else json.dumps(content)
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=rf"^{path}: .*{message}"):
        tokenizers.load(tmp_path)


@all_kinds
def test_missing_vocabulary_is_named(kind, tmp_path):
    trained(kind).save(tmp_path)
    path = tmp_path / trained(kind).vocab_file
    path.unlink()
    with pytest.raises(UserError, match=rf"^{path}: .*No such file"):
        tokenizers.load(tmp_path)


def test_name_of_the_file_tells_the_family(tmp_path):
    trained("wordpiece").save(tmp_path)
    trained("bpe").save(tmp_path)
    read = partial(tokenizers.from_file, **SETTINGS)
    assert read(tmp_path / "vocab.txt").hash == trained("wordpiece").hash
    assert read(str(tmp_path / "spm.model")).hash == trained("bpe").hash
    for path in (tmp_path / "vocab.model", tmp_path / "spm.txt"):
        (tmp_path / ("vocab.txt" if path.stem == "vocab" else "spm.model")).rename(path)
        with pytest.raises(UserError, match=rf"^{path}: "):
            read(path)


@pytest.mark.parametrize("family", tokenizers.FAMILIES.values())
def test_a_setting_that_no_tokenizer_has_is_refused(family):
    content = next(x for x in map(trained, TRAINERS) if type(x) is family).content
    given = {"lower_case": False, "strip_accents": False, "max_word_chars": 200}
    with pytest.raises(TypeError, match="lowercase"):
        family(family.parsed(content), **given, lowercase=True)
