"""GLUE: the files of its nine tasks, and what its server takes. See also test_tasks."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_tfds
from tiny_tasks import CLS, PAD, SEP, TOKENIZER, A, B, C, E, saved

from electra_jax import submit
from electra_jax.errors import UserError
from electra_jax.finetune.encoding import encode_texts, pair_lengths
from electra_jax.finetune.tasks import glue
from electra_jax.finetune.tasks.glue import GlueTask
from electra_jax.finetune.tasks.sentences import Example


def task(name: str, source: Path | str, log=print, **settings) -> GlueTask:
    return GlueTask(name, GlueTask.Settings(source=str(source), **settings), log=log)


# Rows


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
    ee = TOKENIZER.vocab.index("##e")
    assert rows["input_ids"].tolist() == [
        [CLS, A, B, SEP, PAD, PAD, PAD, PAD],
        [CLS, A, B, C, SEP, E, B, SEP],
        [CLS, SEP, SEP, PAD, PAD, PAD, PAD, PAD],
        [CLS, E, ee, E, ee, E, ee, SEP],
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


def test_doubled_pairs_are_swapped_for_training_only(tmp_path):
    examples = [Example(str(i), "a", "b c", str(i % 2)) for i in range(3)]
    mrpc = task("mrpc", tmp_path)
    rows = mrpc.features(examples, TOKENIZER, 16, training=True)
    assert rows["example"].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows["label"].tolist() == [0, 1, 0, 0, 1, 0]
    assert rows["input_ids"][4, :6].tolist() == [CLS, B, C, SEP, A, SEP]
    rows = mrpc.features(examples, TOKENIZER, 16, training=False)
    assert rows["example"].tolist() == [0, 1, 2]
    single = task("mrpc", tmp_path, double_unordered=False)
    assert len(single.features(examples, TOKENIZER, 16, training=True)["label"]) == 3
    assert [name for name in glue.NAMES if task(name, tmp_path).unordered] == ["mrpc", "stsb"]


# Files


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
    for name, folder in zip(glue.NAMES, FOLDERS, strict=True):
        row, header, expected = lines[folder]
        text = "".join(f"{line}\n" for line in (header, row, row) if line is not None)
        saved(tmp_path / folder / "train.tsv", text)
        for source in (tmp_path, tmp_path / folder):
            first, second = task(name, source).read("train")
            assert (first.text_a, first.text_b, first.label) == expected, name
            ids = {"CoLA": ("0", "1"), "SST-2": ("0", "1"), "QQP": ("5", "5"), "MRPC": ("0", "1")}
            assert (first.id, second.id) == ids.get(folder, ("0", "0")), name


FOLDERS = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI")


@pytest.mark.parametrize("score", ["5.1", "-1", "nan", ""])
def test_scores_of_similarity_have_limits(tmp_path, score):
    saved(tmp_path / "train.tsv", f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
    with pytest.raises(UserError, match=rf"line 2: score is '{score}'; allowed: a number"):
        task("stsb", tmp_path).read("train")


def test_malformed_training_rows_can_be_skipped_others_never(tmp_path):
    text = "sentence\tlabel\na\t1\nbroken\nb\t0\n"
    for split in ("train", "dev"):
        saved(tmp_path / f"{split}.tsv", text)
    log: list[str] = []
    sst2 = task("sst2", tmp_path, log.append, on_error="skip")
    log.clear()
    assert [example.text_a for example in sst2.read("train")] == ["a", "b"]
    assert len(log) == 1 and "1 malformed" in log[0] and "line 3: 1 fields" in log[0]
    with pytest.raises(UserError, match=r"dev\.tsv, line 3"):
        sst2.read("dev")


def test_splits_that_are_not_there_are_not_predicted(tmp_path):
    saved(tmp_path / "RTE" / "dev.tsv", "index\tsentence1\tsentence2\tlabel\n")
    log: list[str] = []
    rte = task("rte", tmp_path, log.append)
    assert (rte.eval_splits, rte.test_splits) == (("dev",), ())
    assert len(log) == 1 and f"{tmp_path}/RTE/test.tsv" in log[0]


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
        examples = task(name, shared_data / "glue").read(split)
        assert len(examples) == count, (name, split)
        assert {example.label is None for example in examples} == {split == "test"}
    quora = task("qqp", shared_data / "glue" / "QQP_subset")
    assert [len(quora.read(split)) for split in ("train", "dev")] == [20000, 3496]
    mnli = task("mnli", shared_data / "glue" / "MNLI_sample")
    assert len(mnli.read("train")) == 6
    for split in (*mnli.eval_splits, *mnli.test_splits[:2]):
        assert len(mnli.read(split)) == 5


def test_tensorflow_data_sets_hold_the_same(tmp_path, monkeypatch):
    tiny_tfds.make_glue(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    mnli = task("mnli", "tfds:tiny_glue")
    examples = mnli.read("train")
    assert [example.id for example in examples] == [str(number) for number in range(20)]
    assert examples[4] == Example("4", "naïve 4", "b 4", "neutral")
    assert mnli.read("dev_mismatched")[0] == Example("0", "naïve 0", "b 0", "entailment")
    assert mnli.read("diagnostic")[1] == Example("1", "naïve 1", "b 1", None)
    stsb = task("stsb", "tfds:tiny_glue").read("dev")
    assert stsb[3] == Example("3", "naïve 3", "b 3", 3.0)
    with pytest.raises(UserError, match=r"^tfds:tiny_glue/rte, split train: "):
        task("rte", "tfds:tiny_glue").read("train")


# Scores and submissions


def test_scores_follow_the_task(tmp_path):
    gold, guess = "0011010111", "0111010100"
    scores = {
        # 4 of 6 ones found, 1 of 4 zeros called one
        "cola": {"matthews": (4 * 3 - 1 * 2) / np.sqrt(5 * 6 * 4 * 5), "accuracy": 0.7},
        "mrpc": {"accuracy": 0.7, "f1": 8 / 11},
        "qqp": {"accuracy": 0.7, "f1": 8 / 11},
        "sst2": {"accuracy": 0.7},
    }
    for name, expected in scores.items():
        one = task(name, tmp_path)
        examples = [Example(str(i), "a", "b", label) for i, label in enumerate(gold)]
        rows = {"example": np.arange(10, dtype=np.int32)}
        logits = np.eye(2, dtype=np.float32)[[int(label) for label in guess]]
        predictions = one.predict(examples, rows, {"logits": logits})
        assert one.score(examples, predictions) == pytest.approx(expected)
        assert one.main_metric == next(iter(expected))


def test_probabilities_are_those_of_the_logits_and_unlabelled_examples_do_not_count(tmp_path):
    mnli = task("mnli", tmp_path)
    examples = [Example(str(i), "a", "b", label) for i, label in enumerate(mnli.head.labels)]
    rows = {"example": np.arange(3, dtype=np.int32)}
    predictions = mnli.predict(examples, rows, {"logits": 5 * np.eye(3, dtype=np.float32)})
    total = np.exp(5) + 2
    assert predictions[1].probabilities == pytest.approx((1 / total, np.exp(5) / total, 1 / total))
    examples[0] = Example("0", "a", "b", None)
    predictions[1] = predictions[0]
    assert mnli.score(examples, predictions) == {"accuracy": 0.5}
    assert "label" not in mnli.features(examples, TOKENIZER, 16, training=False)


def test_the_server_gets_a_table_of_splits_without_labels(tmp_path):
    """Labels by name, and numbers within their limits."""
    saved(tmp_path / "test.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n1\ta\tc\n")
    logits = {"rte": np.array([[1, 2], [2, 1]], np.float32), "stsb": np.array([-0.1, 0.5])}
    expected = {
        "rte": ("RTE.tsv", "0\tnot_entailment\n1\tentailment\n"),
        "stsb": ("STS-B.tsv", "0\t0.000\n1\t2.500\n"),
    }
    for name, (file, rows) in expected.items():
        one = task(name, tmp_path)
        examples = one.read("test")
        arrays = {"example": np.arange(2, dtype=np.int32)}
        predictions = one.predict(examples, arrays, {"logits": logits[name].astype(np.float32)})
        _, table = one.write(predictions, tmp_path / "out", "test")
        assert (table.name, table.read_text()) == (file, "index\tprediction\n" + rows)
        assert [x.suffix for x in one.write(predictions, tmp_path / "out", "dev")] == [".jsonl"]


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
