"""What every task of fine-tuning keeps: one suite for all of them, over `tiny_tasks.CASES`.

What is special to a task is tested beside: test_glue, test_squad, test_tables and test_tagging.
"""

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest
from tiny_tasks import CASES, TOKENIZER, document, oracle, saved, squad

from electra_jax.errors import UserError
from electra_jax.finetune.config import get_config, make_task
from electra_jax.finetune.tasks.base import Task
from electra_jax.settings import settings_of

LENGTH = 12
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def names(error: pytest.ExceptionInfo, *facts: str) -> bool:
    """Whether a message has all facts: the place, what was found, what is allowed."""
    return all(fact in str(error.value) for fact in facts)


def features(task: Task, split: str, training: bool = False) -> dict[str, np.ndarray]:
    return task.features(task.read(split), TOKENIZER, LENGTH, training)


@EVERY
def test_labeled_splits_are_read_with_their_answers_and_others_without(case, tmp_path):
    task = case.make(tmp_path)
    assert (task.eval_splits, task.test_splits) == (("dev",), ("test",))
    assert task.read("train") == task.read("dev") == case.examples
    assert not any(map(task.is_labeled, task.read("test")))
    assert len(task.read("test")) == len(case.examples)


@EVERY
def test_compressed_files_and_marked_ones_hold_the_same(case, tmp_path):
    """GLUE's files have fixed names."""
    content = b"\xef\xbb\xbf" + case.labeled.encode()
    assert case.make(tmp_path / "marked", dev=content).read("dev") == case.examples
    if "source" in dir(case.kind.Settings):
        return
    for suffix, module in ((".gz", gzip), (".xz", lzma), (".bz2", bz2)):
        path = saved(tmp_path / f"dev{case.suffix}{suffix}", module.compress(content))
        settings = case.make(tmp_path).settings
        task = case.kind(case.name, type(settings)(**vars(settings) | {"dev": path}))
        assert task.read("dev") == case.examples, suffix


@EVERY
def test_rows_have_what_network_and_head_read(case, tmp_path):
    task = case.make(tmp_path)
    rows = features(task, "dev", training=True)
    assert rows["example"].tolist() == [*range(len(case.examples))]
    for name in ("input_ids", "segment_ids", "position_ids", "token_type_ids", *task.head.inputs):
        assert (rows[name].shape, rows[name].dtype) == ((len(case.examples), LENGTH), np.int32)
    assert (rows["input_ids"] != TOKENIZER.pad_id).tolist() == (rows["segment_ids"] > 0).tolist()
    for name, expected in case.targets.items():
        expected = np.array(expected)
        found = rows[name][tuple(slice(size) for size in expected.shape)]
        np.testing.assert_array_equal(found, expected)
        assert rows[name].sum() - expected.sum() == expected.size - rows[name].size  # all -1
        assert rows[name].dtype == (np.float32 if expected.dtype == float else np.int32)
    unlabeled = features(task, "test", training=False)
    assert not {*case.targets} & {*unlabeled}
    for name in ("input_ids", "segment_ids"):
        np.testing.assert_array_equal(unlabeled[name], rows[name])


@EVERY
def test_answers_come_back_in_the_order_of_the_examples(case, tmp_path):
    """Whatever the order of the rows; a network that knows them has the best scores."""
    task = case.make(tmp_path)
    examples, rows = task.read("dev"), features(task, "dev")
    order = np.random.default_rng(0).permutation(len(examples))
    shuffled = {name: array[order] for name, array in rows.items()}
    outputs = {name: array[order] for name, array in oracle(rows, task.head.labels).items()}
    predictions = task.predict(examples, shuffled, outputs)
    answers = json.loads(json.dumps([task.answer(guess) for guess in predictions]))
    expected = json.loads(json.dumps(case.answers))
    for answer, fields in zip(answers, expected, strict=True):
        assert {name: answer[name] for name in fields} == fields
        shares = answer.get("probabilities", [])
        assert all(0 <= x <= 1 for x in (shares.values() if isinstance(shares, dict) else shares))
    scores = task.score(examples, predictions)
    best = 100 if case.suffix == ".json" else 1
    for name, metric in task.metrics.items():
        assert scores[name] == pytest.approx(best if metric.better == "higher" else 0), name
    assert task.main_metric == next(iter(task.metrics))
    assert task.score(task.read("test"), predictions) == {}


@EVERY
def test_predictions_are_files_as_a_whole(case, tmp_path):
    task = case.make(tmp_path / "data")
    predictions = task.predict(
        task.read("dev"), features(task, "dev"), oracle(features(task, "dev"), task.head.labels)
    )
    paths = task.write(predictions, tmp_path / "new" / "out", "dev")
    assert tuple(path.name for path in paths) == case.written
    assert {*paths} == {*(tmp_path / "new" / "out").iterdir()}
    for path in paths:
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert lines == json.loads(json.dumps([task.answer(guess) for guess in predictions]))


