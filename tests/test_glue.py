"""GLUE: the files of its nine tasks, and what its server takes. See also test_tasks."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_tfds
from tiny_tasks import CLS, SEP, TOKENIZER, A, B, C, saved

from electra_jax import submit
from electra_jax.errors import UserError
from electra_jax.finetune.tasks import glue
from electra_jax.finetune.tasks.glue import GlueTask
from electra_jax.finetune.tasks.sentences import Example

# What predictions need to know of rows: each is an example.
ROWS_OF = {count: {"example": np.arange(count, dtype=np.int32)} for count in (2, 3, 10)}


def task(name: str, source: Path | str, log=print, **settings) -> GlueTask:
    return GlueTask(name, GlueTask.Settings(source=str(source), **settings), log=log)


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


ROWS = {  # folder, first line, a row, and what it says; bars stand for tabs
    "cola": ("CoLA", None, "gj04|0|*|a b", "a b", None, "0"),
    "sst2": ("SST-2", "sentence|label", "a b |1", "a b ", None, "1"),
    "mrpc": ("MRPC", "\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String", '1|7|8|"a|b', '"a', "b", "1"),
    "stsb": ("STS-B", "index|genre|sentence1|sentence2|score", "0|g|a|b|2.500", "a", "b", 2.5),
    "qqp": ("QQP", "id|qid1|qid2|question1|question2|is_duplicate", "5|1|2|a||1", "a", "", "1"),
    "mnli": ("MNLI", "sentence1|sentence2|label1|gold_label", "a|b|-|neutral", "a", "b", "neutral"),
    "qnli": ("QNLI", "index|question|sentence|label", "0|a|b|entailment", "a", "b", "entailment"),
    "rte": ("RTE", "index|sentence1|sentence2|label", "0|a|b|entailment", "a", "b", "entailment"),
    "wnli": ("WNLI", "index|sentence1|sentence2|label", "0|a|b|1", "a", "b", "1"),
}
IDS = {"qqp": ["5", "5"]} | {name: ["0", "1"] for name in ("cola", "sst2", "mrpc", "mnli")}


@pytest.mark.parametrize("name", glue.NAMES)
def test_columns_of_every_task(name, tmp_path):
    folder, header, row, *expected = ROWS[name]
    text = "".join(f"{line}\n" for line in (header, row, row) if line).replace("|", "\t")
    saved(tmp_path / folder / "train.tsv", text)
    for source in (tmp_path, tmp_path / folder):
        examples = task(name, source).read("train")
        assert [[x.text_a, x.text_b, x.label] for x in examples] == [expected] * 2
        assert [x.id for x in examples] == IDS.get(name, ["0", "0"])


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


OFFICIAL = {  # rows of train, dev and test, as far as they are here
    "cola": {"train": 8551, "dev": 1043, "test": 1063},
    "sst2": {"train": 67349, "dev": 872},
    "mrpc": {"train": 3668, "dev": 408, "test": 1725},
    "stsb": {"train": 5749, "dev": 1500, "test": 1379},
    "qnli": {"dev": 5463},
    "rte": {"train": 2490, "dev": 277, "test": 3000},
    "wnli": {"train": 635, "dev": 71, "test": 146},
}
SAMPLES = {
    "qqp": ("QQP_subset", {"train": 20000, "dev": 3496}),
    "mnli": ("MNLI_sample", {"train": 6, "dev_matched": 5, "dev_mismatched": 5, "test_matched": 5}),
}


@pytest.mark.process
def test_official_files_give_the_official_numbers_of_rows(shared_data):
    places = {name: (".", counts) for name, counts in OFFICIAL.items()} | SAMPLES
    for name, (place, counts) in places.items():
        for split, count in counts.items():
            examples = task(name, shared_data / "glue" / place).read(split)
            assert len(examples) == count, (name, split)
            assert {example.label is None for example in examples} == {split.startswith("test")}


def test_tensorflow_data_sets_hold_the_same(tmp_path, monkeypatch):
    tiny_tfds.make(tmp_path, tiny_tfds.TinyGlue)
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [  # 4 of 6 ones found, 1 of 4 zeros called one
        ("cola", {"matthews": (4 * 3 - 1 * 2) / np.sqrt(5 * 6 * 4 * 5), "accuracy": 0.7}),
        ("mrpc", {"accuracy": 0.7, "f1": 8 / 11}),
        ("qqp", {"accuracy": 0.7, "f1": 8 / 11}),
        ("sst2", {"accuracy": 0.7}),
    ],
)
def test_scores_follow_the_task(name, expected, tmp_path):
    one = task(name, tmp_path)
    examples = [Example(str(i), "a", "b", label) for i, label in enumerate("0011010111")]
    logits = np.eye(2, dtype=np.float32)[[int(label) for label in "0111010100"]]
    predictions = one.predict(examples, ROWS_OF[10], {"logits": logits})
    assert one.score(examples, predictions) == pytest.approx(expected)
    assert one.main_metric == next(iter(expected))


def test_probabilities_are_those_of_the_logits_and_unlabeled_examples_do_not_count(tmp_path):
    mnli = task("mnli", tmp_path)
    examples = [Example(str(i), "a", "b", label) for i, label in enumerate(mnli.head.labels)]
    predictions = mnli.predict(examples, ROWS_OF[3], {"logits": 5 * np.eye(3, dtype=np.float32)})
    total = np.exp(5) + 2
    assert predictions[1].probabilities == pytest.approx((1 / total, np.exp(5) / total, 1 / total))
    examples[0] = Example("0", "a", "b", None)
    assert mnli.score(examples, [predictions[0]] * 2 + predictions[2:]) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("name", "logits", "file", "rows"),
    [
        ("rte", [[1, 2], [2, 1]], "RTE.tsv", "0\tnot_entailment\n1\tentailment\n"),
        ("stsb", [-0.1, 0.5], "STS-B.tsv", "0\t0.000\n1\t2.500\n"),  # within the limits
    ],
)
def test_the_server_gets_a_table_of_splits_without_labels(name, logits, file, rows, tmp_path):
    saved(tmp_path / "test.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n1\ta\tc\n")
    one = task(name, tmp_path)
    predictions = one.predict(
        one.read("test"), ROWS_OF[2], {"logits": np.array(logits, np.float32)}
    )
    _, table = one.write(predictions, tmp_path / "out", "test")
    assert (table.name, table.read_text()) == (file, "index\tprediction\n" + rows)
    assert [x.suffix for x in one.write(predictions, tmp_path / "out", "dev")] == [".jsonl"]


def test_submission_has_all_files_of_the_best_trials_or_is_not_made(tmp_path, monkeypatch, capsys):
    """`electra_jax.submit` with a run of two trials, and one run for each other file."""
    runs = []
    for number, name in enumerate(glue.SUBMISSION):
        run = tmp_path / f"run_{number}"
        trials = ["trial_0", "trial_1"] if number == 0 else [""]
        scores = [{"scores": {"dev": {"accuracy": 0.1 + place}}} for place in range(2)]
        results = {"main_metric": "accuracy", "trials": scores} if number == 0 else {"scores": {}}
        for trial in trials:
            saved(run / trial / "predictions" / f"{name}.tsv", f"of {trial or name}\n")
        saved(run / "results.json", json.dumps(results))
        runs.append(str(run))
    out = tmp_path / "glue.zip"
    monkeypatch.setattr("sys.argv", ["submit", f"--out={out}", *runs])
    submit.main()
    assert capsys.readouterr().out == f"{out}\n"
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == [f"{name}.tsv" for name in glue.SUBMISSION]
        first, *others = (archive.read(name).decode() for name in archive.namelist())
    assert [first, *others] == [f"of {x}\n" for x in ("trial_1", *glue.SUBMISSION[1:])]
    assert len(glue.SUBMISSION) == 11

    for name in ("empty", "twice"):
        saved(tmp_path / name / "results.json", "{}")
    saved(tmp_path / "twice" / "predictions" / "AX.tsv", "")
    for chosen, message in [
        (runs[1:], r"less\.zip: AX\.tsv missing"),
        ([*runs, str(tmp_path / "twice")], "twice/predictions/AX.tsv are both for AX"),
        ([*runs, str(tmp_path)], r"results\.json: cannot be read"),
        ([*runs, str(tmp_path / "empty")], "empty/predictions: there is nothing to submit"),
    ]:
        monkeypatch.setattr("sys.argv", ["submit", f"--out={tmp_path / 'less.zip'}", *chosen])
        with pytest.raises(UserError, match=message):
            submit.main()
        assert not (tmp_path / "less.zip").exists()
