import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_tfds

from electra_jax import submit
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.finetune import glue
from electra_jax.finetune.encoding import encode_texts, pair_lengths
from electra_jax.finetune.glue import GlueTask
from electra_jax.finetune.sentences import Example

WORDS = [*SPECIAL_TOKENS, "a", "b", "c", "d", "e", "##e", '"']
TOKENIZER = WordPiece(WORDS, lower_case=True, strip_accents=True, max_word_chars=200)
PAD, _, CLS, SEP = range(4)
A, B, C, D, E, EE, QUOTE = range(5, 12)


def folder(directory: Path, name: str, **files: str) -> str:
    """A directory of GLUE with the files of one task."""
    (directory / name).mkdir(parents=True, exist_ok=True)
    for split, text in files.items():
        (directory / name / f"{split}.tsv").write_bytes(text.encode())
    return str(directory)


# Rows and features


def test_pairs_are_cut_like_popping_from_the_longer():
    def popped(first: int, second: int, room: int) -> tuple[int, int]:
        while first + second > room:
            first, second = (first - 1, second) if first > second else (first, second - 1)
        return first, second

    for first in range(12):
        for second in range(12):
            for room in range(12):
                expected = popped(first, second, room)
                assert pair_lengths(first, second, room) == expected, (first, second, room)