@EVERY
def test_the_floor_is_the_score_of_the_best_constant_answer(case, tmp_path):
    task = case.make(tmp_path)
    assert task.floor(task.read("dev")) == pytest.approx(case.floor)


@EVERY
def test_what_a_run_keeps_is_enough_to_predict(case, tmp_path):
    """The training data are gone, and nothing is read."""
    task = case.make(tmp_path)
    config = get_config()
    config.data.update(kind=case.key, name=case.name)
    own = {name: getattr(task.settings, name) for name in settings_of(case.kind.Settings)}
    gone = {name: f"{x}.gone" for name, x in own.items() if name in ("train", "dev", "source")}
    config.data.update(own | gone | task.resolved())
    again = make_task(config, log=lambda line: None)
    assert again.head == task.head and again.metrics == task.metrics
    rows = features(task, "dev")
    outputs, examples = oracle(rows, task.head.labels), task.read("dev")
    assert again.predict(examples, rows, outputs) == task.predict(examples, rows, outputs)


@EVERY
def test_examples_to_predict_come_from_files_and_objects_without_their_answers(case, tmp_path):
    task = case.make(tmp_path)
    expected = task.read("test")
    path = str(tmp_path / f"dev{case.suffix}")
    assert task.unlabeled(path) == expected
    assert task.example(3, case.object, "line 1") == expected[0]
    nameless = {name: x for name, x in case.object.items() if name != "id"}
    assert task.example(3, nameless, "line 1").id == "3"
    lines = saved(tmp_path / "new.jsonl", json.dumps(case.object))
    assert task.unlabeled(lines) == expected[:1]
    for name in nameless:
        for bad in ({}, {name: 3}, {name: [1]}, {name: None}):
            values = {key: x for key, x in case.object.items() if key != name} | bad
            with pytest.raises(UserError, match=r"^line 7: ") as error:
                task.example(0, values, "line 7")
            assert names(error, name if bad else "there is no column"), values


@EVERY
def test_no_examples_have_no_rows_and_no_scores(case, tmp_path):
    task = case.make(tmp_path)
    rows = task.features([], TOKENIZER, LENGTH, training=False)
    assert rows["input_ids"].shape == (0, LENGTH)
    some = oracle(features(task, "dev"), task.head.labels)
    assert task.predict([], rows, {name: array[:0] for name, array in some.items()}) == []
    assert task.score([], []) == {}


@EVERY
def test_splits_and_files_that_are_not_there_are_named(case, tmp_path):
    task = case.make(tmp_path)
    with pytest.raises(UserError) as error:
        task.read("tset")
    assert names(error, case.name, "'tset'", "train, dev, test")
    (tmp_path / f"dev{case.suffix}").unlink()
    with pytest.raises(UserError) as error:
        task.read("dev")
    assert names(error, f"dev{case.suffix}: cannot be read: No such file")
    assert task.files["dev"] == str(tmp_path / f"dev{case.suffix}")


@EVERY
def test_text_that_is_not_utf8_is_named_by_its_line(case, tmp_path):
    content = case.labeled.encode() + b"\n\xef"
    line = content.count(b"\n") + 1
    with pytest.raises(UserError) as error:
        case.make(tmp_path, train=content).read("train")
    assert names(error, f"train{case.suffix}, line {line}: not UTF-8")


RTE = "index\tsentence1\tsentence2\tlabel\n"
ROW = '{"text": "a", "label": "x"}\n'

