"""The command `python -m electra_jax.tokenize`."""

import io
import json
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stores import ENVIRONMENT, trained
from test_sentencepiece import model

from electra_jax import cli, tokenize
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.errors import UserError

pytestmark = pytest.mark.process

VOCAB = [*SPECIAL_TOKENS, "it", "It", "rain", "##s", "é", "<", ">", "pad", "\u2028"]


@pytest.fixture
def vocab(tmp_path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in VOCAB), encoding="utf-8", newline="")
    return path


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., list[dict]]:
    """Runs the command on some bytes; returns what it printed."""

    def run(text: bytes, *arguments: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["tokenizer", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "ascii"))
        tokenize.main()
        out = capsys.readouterr().out
        assert out.isascii()
        return [json.loads(line) for line in out.splitlines()]

    return run


def test_each_line_gives_one_object(run, vocab):
    text = "It rains\r\n\n  It\u2028it\x0b\x85é \rrain\n\r\nrains".encode()
    expected = [
        ([6, 7, 8], ["It", "rain", "##s"], [[0, 2], [3, 7], [7, 8]]),
        ([], [], []),
        # \v and U+0085 are dropped as control characters, U+2028 splits, \r is white space
        ([6, 1, 7], ["It", "[UNK]", "rain"], [[2, 4], [5, 10], [12, 16]]),
        ([], [], []),
        ([7, 8], ["rain", "##s"], [[0, 4], [4, 5]]),
    ]
    names = ("ids", "tokens", "offsets")
    found = run(text, f"--vocab={vocab}")
    assert found == [dict(zip(names, answer, strict=True)) for answer in expected]
    assert run(b"", f"--vocab={vocab}") == []


def test_special_tokens_are_kept_on_request_only(run, vocab):
    text, flags = b"It [MASK]rains", [f"--vocab={vocab}", "--keep_special_tokens"]
    [found] = run(text, *flags)
    assert found["ids"] == [6, 4, 7, 8]
    assert found["tokens"] == ["It", "[MASK]", "rain", "##s"]
    assert found["offsets"] == [[0, 2], [3, 9], [9, 13], [13, 14]]
    [without] = run(text, flags[0])
    assert 4 not in without["ids"]


def test_carriage_returns_before_newlines_do_not_count(run, tmp_path):
    # A model that keeps what others call white space.
    path = tmp_path / "spm.model"
    options = {"vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "identity"}
    path.write_bytes(model(**options))
    found, expected, kept = run(b"the\r\nthe\nthe\r\r\n", f"--vocab={path}")
    assert found == expected
    assert kept["tokens"] == [*expected["tokens"], "<0x0D>"]


def test_settings_of_a_file_are_flags(run, vocab):
    [[cased], [uncased], [short]] = [
        run("It raiNs É".encode(), f"--vocab={vocab}", *flags)
        for flags in (
            [],
            ["--lower_case", "--special_tokens=[PAD],[UNK],[CLS],[MASK],[SEP]"],
            ["--lower_case", "--max_word_chars=4"],
        )
    ]
    assert cased["tokens"] == ["It", "[UNK]", "[UNK]"]
    assert uncased["tokens"] == ["it", "rain", "##s", "é"]
    assert short["tokens"] == ["it", "[UNK]", "é"]
    [named] = run(b"<pad>", f"--vocab={vocab}", "--special_tokens=[PAD],pad,[CLS],[SEP],[MASK]")
    assert named["tokens"] == ["<", "pad", ">"]
    assert run(b"a" * 201, f"--vocab={vocab}") == run(b"z" * 201, f"--vocab={vocab}")


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_saved_tokenizer_brings_its_settings(run, tmp_path, kind):
    trained(kind).save(tmp_path / "saved")
    line = "Return the CAFÉ \U0001f600"
    [found] = run(line.encode(), f"--vocab={tmp_path / 'saved'}")
    assert tuple(found.values())[:2] == trained(kind).encode_with_offsets(line)[:2]
    with pytest.raises(UserError, match=r"^--lower_case is given, but .*saved has settings of its"):
        run(b"", f"--vocab={tmp_path / 'saved'}", "--lower_case")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (b"", [], "--vocab is missing"),
        (b"", ["--vocab=none.txt"], "none.txt: cannot be read: No such file"),
        (b"", ["--vocab=none.model"], "none.model: cannot be read: No such file"),
        (b"", ["--vocab=."], r"tokenizer_config\.json: .*No such file"),
        (b"", ["--vocab={vocab}", "--strip_accents"], "--strip_accents .* only .* --lower_case"),
        (b"", ["--vocab={vocab}", "--max_word_chars=0"], "--max_word_chars is 0; allowed: a num"),
        (b"", ["--vocab={vocab}", "--special_tokens=a,b"], "--special_tokens is .*; allowed: five"),
        (b"", ["--vocab=x.model", "--max_word_chars=9"], "--max_word_chars .* x.model"),
        (b"", ["--vocab={vocab}", "--lowercase"], "no flag --lowercase; did you mean lower_case"),
        (b"it\n\n\xff\n", ["--vocab={vocab}"], "standard input: line 3 is not UTF-8 at byte 0"),
        (b"it \xed\xa0\x80", ["--vocab={vocab}"], "standard input: line 1 is not UTF-8 at byte 3"),
    ],
)
def test_mistakes_are_named(run, vocab, tmp_path, monkeypatch, text, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        run(text, *[argument.format(vocab=vocab) for argument in arguments])


def test_lines_are_answered_at_once_and_a_closed_pipe_is_no_error(vocab):
    command = [sys.executable, "-m", "electra_jax.tokenize", f"--vocab={vocab}"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        for line, ids in ((b"It rains\n", [6, 7, 8]), (b"it\n", [5])):
            process.stdin.write(line)
            process.stdin.flush()
            answered, _, _ = select.select([process.stdout], [], [], 60)
            assert answered
            assert json.loads(process.stdout.readline())["ids"] == ids
        process.stdout.close()
        process.stdin.write(b"it\n")
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait() == cli.NO_READER
