"""Tags, schemes and entities, and words in columns. See also test_tasks."""

from pathlib import Path

import numpy as np
import pytest
from tiny_tasks import CLS, PAD, SEP, TOKENIZER, UNK, A, B, C, oracle, saved

from electra_jax.finetune.tasks.tag_schemes import convert, entities, entity_scores, type_of
from electra_jax.finetune.tasks.tagging import Example, TaggingTask

BB = TOKENIZER.vocab.index("##b")
TRAIN = "a B-PER\nb I-PER\nc O\n\na B-LOC\n"


def tagging(tmp_path: Path, train: str = TRAIN, log=print, **settings) -> TaggingTask:
    path = saved(tmp_path / "train.txt", train)
    return TaggingTask("tagging", TaggingTask.Settings(train=path, **settings), log=log)


# Tags and entities


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("", []),
        ("O O", []),
        ("B-x I-x O B-x", [(0, 2, "x"), (3, 4, "x")]),
        ("B-x B-x", [(0, 1, "x"), (1, 2, "x")]),
        ("I-x I-x O I-y", [(0, 2, "x"), (3, 4, "y")]),
        ("B-x I-y I-y", [(0, 1, "x"), (1, 3, "y")]),
        ("B-x I-x E-x S-x", [(0, 3, "x"), (3, 4, "x")]),
        ("E-x E-x I-x", [(0, 1, "x"), (1, 2, "x"), (2, 3, "x")]),
        ("S-x I-x", [(0, 1, "x"), (1, 2, "x")]),
        ("B-a-b I-a-b", [(0, 2, "a-b")]),
    ],
)
def test_entities_by_the_rules_of_conlleval(tags, expected):
    assert entities(tags.split()) == expected


def test_types_are_named_by_tags_or_as_they_are():
    labels = ["O", "B-PER", "E-a-b", "PER", "X-1"]
    assert [type_of(x, "BIOES") for x in labels] == ["", "PER", "a-b", "PER", "X-1"]
    assert [type_of(x, "plain") for x in labels] == labels


def test_scores_are_those_of_seqeval():
    """Of seqeval 1.2.2 on these sequences, computed once."""
    expected = {
        "BI": (0.6891385767790262, 0.673992673992674, 0.7049808429118773),
        "BIES": (0.7724425887265136, 0.7644628099173554, 0.7805907172995781),
    }
    rng = np.random.default_rng(7)

    def drawn(prefixes: str, count: int) -> list[str]:
        return [
            "O"
            if rng.random() < 0.4
            else f"{rng.choice(list(prefixes))}-{rng.choice(['PER', 'LOC'])}"
            for _ in range(count)
        ]

    for prefixes, scores in expected.items():
        gold = [drawn(prefixes, int(count)) for count in rng.integers(1, 15, 60)]
        guess = [
            [
                tag if rng.random() < 0.7 else other
                for tag, other in zip(tags, drawn(prefixes, len(tags)), strict=True)
            ]
            for tags in gold
        ]
        found = entity_scores(gold, guess)
        names = ("f1", "precision", "recall")
        assert found == pytest.approx(dict(zip(names, scores, strict=True)), abs=1e-12)


def test_schemes_hold_the_same_entities():
    rng = np.random.default_rng(0)
    kinds = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("x", "a-x"))]
    for _ in range(200):
        tags = rng.choice(kinds, rng.integers(0, 9)).tolist()
        for scheme in ("BIO", "IOB1", "BIOES"):
            assert entities(convert(tags, scheme)) == entities(tags)
    assert convert(["B-x", "I-x", "B-x", "O", "B-y"], "IOB1") == ["I-x", "I-x", "B-x", "O", "I-y"]
    assert convert(["I-x", "I-x", "B-x", "O"], "BIOES") == ["B-x", "E-x", "S-x", "O"]
    assert convert(["NN", "O"], "plain") == ["NN", "O"]