def test_rows_hold_one_text_or_two():
    texts = [("a b", None), ("a b c d", "e b a"), ("", ""), ("ee " * 9, None)]
    rows = encode_texts(TOKENIZER, texts, max_length=8)
    assert rows["input_ids"].tolist() == [
        [CLS, A, B, SEP, PAD, PAD, PAD, PAD],
        [CLS, A, B, C, SEP, E, B, SEP],
        [CLS, SEP, SEP, PAD, PAD, PAD, PAD, PAD],
        [CLS, E, EE, E, EE, E, EE, SEP],
    ]
    assert rows["piece_ids"].sum(axis=1).tolist() == [4, 8, 3, 8]
    assert rows["token_type_ids"].tolist() == [
        [0] * 8,
        [0, 0, 0, 0, 0, 1, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert rows["position_ids"].tolist() == [[*range(8)]] * 4
    assert {rows[name].dtype for name in rows} == {np.dtype(np.int32)}


# Readers


def test_columns_of_every_task(tmp_path):
    lines = {
        "CoLA": ("gj04\t0\t*\ta b", None, ("a b", None, "0")),
        "SST-2": ("a b \t1", "sentence\tlabel", ("a b ", None, "1")),
        "MRPC": (
            '1\t7\t8\t"a\tb',
            "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
            ('"a', "b", "1"),
        ),
        "STS-B": (
            "0\tg\tf\ty\to\ts\ts\ta\tb\t2.500",
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
            ("a", "b", 2.5),
        ),
        "QQP": (
            "5\t1\t2\ta\t\t1",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
            ("a", "", "1"),
        ),
        "QNLI": (
            "0\ta\tb\tnot_entailment",
            "index\tquestion\tsentence\tlabel",
            ("a", "b", "not_entailment"),
        ),
        "RTE": (
            "0\ta\tb\tentailment",
            "index\tsentence1\tsentence2\tlabel",
            ("a", "b", "entailment"),
        ),
        "WNLI": ("0\ta\tb\t1", "index\tsentence1\tsentence2\tlabel", ("a", "b", "1")),
        "MNLI": (
            "0\tp\tp\tg\tx\tx\tx\tx\ta\tb\tneutral\tneutral",
            "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
            "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
            ("a", "b", "neutral"),
        ),
    }
    for name in glue.TASKS:
        place = glue._LAYOUTS[name].folder
        row, header, expected = lines[place]
        text = "".join(f"{line}\n" for line in (header, row, row) if line is not None)
        source = folder(tmp_path, place, train=text)
        for where in (source, f"{source}/{place}"):
            examples = GlueTask(name, where).read("train")
            assert len(examples) == 2
            found = examples[0]
            assert (found.text_a, found.text_b, found.label) == expected, name
    assert [example.id for example in GlueTask("qqp", source).read("train")] == ["5", "5"]
    assert [example.id for example in GlueTask("sst2", source).read("train")] == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cola", "s\t1\t\ta\ns\t2\t\ta", r"train\.tsv, line 2: label '2'; allowed: 0, 1$"),
        ("cola", "s\t1\t\ta\n\ns\t1\t\ta", r"line 2: 1 fields; the file has 4 columns"),
        ("sst2", "sentence\tlabel\na\t1\na\tb\t1", r"line 3: 3 fields; the file has 2 columns"),
        ("sst2", "text\tlabel\na\t1", r"line 1: there is no column 'sentence'; found text, label"),
        ("sst2", "", r"line 1: there is no column 'sentence'"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.1", r"line 2: score '5.1'; allowed: a num"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan", r"line 2: score 'nan'"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t", r"line 2: score ''"),
    ],
)
def test_malformed_rows_are_named(tmp_path, name, text, message):
    source = folder(tmp_path, glue._LAYOUTS[name].folder, train=text)
    with pytest.raises(UserError, match=message):
        GlueTask(name, source).read("train")


def test_text_that_is_not_utf8_is_named(tmp_path):
    source = folder(tmp_path, "SST-2")
    (tmp_path / "SST-2" / "train.tsv").write_bytes(b"sentence\tlabel\na\t1\nna\xefve\t1\n")
    with pytest.raises(UserError, match=r"train\.tsv, line 3: not UTF-8"):
        GlueTask("sst2", source).read("train")


def test_malformed_training_rows_can_be_skipped_others_never(tmp_path):
    text = "sentence\tlabel\na\t1\nbroken\nb\t0\n"
    source = folder(tmp_path, "SST-2", train=text, dev=text, test="")
    log: list[str] = []
    task = GlueTask("sst2", source, on_error="skip", log=log.append)
    assert [example.text_a for example in task.read("train")] == ["a", "b"]
    assert len(log) == 1
    assert "1 malformed" in log[0]
    assert "line 3: 1 fields" in log[0]
    with pytest.raises(UserError, match=r"dev\.tsv, line 3"):
        task.read("dev")


def test_names_that_do_not_exist_are_said(tmp_path):
    with pytest.raises(UserError, match="no GLUE task 'sst'; allowed: cola, sst2"):
        GlueTask("sst", str(tmp_path))
    with pytest.raises(UserError, match="mnli has no split 'dev'; allowed: train, dev_matched"):
        GlueTask("mnli", str(tmp_path)).read("dev")
    with pytest.raises(UserError, match=r"dev\.tsv: cannot be read: No such file"):
        GlueTask("rte", str(tmp_path)).read("dev")


OFFICIAL = {
    ("cola", "train"): 8551,
    ("cola", "dev"): 1043,
    ("cola", "test"): 1063,
    ("sst2", "train"): 67349,
    ("sst2", "dev"): 872,
    ("mrpc", "train"): 3668,
    ("mrpc", "dev"): 408,
    ("mrpc", "test"): 1725,
    ("stsb", "train"): 5749,
    ("stsb", "dev"): 1500,
    ("stsb", "test"): 1379,
    ("qnli", "dev"): 5463,
    ("rte", "train"): 2490,
    ("rte", "dev"): 277,
    ("rte", "test"): 3000,
    ("wnli", "train"): 635,
    ("wnli", "dev"): 71,
    ("wnli", "test"): 146,
}


def test_official_files_give_the_official_numbers_of_rows(shared_data):
    for (name, split), count in OFFICIAL.items():
        examples = GlueTask(name, str(shared_data / "glue")).read(split)
        assert len(examples) == count, (name, split)
        assert {example.label is None for example in examples} == {split == "test"}
    quora = GlueTask("qqp", str(shared_data / "glue" / "QQP_subset"))
    assert [len(quora.read(split)) for split in ("train", "dev")] == [20000, 3496]
    mnli = GlueTask("mnli", str(shared_data / "glue" / "MNLI_sample"))
    assert len(mnli.read("train")) == 6
    for split in (*mnli.eval_splits, *mnli.test_splits[:2]):
        assert len(mnli.read(split)) == 5


def test_tensorflow_data_sets_hold_the_same(tmp_path, monkeypatch):
    tiny_tfds.make_glue(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    mnli = GlueTask("mnli", "tfds:tiny_glue")
    examples = mnli.read("train")
    assert [example.id for example in examples] == [str(number) for number in range(20)]
    assert examples[4] == Example("4", "naïve 4", "b 4", "neutral")
    assert mnli.read("dev_mismatched")[0] == Example("0", "naïve 0", "b 0", "entailment")
    assert mnli.read("diagnostic")[1] == Example("1", "naïve 1", "b 1", None)
    stsb = GlueTask("stsb", "tfds:tiny_glue").read("dev")
    assert stsb[3] == Example("3", "naïve 3", "b 3", 3.0)
    with pytest.raises(UserError, match=r"^tfds:tiny_glue/rte, split train: "):
        GlueTask("rte", "tfds:tiny_glue").read("train")


# From examples to scores and files


def pairs(count: int, labels: tuple) -> list[Example]:
    texts = [("a " * (i % 3 + 1), "b c") for i in range(count)]
    return [Example(str(i), a, b, labels[i % len(labels)]) for i, (a, b) in enumerate(texts)]


def test_doubled_pairs_are_swapped_for_training_only(tmp_path):
    examples = pairs(3, ("0", "1"))
    task = GlueTask("mrpc", str(tmp_path))
    rows = task.features(examples, TOKENIZER, 16, training=True)
    assert rows["example"].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["label"].tolist() == [0, 1, 0, 0, 1, 0]
    assert rows["input_ids"][4, :7].tolist() == [CLS, B, C, SEP, A, A, SEP]
    rows = task.features(examples, TOKENIZER, 16, training=False)
    assert rows["example"].tolist() == [0, 1, 2]
    single = GlueTask("mrpc", str(tmp_path), double_unordered=False)
    assert len(single.features(examples, TOKENIZER, 16, training=True)["label"]) == 3
    for name in ("qqp", "mnli", "rte"):
        assert not GlueTask(name, str(tmp_path)).unordered


def test_labels_come_back_in_the_order_of_the_examples(tmp_path):
    task = GlueTask("mnli", str(tmp_path))
    examples = pairs(4, task.head.labels)
    rows = task.features(examples, TOKENIZER, 16, training=False)
    assert rows["label"].tolist() == [0, 1, 2, 0]
    logits = 5 * np.eye(3, dtype=np.float32)[rows["label"]]
    order = np.array([2, 0, 3, 1])
    shuffled = {name: array[order] for name, array in rows.items()}
    predictions = task.predict(examples, shuffled, {"logits": logits[order]})
    assert [guess.label for guess in predictions] == [example.label for example in examples]
    assert [guess.id for guess in predictions] == ["0", "1", "2", "3"]
    total = np.exp(5) + 2
    assert predictions[1].probabilities == pytest.approx((1 / total, np.exp(5) / total, 1 / total))
    assert task.score(examples, predictions) == {"accuracy": 1.0}
    # Where some are not labelled, the others count; there is nothing to train on.
    examples[0] = Example("0", "a", "b", None)
    predictions[1] = predictions[0]
    assert task.score(examples, predictions) == {"accuracy": pytest.approx(2 / 3)}
    assert "label" not in task.features(examples, TOKENIZER, 16, training=False)


def test_scores_follow_the_task(tmp_path):
    gold, guess = "0011010111", "0111010100"
    labels = {name: tuple(gold) for name in ("cola", "mrpc", "qqp", "sst2")}
    expected = {
        # 4 of 6 ones found, 1 of 4 zeros called one
        "cola": {"matthews": (4 * 3 - 1 * 2) / np.sqrt(5 * 6 * 4 * 5), "accuracy": 0.7},
        "mrpc": {"accuracy": 0.7, "f1": 8 / 11},
        "qqp": {"accuracy": 0.7, "f1": 8 / 11},
        "sst2": {"accuracy": 0.7},
    }
    for name, scores in expected.items():
        task = GlueTask(name, str(tmp_path))
        examples = pairs(10, labels[name])
        logits = np.eye(2, dtype=np.float32)[[int(label) for label in guess]]
        rows = task.features(examples, TOKENIZER, 16, training=False)
        predictions = task.predict(examples, rows, {"logits": logits})
        assert task.score(examples, predictions) == pytest.approx(scores)
        assert task.main_metric == next(iter(scores))


def test_similarity_is_scaled_and_comes_back_in_its_unit(tmp_path):
    task = GlueTask("stsb", folder(tmp_path, "STS-B", test=""))
    examples = pairs(4, (0.0, 2.5, 5.0, 1.0))
    rows = task.features(examples, TOKENIZER, 16, training=False)
    assert rows["label"].dtype == np.float32
    assert rows["label"] == pytest.approx([0, 0.5, 1, 0.2])
    outputs = {"logits": np.array([-0.1, 0.5, 1.1, 0.2], np.float32)}
    predictions = task.predict(examples, rows, outputs)
    assert [guess.label for guess in predictions] == pytest.approx([-0.5, 2.5, 5.5, 1.0])
    scores = task.score(examples, predictions)
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["mse"] == pytest.approx(0.125, rel=1e-6)
    paths = task.write(predictions, tmp_path, "test")
    assert paths[1].read_text() == "index\tprediction\n0\t0.000\n1\t2.500\n2\t5.000\n3\t1.000\n"


def test_splits_without_labels_are_predicted_and_not_scored(tmp_path):
    source = folder(tmp_path, "RTE", test="index\tsentence1\tsentence2\n0\ta\tb\n1\ta\tc\n")
    task = GlueTask("rte", source)
    examples = task.read("test")
    rows = task.features(examples, TOKENIZER, 16, training=False)
    assert "label" not in rows
    outputs = {"logits": np.array([[1, 2], [2, 1]], np.float32)}
    predictions = task.predict(examples, rows, outputs)
    assert task.score(examples, predictions) == {}
    lines, submission = task.write(predictions, tmp_path / "out", "test")
    assert submission.name == "RTE.tsv"
    assert submission.read_text() == "index\tprediction\n0\tnot_entailment\n1\tentailment\n"
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["label"] for record in records] == ["not_entailment", "entailment"]
    assert records[0]["probabilities"]["entailment"] == pytest.approx(1 / (1 + np.e))
    assert [path.name for path in task.write(predictions, tmp_path / "out", "dev")] == ["dev.jsonl"]
    assert not list(tmp_path.glob("out/*.tmp"))


def test_submission_has_all_files_or_is_not_made(tmp_path):
    for name in glue.SUBMISSION:
        (tmp_path / f"{name}.tsv").write_text(f"index\tprediction\n0\t{name}\n")
    files = sorted(tmp_path.glob("*.tsv"))
    made = glue.zip_submission(files, tmp_path / "submission.zip")
    with zipfile.ZipFile(made) as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in glue.SUBMISSION)
        assert archive.read("AX.tsv") == b"index\tprediction\n0\tAX\n"
    with pytest.raises(UserError, match=r"AX\.tsv missing"):
        glue.zip_submission(files[1:], tmp_path / "other.zip")
    with pytest.raises(UserError, match=r"both for AX"):
        glue.zip_submission([*files, tmp_path / "b" / "AX.tsv"], tmp_path / "other.zip")
    assert not (tmp_path / "other.zip").exists()
    assert len(glue.SUBMISSION) == 11


