"""Question answering: windows, spans of characters, and what becomes of the network's outputs.

What all tasks have in common is in test_tasks.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_tfds
from tiny_tasks import CLS, SEP, document, oracle, saved

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.finetune.tasks import squad_spans
from electra_jax.finetune.tasks.squad import SquadTask
from electra_jax.finetune.tasks.squad_files import Answer, Example, read_squad
from electra_jax.finetune.tasks.squad_scores import normalize

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?ﬁ\uff11\uff41语文अनमसतको👩שלו"
TOKENIZER = WordPiece(
    [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS)],
    lower_case=True,
    strip_accents=True,
    max_word_chars=200,
)


def task(unanswerable: bool = False, log=print, style: str = "original", **options) -> SquadTask:
    settings = SquadTask.Settings(unanswerable=unanswerable, **options)
    return SquadTask("squad", settings, style, log)


def example(context: str, *answers: str, key: str = "q", question: str = "a?") -> Example:
    found = tuple(Answer(text, context.index(text)) for text in answers)
    return Example(key, question, context, found)


def independent(features: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """Random outputs of a head with independent ends."""
    rng = np.random.default_rng(seed)
    shape = features["input_ids"].shape
    return {
        name: rng.normal(size=shape).astype(np.float32) for name in ("start_logits", "end_logits")
    }


def joint(starts: list, scores: list, ends: list, null: list) -> dict[str, np.ndarray]:
    """Outputs of a joint head: starts and their scores [N, K], ends [N, K, K] of equal scores."""
    return {
        "start_top": np.array(starts, np.int32),
        "start_log_prob": np.array(scores, np.float32),
        "end_top": np.array(ends, np.int32),
        "end_log_prob": np.zeros(np.shape(ends), np.float32),
        "null_logit": np.array(null, np.float32),
    }


# Features


def test_a_row_is_question_and_window():
    found = example("a b c d e f", "c d", question="x " * 70)
    long = task().features([found], TOKENIZER, 80, training=True)
    assert (long["input_ids"][0] == SEP).nonzero()[0].tolist() == [65, 72]

    found = example("a b c d e f", "c d", question="x y")
    rows = task(doc_stride=2).features([found], TOKENIZER, 9, training=False)
    words = TOKENIZER.encode_batch(["x y", "a b c d e f"])
    parts = [words[1][begin : begin + 4] for begin in (0, 2)]
    assert rows["input_ids"].tolist() == [[CLS, *words[0], SEP, *part, SEP] for part in parts]
    assert rows["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2
    assert rows["allowed"].tolist() == [[1, 0, 0, 0, 1, 1, 1, 1, 1]] * 2
    assert rows["start"].tolist() == [6, 4]
    assert rows["end"].tolist() == [7, 5]
    assert rows["char_start"][:, 3:].tolist() == [[-1, 0, 2, 4, 6, -1], [-1, 4, 6, 8, 10, -1]]
    assert rows["char_start"][:, :3].max() == -1
    assert rows["max_context"].tolist() == [4 * [0] + [1, 1, 1, 0, 0], 5 * [0] + [1, 1, 1, 0]]
    assert all(array.dtype == np.int32 for array in rows.values())


def test_targets_of_windows_without_the_answer():
    found = [example("a b c d e f", "a", question="x y"), Example("n", "x y", "a", ())]
    for answerability, expected in (("window", [0, 1, 1]), ("question", [0, 0, 1])):
        made = task(True, doc_stride=2, answerability=answerability)
        rows = made.features(found, TOKENIZER, 9, training=True)
        assert rows["example"].tolist() == [0, 0, 1]
        assert rows["start"].tolist() == rows["end"].tolist() == [4, 0, 0]
        assert rows["is_impossible"].tolist() == expected
        assert "char_start" not in rows
    crossing = [example("a b c d e f", "d e", question="x y")]
    rows = task(doc_stride=2).features(crossing, TOKENIZER, 9, training=True)
    assert list(zip(rows["start"], rows["end"], strict=True)) == [(0, 0), (5, 6)]


def test_answers_that_are_not_where_they_should_be():
    context = "to be or not to be"
    log: list[str] = []
    made = task(log=log.append)
    for start, place in [(13, 13), (12, 13), (99, 13), (2, 0), (-5, 0), (0, 0)]:
        found = Example("q", "a", context, (Answer("to", start),))
        rows = made.features([found], TOKENIZER, 40, training=False)
        assert rows["char_start"][0, rows["start"][0]] == place, start
    first = Example("1", "a", context, (Answer("two", 0), Answer("be", 3), Answer("or", 6)))
    lost = Example("2", "a", context, (Answer("two", 0), Answer("", 0), Answer("\x00", 2)))
    rows = made.features([lost, first, lost], TOKENIZER, 40, training=True)
    assert rows["example"].tolist() == [1]
    assert rows["start"][0] == 5
    assert log == ["left out: 2 questions whose answers are not in their contexts"]
    rows = made.features([lost, first, lost], TOKENIZER, 40, training=False)
    assert rows["example"].tolist() == [0, 1, 2]
    assert rows["start"].tolist() == [0, 5, 0]


def test_no_room_for_the_context_is_an_error():
    with pytest.raises(UserError, match=r"max_length is 60; .* greater than 67"):
        task().features([example("a", "a", question="x " * 99)], TOKENIZER, 60, training=True)


def test_contexts_without_tokens_are_answered():
    contexts = ("", " \x00\n", "\u3000", "\u200d", "\ufeff", "\u0301")
    found = [Example("q", "a?", text, ()) for text in contexts]
    made = task(True)
    rows = made.features(found, TOKENIZER, 9, training=False)
    assert len(rows["example"]) == len(contexts)
    for outputs in (oracle(rows), independent(rows)):
        predictions = made.predict(found, rows, outputs)
        assert [(guess.text, guess.n_best) for guess in predictions] == [("", ())] * 6
        json.dumps([guess.null_odds for guess in predictions], allow_nan=False)


# Answers


CONTEXTS = {
    "spaces": ("one  two \t three", "one  two"),
    "lines": ("one\r\ntwo\r\n\r\nthree", "two\r\n\r\nthree"),
    "ligature": ("a ﬁne line", "ﬁne"),
    "full width": ("in \uff11\uff11 \uff41\uff41 to", "\uff11\uff11 \uff41\uff41"),
    "accents": ("at a Café\u0301 de\u0301ja\u0300 vu\u0308", "de\u0301ja\u0300 vu\u0308"),
    "composed": ("Ça été là", "été là"),
    "emoji": ("a 👩\u200d👩\ufe0f b", "👩\u200d👩\ufe0f"),
    "right to left": ("a שלו\u05b9 b", "שלו\u05b9"),
    "no spaces": ("语文语文。文", "文语"),
    "vowel signs": ("नमस् नो", "नमस् नो"),
    "removed": ("a\x00b\u200b c\ufffdd", "b\u200b c\ufffdd"),
    "around": (" \n a lead \n", "a lead"),
    "unknown": ("a 日本 ☃☃ b", "日本 ☃☃"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_answers_are_ranges_of_the_context_exactly(name):
    context, answer = CONTEXTS[name]
    found = example(context, answer)
    made = task()
    rows = made.features([found], TOKENIZER, 64, training=False)
    [guess] = made.predict([found], rows, oracle(rows))
    assert guess.text == answer
    [guess] = made.predict([found], rows, independent(rows))
    assert len(guess.n_best) > 1
    assert all(span.text == context[span.start : span.end] for span in guess.n_best)


def test_answers_by_sentencepiece_are_ranges_of_the_context_without_space_around():
    lines = [context for context, _ in CONTEXTS.values()]
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
    tokenizer = tokenizers.train("unigram", lines, 400, **settings)
    for context, answer in CONTEXTS.values():
        found = example(context, answer)
        rows = task().features([found], tokenizer, 64, training=False)
        for outputs in (oracle(rows), independent(rows)):
            [guess] = task().predict([found], rows, outputs)
            for span in guess.n_best:
                assert span.text == context[span.start : span.end] == span.text.strip()


def test_spaces_that_belong_to_tokens_are_no_part_of_answers():
    found = [example("a b c", "b")]
    rows = task().features(found, TOKENIZER, 12, training=False)
    rows["char_start"][rows["char_start"] == 2] = 1
    rows["char_end"][rows["char_end"] == 3] = 4
    [guess] = task().predict(found, rows, oracle(rows))
    assert [(span.text, span.start, span.end) for span in guess.n_best] == [("b", 2, 3)]


@pytest.mark.parametrize("stride", [3, 128])
def test_independent_ends_give_the_best_of_all_spans(stride):
    """Against every pair of tokens, on random logits and several windows."""
    context = "a b  c d a b c d e f g"
    found = [example(context, "a", key=str(i), question="x " * (i + 1)) for i in range(6)]
    made = task(True, doc_stride=stride, max_answer_length=3, null_threshold=0.0)
    rows = made.features(found, TOKENIZER, 18, training=False)
    outputs = independent(rows, seed=1)
    predictions = made.predict(found, rows, outputs)
    for index, guess in enumerate(predictions):
        best: dict[str, float] = {}
        null = np.inf
        for row in np.flatnonzero(rows["example"] == index):
            null = min(null, outputs["start_logits"][row, 0] + outputs["end_logits"][row, 0])
            for start in np.flatnonzero(rows["max_context"][row]):
                for end in range(start, min(start + 3, 18)):
                    if rows["char_end"][row, end] > 0:
                        text = context[rows["char_start"][row, start] : rows["char_end"][row, end]]
                        logits = (
                            outputs["start_logits"][row, start],
                            outputs["end_logits"][row, end],
                        )
                        best[text] = max(best.get(text, -np.inf), sum(logits))
        expected = sorted(best.items(), key=lambda item: -item[1])[: squad_spans.N_BEST]
        assert [span.text for span in guess.n_best] == [text for text, _ in expected]
        scores = [score for _, score in expected]
        assert [span.score for span in guess.n_best] == pytest.approx(scores)
        shares = np.exp(scores) / np.exp(scores).sum()
        assert [span.probability for span in guess.n_best] == pytest.approx(shares)
        assert guess.null_odds == pytest.approx(null - scores[0])
        assert guess.text == ("" if guess.null_odds > 0 else expected[0][0])


def test_the_joint_head_proposes_and_the_rest_is_ruled_out():
    found = [example("a b c a b", "a", question="x")]
    made = task(max_answer_length=2)
    rows = made.features(found, TOKENIZER, 12, training=False)  # [CLS] x [SEP] a b c a b [SEP]
    ends = [[0, 3, 4], [3, 4, 5], [3, 4, 5], [8, 9, 10]]
    outputs = joint([[0, 3, 4, 8]], [np.log([0.4, 0.3, 0.2, 0.1])], [ends], [5.0])
    outputs["end_log_prob"] = np.log(np.array([[[0.6, 0.3, 0.1]] * 4], np.float32))
    [guess] = made.predict(found, rows, outputs)
    assert [(span.text, span.start, span.end) for span in guess.n_best] == [
        ("a", 0, 1),  # 0.18
        ("a b", 0, 3),  # 0.09; start 3 to 5 is too long, start 4 to 3 ends before it starts
        ("b", 2, 3),  # 0.06
        ("b c", 2, 5),  # 0.02
    ]
    scores = np.array([0.18, 0.09, 0.06, 0.02])
    assert [span.probability for span in guess.n_best] == pytest.approx(scores / scores.sum())
    assert guess.text == "a"
    assert guess.null_odds == 0.0  # There is always an answer.


def test_a_text_counts_once_at_its_best_place_over_all_windows():
    found = [example("a b c d a f", "a", question="x y")]
    made = task(doc_stride=2)
    rows = made.features(found, TOKENIZER, 9, training=False)
    outputs = joint([[4], [6]], [[-2.0], [-1.0]], [[[4]], [[6]]], [3.0, -1.0])
    [guess] = made.predict(found, rows, outputs)
    assert [(span.text, span.start, span.score) for span in guess.n_best] == [("a", 8, -1.0)]
    [guess] = task(True, doc_stride=2).predict(found, rows, outputs)
    assert (guess.null_odds, guess.text) == (-1.0, "")  # above -2.75
    [guess] = task(True, doc_stride=2, null_threshold=-1.0).predict(found, rows, outputs)
    assert guess.text == "a"


def test_answers_start_in_the_window_that_shows_most_around_them():
    found = [example("a b c d e f", "a", question="x y")]
    made = task(doc_stride=2)
    rows = made.features(found, TOKENIZER, 9, training=False)
    # d in both windows; it is the second's.
    outputs = joint([[7], [5]], [[-1.0], [-2.0]], [[[7]], [[5]]], [0.0, 0.0])
    [guess] = made.predict(found, rows, outputs)
    assert [(span.text, span.score) for span in guess.n_best] == [("d", -2.0)]


def test_no_answer_is_scored_and_written(tmp_path):
    context = "a b c"
    answers = {"1": ("b",), "2": (), "3": ("c",)}
    found = [example(context, *texts, key=key) for key, texts in answers.items()]
    made = task(True, null_threshold=0.0)
    rows = made.features(found, TOKENIZER, 12, training=False)
    outputs = oracle(rows)
    outputs["null_logit"] = np.array([-2.0, -1.0, 3.0], np.float32)
    outputs["start_top"][1], outputs["end_top"][1] = outputs["start_top"][0], outputs["end_top"][0]
    predictions = made.predict(found, rows, outputs)
    scores = made.score(found, predictions)
    assert scores["exact"] == scores["f1"] == pytest.approx(100 / 3)
    assert scores["best_exact"] == pytest.approx(200 / 3)
    assert scores["best_exact_thresh"] == -2.0
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (2, 1)
    paths = made.write(predictions, tmp_path, "dev")
    texts, n_best, odds = (json.loads(path.read_text()) for path in paths)
    assert texts == {"1": "b", "2": "b", "3": ""}
    assert odds == {"1": -2.0, "2": -1.0, "3": 3.0}
    assert n_best["3"] == [{"text": "c", "start": 4, "end": 5, "score": 0.0, "probability": 1.0}]


# Files


def test_impossible_questions_have_no_answers(tmp_path):
    _, [found] = read_squad(saved(tmp_path / "a.json", document(is_impossible=True)))
    assert found.answers == ()


def test_the_default_threshold_is_that_of_the_head():
    assert task().null_threshold == -2.75
    assert task(style="huggingface").null_threshold == 0
    assert task(null_threshold=1.0).null_threshold == 1


def test_tensorflow_data_sets_hold_the_same(tmp_path, monkeypatch):
    tiny_tfds.make(tmp_path, tiny_tfds.TinySquad)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    made = task(True, dev="tfds:tiny_squad")
    assert made.eval_splits == ("dev",)
    assert sorted(made.read("dev"), key=lambda x: x.id) == [
        Example("0", "who?", "naïve b", (Answer("naïve", 0), Answer("b", 6))),
        Example("1", "who?", "naïve b", ()),
    ]


def test_real_files_are_read_whole(shared_data):
    counts = {"squad/dev-v2.0": 11873, "xquad/xquad.hi": 1190, "cmrc2018/cmrc2018_dev": 3219}
    for name, count in counts.items():
        made = task(name.endswith("2.0"), dev=f"{shared_data / name}.json.gz")
        assert len(made.read("dev")) == count
        assert made.eval_splits == ("dev",)


# The whole way, on real data: knowing the answers, nothing is lost on the way to the text


def answered(shared_data: Path, name: str, vocab: str, every: int, limit: int) -> list[str]:
    """The answers that do not come back: neither they nor any other right one."""
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
    tokenizer = tokenizers.from_file(shared_data / "vocab" / f"{vocab}.vocab.txt", **settings)
    path = str(shared_data / f"{name}.json.gz")
    made = task(name.endswith("2.0"), dev=path, max_answer_length=limit)
    found = made.read("dev")[::every]
    rows = made.features(found, tokenizer, 384, training=False)
    predictions = made.predict(found, rows, oracle(rows))
    lost = []
    for one, guess in zip(found, predictions, strict=True):
        assert all(one.context[x.start : x.end] == x.text for x in guess.n_best)
        right = {normalize(answer.text) for answer in one.answers} or {""}
        if normalize(guess.text) not in right:
            lost.append(one.answers[0].text)
    scores = made.score(found, predictions)
    exact = scores.get("exact_match", scores.get("exact"))
    assert exact == pytest.approx(100 - 100 * len(lost) / len(found))
    return lost


def test_known_answers_come_back(shared_data):
    uncased = "bert-base-uncased"
    assert answered(shared_data, "xquad/xquad.en", uncased, 2, 30) == []
    assert answered(shared_data, "xquad/xquad.zh", "bert-base-chinese", 5, 1000) == []
    assert answered(shared_data, "xquad/xquad.ru", uncased, 9, 1000) == []


@pytest.mark.slow
def test_known_answers_come_back_but_for_these(shared_data):
    """Lost: more than 30 tokens, or an answer that begins or ends inside a token."""
    uncased = "bert-base-uncased"
    for name, vocab, limit, count in [
        ("squad/dev-v1.1", uncased, 30, 27),  # 9 of them too long, 18 inside a token
        ("squad/dev-v1.1", uncased, 1000, 18),
        ("squad/dev-v2.0", uncased, 30, 11),
        ("xquad/xquad.en", uncased, 30, 1),
        ("xquad/xquad.ru", uncased, 1000, 0),
        ("xquad/xquad.hi", uncased, 1000, 4),
        ("xquad/xquad.zh", "bert-base-chinese", 1000, 0),
        ("cmrc2018/cmrc2018_dev", "bert-base-chinese", 1000, 1),
    ]:
        assert len(answered(shared_data, name, vocab, 1, limit)) == count, name
