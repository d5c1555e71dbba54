"""The formats of tables, and labels of all kinds in them. See also test_tasks."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tiny_tasks import TOKENIZER, saved

from electra_jax.data.tables import read_table
from electra_jax.errors import UserError
from electra_jax.finetune.tasks.sentences import Example, Prediction, TableTask


def table(**settings) -> TableTask:
    return TableTask("table", TableTask.Settings(**settings))


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
        task = table(train=path, text=("one", "two"))
        assert task.read("train") == [
            Example("0", "a\u2028b", 'q "c"', "1"),
            Example("1", "d", "", "0"),
        ]
        assert task.head.labels == ("0", "1")


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("t.csv", 'text,label\n"a\nb",x\nc\n', r"line 4: 1 fields; .* 2 columns: text, label"),
        ("t.csv", 'text,label\na,x\n"b,y\n', r"line 3: not CSV: unexpected end of data"),
        ("t.csv", 'text,label\n"a"b,y\n', r"line 2: not CSV: "),
        ("t.csv", "text,text\na,x\n", r"line 1: found the column 'text' twice"),
        ("t.csv", "", r"line 1: found nothing"),
        ("t.tsv", "text\tlabel\na\tx\nb\ty\tz\n", r"line 3: 3 fields"),
        ("t.xlsx", "", r"not known as a table; allowed: \.csv, \.tsv, \.jsonl, \.ndjson, \.parq"),
        ("t.parquet", "PAR1", r"cannot be read"),
    ],
)
def test_mistakes_are_named_by_line(tmp_path, name, text, facts):
    with pytest.raises(UserError, match=rf"t\.\w+.* {facts}|t\.\w+: {facts}"):
        list(read_table(saved(tmp_path / name, text)))


def test_several_labels_in_csv(tmp_path):
    path = saved(tmp_path / "train.csv", 'text,topics\na,"x, y"\nb,\na b,z\n')
    task = table(train=path, target="multilabel", label="topics")
    assert task.head.labels == ("x", "y", "z")
    assert [example.label for example in task.read("train")] == [("x", "y"), (), ("z",)]


def test_several_labels_are_predicted_where_each_is_likely():
    task = table(target="multilabel", labels=("x", "y", "z"))
    examples = [Example("0", "a", None, ("z", "x")), Example("1", "b", None, ())]
    rows = {"example": np.arange(2, dtype=np.int32)}
    logits = np.array([[0.1, -1, -1], [-1, -1, -0.1]], np.float32)
    predictions = task.predict(examples, rows, {"logits": logits})
    assert [guess.label for guess in predictions] == [("x",), ()]
    assert predictions[0].probabilities[0] == pytest.approx(1 / (1 + np.exp(-0.1)))
    # Of the three labels, x is right, y is never there, z is missed.
    expected = {"micro_f1": 2 / 3, "macro_f1": 1 / 3, "accuracy": 0.5}
    assert task.score(examples, predictions) == pytest.approx(expected)


def test_numbers_come_back_in_their_unit(tmp_path):
    files = {
        "train": saved(tmp_path / "train.csv", "text,price\na,-10\nb,30\na,0\n"),
        "dev": saved(tmp_path / "dev.csv", "text,price\na,0\nb,40\n"),
    }
    task = table(**files, target="regression", label="price")
    assert task.head.value_range == (-10.0, 30.0)
    examples = task.read("dev")
    rows = task.features(examples, TOKENIZER, 8, training=False)
    predictions = task.predict(examples, rows, {"logits": np.array([0.25, 1.0], np.float32)})
    assert predictions == [Prediction("0", 0.0, ()), Prediction("1", 30.0, ())]
    expected = {"spearman": 1.0, "pearson": 1.0, "mse": 50.0}
    assert task.score(examples, predictions) == pytest.approx(expected)
    known = table(**files, target="regression", label="price", value_range=(0.0, 100.0))
    assert known.features(examples, TOKENIZER, 8, training=False)["label"][1] == np.float32(0.4)
