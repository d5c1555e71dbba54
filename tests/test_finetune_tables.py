import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.finetune.sentences import Example, Prediction
from electra_jax.finetune.tables import TableTask, read_table

TOKENIZER = WordPiece(
    [*SPECIAL_TOKENS, "a", "b"], lower_case=True, strip_accents=True, max_word_chars=200
)


def saved(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_csv_may_hold_anything_in_quotes(tmp_path):
    text = '\ufeffid,text,label\r\n1,"a, ""b""\r\n\tc\n",x\r\n\r\n2,d "e" f,"y z"\r\n3,,x'
    path = saved(tmp_path / "t.csv", text)
    assert list(read_table(path)) == [
        (2, {"id": "1", "text": 'a, "b"\r\n\tc\n', "label": "x"}),
        (6, {"id": "2", "text": 'd "e" f', "label": "y z"}),
        (7, {"id": "3", "text": "", "label": "x"}),
    ]
    long = "a" * 300_000
    path = saved(tmp_path / "long.csv.gz", gzip.compress(f"text\n{long}\n".encode()))
    assert list(read_table(path)) == [(2, {"text": long})]


def test_quotes_in_tsv_are_characters(tmp_path):
    path = saved(tmp_path / "t.tsv", '\ufefftext\tlabel\n"a\tx\n"b" c\ty\n\tx\n')
    assert [values["text"] for _, values in read_table(path)] == ['"a', '"b" c', ""]


def test_an_empty_line_is_a_row_where_there_is_but_one_column(tmp_path):
    path = saved(tmp_path / "t.tsv", "text\na\n\nb\n\n")
    assert [values["text"] for _, values in read_table(path)] == ["a", "", "b", ""]
    path = saved(tmp_path / "two.tsv", "text\tlabel\na\tx\n\nb\ty\n\n")
    assert [line for line, _ in read_table(path)] == [2, 4]


def test_every_format_gives_the_same_examples(tmp_path):
    rows = [("a\u2028b", 'q "c"', 1), ("d", "", 0)]
    records = [dict(zip(("one", "two", "label"), row, strict=True)) for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "t.parquet")
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    paths = [
        saved(tmp_path / "t.csv", 'one,two,label\na\u2028b,"q ""c""",1\nd,,0\n'),
        saved(tmp_path / "t.tsv", 'one\ttwo\tlabel\na\u2028b\tq "c"\t1\nd\t\t0\n'),
        saved(tmp_path / "t.jsonl", lines),
        saved(tmp_path / "u.JSONL.gz", gzip.compress(lines.encode())),
        str(tmp_path / "t.parquet"),
    ]
    for path in paths:
        task = TableTask({"train": path}, "classification", ("one", "two"), "label")
        assert task.read("train") == [
            Example("0", "a\u2028b", 'q "c"', "1"),
            Example("1", "d", "", "0"),
        ]
        assert task.head.labels == ("0", "1")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", 'text,label\n"a\nb",x\nc\n', r"t\.csv, line 4: 1 fields; .* 2 columns: text, l"),
        ("t.csv", 'text,label\na,x\n"b,y\n', r"t\.csv, line 3: not CSV: unexpected end of data"),
        ("t.csv", 'text,label\n"a"b,y\n', r"line 2: not CSV: "),
        ("t.csv", "text,text\na,x\n", r"line 1: found the column 'text' twice"),
        ("t.csv", "", r"line 1: found nothing"),
        ("t.csv", "text,label\na,x\nb,\n", r"line 3: label is ''; allowed: the name of a label"),
        ("t.csv", "words,label\na,x\nb,y\n", r"line 2: there is no column 'text'; found words, l"),
        ("t.tsv", "text\tlabel\na\tx\nb\ty\tz\n", r"line 3: 3 fields"),
        ("t.jsonl", '{"text": "a", "label": "x"}\n{"text"\n', r"line 2: not JSON"),
        ("t.jsonl", '{"text": "a", "label": "x"}\n[1]\n', r"line 2: not a JSON object but list"),
        (
            "t.jsonl",
            '{"text": "a", "label": "x"}\n\n{"text": "a"}\n',
            r"line 3: there is no column",
        ),
        ("t.jsonl", '{"text": "a", "label": 0.5}\n', r"line 1: label is 0.5; allowed: the name"),
        ("t.jsonl", '{"text": 3, "label": "x"}\n{"text": "", "label": "y"}', r"line 1: text is 3;"),
        ("t.csv", "text,label\na,x\nb,x\n", r"t\.csv: the labels in label are \['x'\]; at least"),
        ("t.xlsx", "", r"t\.xlsx: not known as a table; allowed: \.csv, \.tsv"),
        ("t.parquet", "PAR1", r"t\.parquet: cannot be read"),
    ],
)
def test_mistakes_are_named_by_line(tmp_path, name, text, message):
    path = saved(tmp_path / name, text)
    with pytest.raises(UserError, match=message):
        TableTask({"train": path}, "classification", ("text",), "label").read("train")