MALFORMED = [  # kind, content of the training file, and what the message says of it
    ("glue", f"{RTE}1\ta\tb\tno", "line 2; 'no'; entailment, not_entailment"),
    ("glue", f"{RTE}\n", "line 2; 1 fields; 4 columns"),
    ("glue", "index\tsentence1\tlabel\n1\ta\tno", "line 1; 'sentence2'; sentence1, label"),
    ("glue", "", "line 1; 'sentence1'"),
    ("classification", f'{ROW}{{"text"', "line 2; not JSON"),
    ("classification", f"{ROW}[1]", "line 2; not a JSON object; list"),
    ("classification", f'{ROW}\n{{"text": "a"}}', "line 3; 'label'; found text"),
    ("classification", '{"text": "a", "label": 0.5}', "line 1; label is 0.5; name of a label"),
    ("classification", '{"text": 3, "label": "x"}', "line 1; text is 3; allowed: text"),
    ("classification", '{"text": "a", "label": ""}', "line 1; label is ''; name of a label"),
    ("multilabel", '{"text": "a", "label": 3}', "line 1; label is 3; a list, or text"),
    ("multilabel", '{"text": "a", "label": [""]}', "line 1; label is ''; name of a label"),
    ("regression", '{"text": "a", "label": "high"}', "line 1; label is 'high'; a number"),
    ("regression", '{"text": "a", "label": true}', "line 1; label is True; a number"),
    ("regression", '{"text": "a", "label": 1%s}' % (400 * "0"), "line 1; label is 10; a number"),
    ("regression", '{"text": "a", "label": NaN}', "line 1; label is nan; a number"),
    ("squad 1", "{", "not JSON"),
    ("squad 1", "[]", "data: found nothing; a list"),
    ("squad 1", '{"data": [{"title": "x"}]}', "data[0].paragraphs: found nothing; a list"),
    ("squad 1", document(question=3), "paragraphs[0].qas[0].question: found int '3'; text"),
    ("squad 1", document(id=None), "qas[0].id: found nothing; text"),
    ("squad 1", document(answers={"text": "c"}), "qas[0].answers: found dict; a list"),
    ("squad 1", document(answers=[{"text": "c"}]), "answers[0].answer_start: found; a number"),
    ("squad 1", document(answers=[]), "question '1'; no answer; unanswerable"),
    ("squad 1", squad(*[("1", "q", "c", ["c"])] * 2), "'1'; twice; unique"),
    ("squad 2", squad(("2", "q", "c", None)), "'2'; lacks answers; trained"),
    ("entities", "a B-X\nb\n", "line 2; ['b']; has 2"),
    ("entities", "a\tB-X\nb\t\n", "line 2; a tag is not empty"),
    ("entities", "a B-X\n\nb NN\n", "line 3; 'NN'; BIO: O, B-"),
    ("entities", "a B-X\nb B-\n", "line 2; 'B-'; BIO"),
]
UNSUITABLE = [  # likewise, of `dev`
    ("classification", '{"text": "a", "label": "maybe"}', "line 1; 'maybe'; no, yes"),
    ("multilabel", '{"text": "a", "label": "x, z"}', "line 1; 'z'; x, y"),
    ("classification", '{"text": "a", "label": "no"}\n{"text": ""}', "line 2; no column 'label'"),
    ("classification", '{"text": "a"}\n{"text": "", "label": "no"}', "line 1; no column 'label'"),
    ("entities", "a B-Z\n", "line 1; 'B-Z'; BIO: O, B-X, I-X, B-Y, I-Y; config.data.labels"),
    ("entities", "a S-X\n", "line 1; 'S-X'; BIO"),
    ("entities", "a - B-X\n", "3 columns; has 2"),
    ("squad 1", squad(("1", "q", "c", ["c"]), ("2", "q", "c", None)), "'2'; lacks; others have"),
]
TEACHES_NOTHING = [
    ("classification", ROW, "column label; ['x']; at least two"),
    ("multilabel", '{"text": "a", "label": []}', "column label; []; at least two"),
    ("regression", "", "column label; no rows"),
    ("entities", "a O\nb O\n", "['O']; at least two"),
    ("parts of speech", "a\nb\n", "[]; at least two"),
    ("entities", "", "[]; at least two"),
]


@pytest.mark.parametrize(("kind", "content", "facts"), MALFORMED)
def test_mistakes_are_named_with_their_place_and_what_is_allowed(kind, content, facts, tmp_path):
    with pytest.raises(UserError) as error:
        CASES[kind].make(tmp_path, train=content).read("train")
    assert names(error, f"train{CASES[kind].suffix}", *facts.split("; "))


@pytest.mark.parametrize(("kind", "content", "facts"), UNSUITABLE)
def test_other_splits_must_suit_the_training_data(kind, content, facts, tmp_path):
    with pytest.raises(UserError) as error:
        CASES[kind].make(tmp_path, dev=content).read("dev")
    assert names(error, f"dev{CASES[kind].suffix}", *facts.split("; "))


@pytest.mark.parametrize(("kind", "content", "facts"), TEACHES_NOTHING)
def test_data_that_teach_nothing_are_refused(kind, content, facts, tmp_path):
    task = CASES[kind].make(tmp_path, train=content)
    with pytest.raises(UserError) as error:
        print(task.head)
    assert names(error, f"train{CASES[kind].suffix}", *facts.split("; "))


@pytest.mark.parametrize("kind", ["classification", "multilabel", "entities", "parts of speech"])
def test_labels_may_be_given(kind, tmp_path):
    """They may be more than those of the training file, and are in an order of their own."""
    case = CASES[kind]
    labels = {"entities": ("Z", "Y", "X"), "parts of speech": ("V", "N", "A")}.get(kind)
    labels = labels or ("zzz", *case.make(tmp_path).head.labels)
    head = case.make(tmp_path, labels=labels).head
    if kind == "entities":
        assert head.labels == ("O", *(f"{tag}-{kind}" for kind in "XYZ" for tag in "BIES"))
    else:
        assert head.labels == (labels if kind != "parts of speech" else ("A", "N", "V"))