def test_scores_without_entities_are_zero():
    zero = {"f1": 0.0, "precision": 0.0, "recall": 0.0}
    assert entity_scores([], []) == entity_scores([[], ["O"]], [[], ["O"]]) == zero
    assert entity_scores([["B-x"]], [["O"]]) == entity_scores([["O"]], [["B-x"]]) == zero


# Files


def test_columns_sentences_and_documents(tmp_path):
    text = (
        "\ufeff-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nthe\u00a0end  DT I-NP O\n\n\n\n"
        "-DOCSTART- -X- O O\r\n\r\n\x7f SYM O O\r\n\u200b SYM O B-LOC\r\n"
    )
    task = tagging(tmp_path, text)
    assert task.read("train") == [
        Example("0", ("EU", "the\u00a0end"), ("B-ORG", "O")),
        Example("1", ("\x7f", "\u200b"), ("O", "B-LOC")),
    ]
    task = tagging(tmp_path, "Hà Nội\tB-LOC\n \tO\n\t\t\n\tO\n")
    assert task.read("train") == [
        Example("0", ("Hà Nội", " "), ("B-LOC", "O")),
        Example("1", ("",), ("O",)),
    ]


@pytest.mark.parametrize(
    ("text", "scheme", "labels"),
    [
        (TRAIN, "BIO", 9),
        ("a S-PER\nb O\n", "BIOES", 5),
        ("a I-PER\nb I-PER\nc B-PER\nd O\n", "IOB1", 5),
        ("a I-PER\nb O\nc B-PER\n", "BIO", 5),  # with a mistake
        ("a DT\nb NN\n", "plain", 2),
    ],
)
def test_the_scheme_is_that_of_the_training_file(tmp_path, text, scheme, labels):
    task = tagging(tmp_path, text)
    assert task.scheme == scheme
    assert len(task.head.labels) == labels
    assert task.main_metric == ("accuracy" if scheme == "plain" else "f1")
    examples = task.read("train")
    rows = task.features(examples, TOKENIZER, 16, training=False)
    predictions = task.predict(examples, rows, oracle(rows, task.head.labels))
    assert [list(guess.tags) for guess in predictions] == [
        convert(example.tags, scheme) for example in examples
    ]
    assert set(task.score(examples, predictions).values()) == {1.0}


def test_fewer_columns_than_in_training_are_no_tags_and_said(tmp_path):
    log: list[str] = []
    files = {
        "dev": saved(tmp_path / "dev.txt", "a DT B-PER\n"),
        "test": saved(tmp_path / "test.txt", "a B-PER\n"),
    }
    task = tagging(tmp_path, "a X B-PER\nb X O\n", log.append, **files)
    assert (task.eval_splits, task.test_splits) == (("dev",), ("test",))
    assert len(log) == 1
    assert log[0].startswith(f"{files['test']}: 2 columns, the training file has 3")


def test_tags_that_continue_nothing_are_counted(tmp_path):
    log: list[str] = []
    task = tagging(tmp_path, "a B-x\nb O\n\nc I-x\nc I-x\nb B-x\nb I-y\n", log.append)
    task.read("train")
    assert len(log) == 1
    assert "2 tags continue or end an entity that is not there, the first in line 4" in log[0]


# Features, predictions, scores


def test_words_are_at_their_first_tokens_and_one_without_tokens_is_unknown(tmp_path):
    task = tagging(tmp_path)
    tags = ("B-PER", "I-PER", "O", "B-LOC")
    examples = [Example("0", ("a", "bb", "\x00", "c"), tags), Example("1", (), ())]
    rows = task.features(examples, TOKENIZER, 8, training=False)
    assert rows["input_ids"].tolist() == [[CLS, A, B, BB, UNK, C, SEP, PAD], [CLS, SEP] + 6 * [PAD]]
    assert rows["word"].tolist() == [[-1, 0, 1, -1, 2, 3, -1, -1], [-1] * 8]
    ids = [task.head.labels.index(tag) for tag in ("B-PER", "E-PER", "O", "S-LOC")]
    label = [-1, ids[0], ids[1], -1, ids[2], ids[3], -1, -1]
    assert rows["label"].tolist() == [label, [-1] * 8]
    assert "word" not in task.features(examples, TOKENIZER, 8, training=True)