def test_labels_are_those_of_the_training_table(tmp_path):
    files = {
        "train": saved(tmp_path / "train.csv", "text,label\na,no\nb,yes\n"),
        "dev": saved(tmp_path / "dev.csv", "text,label\na,yes\nb,maybe\n"),
        "new": saved(tmp_path / "new.csv", "text\na\n"),
    }
    task = TableTask(files, "classification", ("text",), "label")
    assert (task.eval_splits, task.test_splits) == (("dev",), ("new",))
    with pytest.raises(UserError, match=r"dev\.csv, line 3: label 'maybe' is not .*: no, yes$"):
        task.read("dev")
    examples = task.read("new")
    rows = task.features(examples, TOKENIZER, 8, training=False)
    assert "label" not in rows
    predictions = task.predict(examples, rows, {"logits": np.array([[1, 0]], np.float32)})
    assert predictions[0].label == "no"
    assert task.score(examples, predictions) == {}
    # A saved model knows its labels: no training table is needed to predict.
    alone = TableTask(
        {"new": files["new"]}, "classification", ("text",), "label", labels=("yes", "no")
    )
    assert alone.head.labels == ("yes", "no")
    with pytest.raises(UserError, match="there is no train table"):
        TableTask({"new": files["new"]}, "classification", ("text",), "label")
    with pytest.raises(UserError, match="no split 'test'; allowed: train, dev, new"):
        task.read("test")


@pytest.mark.parametrize("lines", [("a", "b,x"), ("a,x", "b")])
def test_a_table_is_labelled_as_a_whole(tmp_path, lines):
    records = [dict(zip(("text", "label"), line.split(","), strict=False)) for line in lines]
    files = {
        "train": saved(tmp_path / "train.csv", "text,label\na,x\nb,y\n"),
        "dev": saved(tmp_path / "dev.jsonl", "\n".join(map(json.dumps, records))),
    }
    task = TableTask(files, "classification", ("text",), "label")
    with pytest.raises(UserError, match=r"dev\.jsonl, line [12]: there is no column 'label'"):
        task.read("dev")


@pytest.mark.parametrize(
    ("kind", "labels", "floor"),
    [
        ("classification", ["x", "y", "y"], 2 / 3),
        ("regression", [1.0, 2.0, 2.0], 0.0),
        # ("x", "y") to all: of 6 names 5 are there, and none other.
        ("multilabel", [["x", "y"], ["x", "y"], ["x"]], 2 * 5 / (6 + 5)),
        ("multilabel", [["x"], [], []], 2 * 1 / (3 + 1)),
    ],
)
def test_the_floor_is_the_score_of_the_best_constant_answer(tmp_path, kind, labels, floor):
    records = [json.dumps({"text": "a", "label": label}) for label in labels]
    files = dict.fromkeys(("train", "dev"), saved(tmp_path / "t.jsonl", "\n".join(records)))
    task = TableTask(files, kind, ("text",), "label")
    assert task.floor(task.read("dev")) == pytest.approx(floor)