def test_compressed_files_are_read(tmp_path):
    from electra_jax.data.text import read_lines

    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfa\r\nb\n\n"))
    assert read_lines(tmp_path / "a.tsv.gz") == ["a", "b", ""]
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a" * 1000)[:-9])
    with pytest.raises(UserError, match=r"cut\.gz: cannot be read: "):
        read_lines(tmp_path / "cut.gz")


def test_submission_takes_the_best_trial_of_each_run(tmp_path, monkeypatch, capsys):
    """`electra_jax.submit` with a run of two trials, and one run for each other file."""
    runs = []
    for number, name in enumerate(glue.SUBMISSION):
        run = tmp_path / f"run_{number}"
        trials = ["trial_0", "trial_1"] if number == 0 else [""]
        scores = [{"scores": {"dev": {"accuracy": 0.1 + place}}} for place in range(2)]
        results = {"main_metric": "accuracy", "trials": scores} if number == 0 else {"scores": {}}
        for trial in trials:
            (run / trial / "predictions").mkdir(parents=True)
            (run / trial / "predictions" / f"{name}.tsv").write_text(f"of {trial or 'the run'}\n")
        (run / "results.json").write_text(json.dumps(results))
        runs.append(str(run))
    out = tmp_path / "glue.zip"
    monkeypatch.setattr("sys.argv", ["submit", f"--out={out}", *runs])
    submit.main()
    assert capsys.readouterr().out == f"{out}\n"
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == [f"{name}.tsv" for name in glue.SUBMISSION]
        assert archive.read(f"{glue.SUBMISSION[0]}.tsv") == b"of trial_1\n"
    monkeypatch.setattr("sys.argv", ["submit", f"--out={tmp_path / 'less.zip'}", *runs[1:]])
    with pytest.raises(UserError, match=r"AX.tsv missing"):
        submit.main()
    with pytest.raises(UserError, match="there is no finished run"):
        submit.submission_files(tmp_path)


def test_splits_that_are_not_there_are_not_predicted(tmp_path):
    folder = tmp_path / "RTE"
    folder.mkdir()
    (folder / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    lines = []
    task = glue.GlueTask("rte", str(tmp_path), log=lines.append)
    assert (task.eval_splits, task.test_splits) == (("dev",), ())
    assert lines == [f"there is no {folder}/test.tsv: nothing to predict there"]