@pytest.mark.parametrize("length", [3, 4, 5, 9, 64])
def test_long_sentences_lose_no_word(tmp_path, length):
    rng = np.random.default_rng(length)
    task = tagging(tmp_path)
    words = rng.choice(["a", "bb", "bbbb", "\x01", "c"], 40).tolist()
    tags = rng.choice(["O", "B-PER", "I-PER", "B-LOC"], 40).tolist()
    examples = [
        Example("0", tuple(words), tuple(convert(tags, "BIO"))),
        Example("1", (), ()),
        Example("2", ("a",), ("B-LOC",)),
    ]
    for training in (True, False):
        rows = task.features(examples, TOKENIZER, length, training=training)
        counts = np.bincount(rows["example"], (rows["label"] >= 0).sum(axis=1))
        assert counts.tolist() == [40, 0, 1]
    assert [rows["example"].tolist().count(i) for i in (1, 2)] == [1, 1]
    predictions = task.predict(examples, rows, oracle(rows, task.head.labels))
    assert [guess.tags for guess in predictions] == [example.tags for example in examples]
    assert task.score(examples, predictions)["f1"] == 1.0
    # In the middle of a long sentence, at least a quarter of a window is shown on both sides.
    if length == 9:
        for row in np.flatnonzero(rows["example"] == 0)[1:-1]:
            places = np.flatnonzero(rows["word"][row] >= 0)
            assert places.size == 0 or (places.min() >= 2 and places.max() <= 6)


def test_scores_count_whole_entities(tmp_path):
    task = tagging(tmp_path)
    examples = [
        Example("0", ("a", "b", "c", "a"), ("B-PER", "I-PER", "O", "B-LOC")),
        Example("1", ("a",), ("O",)),
        Example("2", ("a",), None),
    ]
    rows = task.features(examples, TOKENIZER, 8, training=False)
    assert "label" not in rows
    logits = np.zeros((3, 8, len(task.head.labels)), np.float32)
    for row, tags in enumerate([["S-PER", "O", "O", "S-LOC"], ["S-PER"], ["S-LOC"]]):
        for place, tag in enumerate(tags, 1):
            logits[row, place, task.head.labels.index(tag)] = np.log(8)
    predictions = task.predict(examples, rows, {"logits": logits})
    expected = [("B-PER", "O", "O", "B-LOC"), ("B-PER",), ("B-LOC",)]
    assert [guess.tags for guess in predictions] == expected
    assert predictions[0].entities == ((0, 1, "PER"), (3, 4, "LOC"))
    assert predictions[0].probabilities == pytest.approx([8 / 16] * 4)
    # One of the three found is right, one of two is found; the unlabeled sentence does not count.
    scores = task.score(examples, predictions)
    assert scores == pytest.approx({"f1": 0.4, "precision": 1 / 3, "recall": 0.5, "accuracy": 0.4})


def test_words_and_tags_are_written_as_columns_that_can_be_read(tmp_path):
    task = tagging(tmp_path, test=saved(tmp_path / "test.txt", "a\nbb\n\n\x01\n"))
    examples = task.read("test")
    rows = task.features(examples, TOKENIZER, 8, training=False)
    logits = np.zeros((2, 8, len(task.head.labels)), np.float32)
    logits[0, [1, 2], [task.head.labels.index(tag) for tag in ("B-PER", "E-PER")]] = 1
    predictions = task.predict(examples, rows, {"logits": logits})
    columns, _ = task.write(predictions, tmp_path / "out", "test")
    assert columns.read_text() == "a\tB-PER\nbb\tI-PER\n\n\x01\tO\n"
    assert predictions[0].entities == ((0, 2, "PER"),)
    again = TaggingTask.Settings(dev=str(columns), scheme="BIO", labels=("PER", "LOC"))
    tags = [example.tags for example in TaggingTask("again", again).read("dev")]
    assert tags == [guess.tags for guess in predictions]
