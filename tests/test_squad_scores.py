"""The command `python -m electra_jax.score` and the scores behind it."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from electra_jax import score
from electra_jax.errors import UserError
from electra_jax.finetune.tasks.squad_scores import (
    best_threshold,
    f1,
    normalize,
    score_v1,
    score_v2,
)


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., dict]:
    def run(*arguments: object) -> dict:
        monkeypatch.setattr(sys, "argv", ["squad_metrics", *map(str, arguments)])
        score.main()
        return json.loads(capsys.readouterr().out)

    return run


def saved(path: Path, content: object) -> Path:
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def data(**answers: list[str]) -> dict:
    """A data set with questions that have these answers."""
    qas = [
        {"id": key, "question": "?", "answers": [{"text": x, "answer_start": 0} for x in texts]}
        for key, texts in answers.items()
    ]
    return {"data": [{"paragraphs": [{"context": "c", "qas": qas}]}]}


def test_scores_are_those_of_the_official_programs(run, shared_data):
    directory = shared_data / "squad" / "predictions"
    expected = json.loads((directory / "expected_metrics.json").read_text())
    assert len(expected) == 3
    for name, entry in expected.items():
        odds = directory / f"{name}.null_odds.json.gz"
        flags = [f"--null_odds={odds}"] if odds.exists() else []
        questions = shared_data / "squad" / entry["dataset"]
        found = run(questions, directory / f"{name}.json.gz", *flags)
        assert found.pop("missing_ids") == entry.get("missing_ids", 0)
        assert found.pop("unknown_ids") == entry.get("extra_ids", 0)
        assert found == pytest.approx(entry["metrics"], abs=1e-9)


def test_what_does_not_count():
    assert normalize(" The  cat's, A-hat!\u2019 ") == "cats ahat\u2019"
    assert normalize("a an the") == ""
    assert normalize("theory of an  anthem") == "theory of anthem"


def test_f1_counts_repeated_words():
    assert f1("x x y", "x x z") == pytest.approx(2 / 3)
    assert f1("x", "y") == f1("", "") == f1("x", "") == 0.0


def test_version_1_takes_the_best_answer_and_counts_missing_as_wrong():
    gold = {"1": ["x y", "The z"], "2": ["x y z"], "3": ["x"]}
    predicted = {"1": "z!", "2": "x w", "4": "x"}
    # Words of 2: one of two is right, one of three is found.
    assert score_v1(gold, predicted) == pytest.approx({"exact_match": 100 / 3, "f1": 140 / 3})
    assert score_v1({}, {}) == {"exact_match": 0.0, "f1": 0.0}


def test_version_2_asks_whether_there_is_an_answer():
    gold = {"1": ["x y"], "2": [], "3": [], "4": ["the"], "5": ["w"]}
    predicted = {"1": "x", "2": "", "3": "w", "4": "", "5": ""}
    found = score_v2(gold, predicted)
    # Of 4, whose answer is an article alone, "" is right; but it has one.
    all_five = {"exact": 40.0, "f1": 100 / 5 * (2 / 3 + 2), "total": 5}
    answered = {"exact": 100 / 3, "f1": 100 / 3 * (2 / 3 + 1), "total": 3}
    others = {"exact": 50.0, "f1": 50.0, "total": 2}
    for prefix, part in (("HasAns_", answered), ("NoAns_", others)):
        all_five |= {prefix + name: x for name, x in part.items()}
    assert found == pytest.approx(all_five)


def test_of_equal_odds_the_first_in_the_file_counts_first():
    """As the official program sorts, whatever the order of the questions."""
    gold, predicted = {"1": ["x"], "2": []}, {"1": "x", "2": "x"}
    for order, best, threshold in [("12", 100.0, -0.5), ("21", 50.0, -1.5)]:
        found = score_v2(gold, predicted, dict.fromkeys(order, -0.5))
        assert (found["best_exact"], found["best_exact_thresh"]) == (best, threshold)


def test_what_is_missing_is_wrong_whatever_its_odds():
    gold, odds = {"1": [], "2": ["x"]}, {"1": 5.0, "2": -5.0}
    assert score_v2(gold, {"2": "x"}, odds, 0.0)["exact"] == 50.0
    assert score_v2(gold, {"1": "x", "2": "x"}, odds, 0.0)["exact"] == 100.0


def test_answers_above_the_threshold_are_taken_back():
    gold, predicted = {"1": ["x"], "2": []}, {"1": "x", "2": "y"}
    odds = {"1": -3.0, "2": -2.0}
    for threshold, exact in [(-4.0, 50.0), (-3.0, 100.0), (-2.5, 100.0), (-2.0, 50.0)]:
        found = score_v2(gold, predicted, odds, threshold)
        assert found["exact"] == exact, threshold
        assert (found["best_exact"], found["best_exact_thresh"]) == (100.0, -3.0)


def test_the_best_threshold_is_the_best_of_all():
    gold = {str(i): ["x"] if i % 3 else [] for i in range(12)}
    predicted = {str(i): "x" if i % 4 else "y" for i in range(12)}
    odds = {str(i): float((5 * i) % 12) - 6 for i in range(12)}
    scores = {key: float(predicted[key] in gold[key]) for key in gold}
    best, threshold = best_threshold(gold, predicted, scores, odds)
    by_threshold = {x: score_v2(gold, predicted, odds, x)["exact"] for x in [*odds.values(), -99.0]}
    assert best == pytest.approx(max(by_threshold.values()))
    assert by_threshold[threshold] == pytest.approx(best)


def test_where_no_answer_is_best_the_threshold_is_below_all_odds():
    gold, predicted = {"1": [], "2": []}, {"1": "x", "2": "y"}
    for odds, threshold in [((-5.0, 3.0), -6.0), ((0.5, 0.9), 0.0)]:
        odds = dict(zip(gold, odds, strict=True))
        found = score_v2(gold, predicted, odds)
        assert (found["best_exact"], found["best_exact_thresh"]) == (100.0, threshold)
        assert score_v2(gold, predicted, odds, threshold)["exact"] == 100.0


def test_missing_and_unknown_ids_are_counted(run, tmp_path):
    questions = saved(tmp_path / "data.json.gz", data(a=["x"], b=[], c=["z"]))
    predictions = saved(tmp_path / "p.json.gz", {"a": "x", "d": "x"})
    found = run(questions, predictions)
    assert (found["missing_ids"], found["unknown_ids"]) == (2, 1)
    assert found["exact"] == pytest.approx(100 / 3)
    odds = saved(tmp_path / "o.json.gz", {"a": 3, "b": 0.5})
    assert run(questions, predictions, f"--null_odds={odds}")["exact"] == 0.0
    found = run(questions, predictions, f"--null_odds={odds}", "--null_threshold=3")
    assert found["exact"] == pytest.approx(100 / 3)
    answered = saved(tmp_path / "v2.json.gz", {"version": "v2.0", **data(a=["x"], b=["y"])})
    assert run(answered, predictions, f"--null_odds={odds}")["HasAns_total"] == 2
    answered = saved(tmp_path / "v1.json.gz", data(a=["x"]))
    expected = {"exact_match": 100.0, "f1": 100.0, "missing_ids": 0, "unknown_ids": 1}
    assert run(answered, predictions) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"DATA\.json is missing; give DATA\.json PREDICTIONS\.json"),
        (["{v1}"], r"PREDICTIONS\.json is missing"),
        (["{v1}", "{good}", "x"], "unexpected argument 'x'"),
        (["{v1}", "{good}", "--null_odd=1"], "no flag --null_odd; did you mean null_odds"),
        (["{v1}", "none.json"], "none.json: cannot be read: No such file"),
        (["{v1}", "{list}"], "list.json: found list; expected an object by question id"),
        (["{v1}", "{bad}"], "bad.json: 'a' is '3'; expected text"),
        (["{v1}", "{good}", "--null_odds={good}"], "all questions of .*v1.json have an answer"),
        (["{v2}", "{good}", "--null_odds={good}"], "good.json: 'a' is 'x'; expected a number"),
        (["{unlabeled}", "{good}"], "question 'a' has no answers; nothing to score"),
        (["{twice}", "{good}"], "twice.json: the id 'a' is there twice"),
        (["{good}", "{good}"], "good.json: data: found nothing; expected a list"),
    ],
)
def test_mistakes_are_named(run, tmp_path, arguments, message):
    unlabeled = data(a=["x"])
    del unlabeled["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    contents = {
        "v1": data(a=["x"]),
        "v2": data(a=[]),
        "unlabeled": unlabeled,
        "twice": {"data": 2 * data(a=["x"])["data"]},
        "good": {"a": "x"},
        "bad": {"a": 3},
        "list": ["x"],
    }
    paths = {}
    for name, content in contents.items():
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        run(*[argument.format(**paths) for argument in arguments])