def test_several_labels(tmp_path):
    files = {
        "train": saved(tmp_path / "train.csv", 'text,topics\na,"x, y"\nb,\na b,z\n'),
        "dev": saved(
            tmp_path / "dev.jsonl",
            '{"text": "a", "topics": ["z", "x"]}\n{"text": "b", "topics": []}\n',
        ),
    }
    task = TableTask(files, "multilabel", ("text",), "topics")
    assert task.head.labels == ("x", "y", "z")
    assert [example.label for example in task.read("train")] == [("x", "y"), (), ("z",)]
    examples = task.read("dev")
    rows = task.features(examples, TOKENIZER, 8, training=False)
    assert rows["label"].dtype == np.float32
    assert rows["label"].tolist() == [[1, 0, 1], [0, 0, 0]]
    logits = np.array([[0.1, -1, -1], [-1, -1, -0.1]], np.float32)
    predictions = task.predict(examples, rows, {"logits": logits})
    assert [guess.label for guess in predictions] == [("x",), ()]
    assert predictions[0].probabilities[0] == pytest.approx(1 / (1 + np.exp(-0.1)))
    # Of the three labels, x is right, y is never there, z is missed.
    expected = {"micro_f1": 2 / 3, "macro_f1": 1 / 3, "accuracy": 0.5}
    assert task.score(examples, predictions) == pytest.approx(expected)
    [path] = task.write(predictions, tmp_path / "out", "dev")
    record = json.loads(path.read_text().splitlines()[0])
    assert record["label"] == ["x"]
    assert [*record["probabilities"]] == ["x", "y", "z"]
    semicolons = {"train": saved(tmp_path / "s.csv", "text,topics\na,x;y\n")}
    task = TableTask(semicolons, "multilabel", ("text",), "topics", separator=";")
    assert task.head.labels == ("x", "y")


def test_numbers(tmp_path):
    files = {
        "train": saved(tmp_path / "train.csv", "text,price\na,-10\nb,30\na,0\n"),
        "dev": saved(tmp_path / "dev.csv", "text,price\na,0\nb,40\n"),
        "bad": saved(tmp_path / "bad.csv", "text,price\na,1\nb,high\n"),
        "huge": saved(tmp_path / "huge.jsonl", f'{{"text": "a", "price": 1{400 * "0"}}}'),
    }
    task = TableTask(files, "regression", ("text",), "price")
    assert task.value_range == (-10.0, 30.0)
    train = task.features(task.read("train"), TOKENIZER, 8, training=True)
    assert train["label"].tolist() == [0.0, 1.0, 0.25]
    examples = task.read("dev")
    rows = task.features(examples, TOKENIZER, 8, training=False)
    predictions = task.predict(examples, rows, {"logits": np.array([0.25, 1.0], np.float32)})
    assert predictions == [Prediction("0", 0.0, ()), Prediction("1", 30.0, ())]
    assert task.score(examples, predictions) == {"spearman": 1.0, "pearson": 1.0, "mse": 50.0}
    with pytest.raises(UserError, match=r"bad\.csv, line 3: price is 'high'; allowed: a number"):
        task.read("bad")
    with pytest.raises(UserError, match=r"huge\.jsonl, line 1: price is 10*; allowed: a number"):
        task.read("huge")
    known = TableTask(files, "regression", ("text",), "price", value_range=(0.0, 100.0))
    assert known.features(examples, TOKENIZER, 8, training=False)["label"][1] == np.float32(0.4)


def test_arguments_that_do_not_suit(tmp_path):
    with pytest.raises(UserError, match="kind is 'ranking'; allowed: classification, multilabel"):
        TableTask({}, "ranking", ("text",), "label")
    with pytest.raises(UserError, match=r"text is \(\); allowed: one column, or two"):
        TableTask({}, "regression", (), "label")
