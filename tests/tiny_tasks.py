"""A tiny task of every kind: its files, its examples, and what must become of them.

`dev` of each is three or four rows, of which the network is to find every answer; `test` is the
same without answers.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.finetune.tasks import TASKS
from electra_jax.finetune.tasks.base import Task
from electra_jax.finetune.tasks.glue import GlueTask
from electra_jax.finetune.tasks.sentences import Example as Text
from electra_jax.finetune.tasks.sentences import TableTask
from electra_jax.finetune.tasks.squad import SquadTask
from electra_jax.finetune.tasks.squad_files import Answer
from electra_jax.finetune.tasks.squad_files import Example as Question
from electra_jax.finetune.tasks.tagging import Example as Sentence
from electra_jax.finetune.tasks.tagging import TaggingTask

TOKENIZER = WordPiece(
    [*SPECIAL_TOKENS, *"abcde", *(f"##{letter}" for letter in "abcde"), '"'],
    lower_case=True,
    strip_accents=True,
    max_word_chars=200,
)
PAD, UNK, CLS, SEP, MASK, A, B, C, D, E = range(10)


def saved(path: Path, content: str | bytes) -> str:
    """Writes a file, line ends as they are; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def squad(*questions: Any) -> str:
    """The content of a file of SQuAD: (id, question, context, answers or None for unknown)."""
    paragraphs = []
    for key, question, context, answers in questions:
        entry = {"id": key, "question": question}
        if answers is not None:
            entry["answers"] = [{"text": x, "answer_start": context.index(x)} for x in answers]
        paragraphs.append({"context": context, "qas": [entry]})
    return json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]})


def document(**changes: Any) -> str:
    """The content of a file of SQuAD with one question, of which some fields are others."""
    question = {"id": "1", "question": "q", "answers": [{"text": "c", "answer_start": 0}]}
    paragraphs = [{"context": "c", "qas": [question | changes]}]
    return json.dumps({"data": [{"paragraphs": paragraphs}]})


def oracle(features: dict[str, np.ndarray], labels: tuple = ()) -> dict[str, np.ndarray]:
    """Outputs of a network that knows the answers in `features`, and is wrong where none counts."""
    if "start" in features:
        start, end = features["start"], features["end"]
        return {
            "start_top": start[:, None],
            "start_log_prob": np.where(start > 0, 0, -9).astype(np.float32)[:, None],
            "end_top": end[:, None, None],
            "end_log_prob": np.zeros((len(end), 1, 1), np.float32),
            "null_logit": np.where(start > 0, -9, 9).astype(np.float32),
        }
    label = features["label"]
    if label.dtype == np.int32:  # ids; -1 is the last
        label = 9 * np.eye(len(labels), dtype=np.float32)[label]
    elif label.ndim == 2:
        label = label - 0.5
    return {"logits": label.astype(np.float32)}


def random_features(number: int) -> dict[str, np.ndarray]:
    """Rows of eight tokens, with one of three labels each, as if a task had made them."""
    rng = np.random.default_rng(number)
    shape = number, 8
    return {
        "input_ids": rng.integers(5, 50, shape).astype(np.int32),
        "segment_ids": np.ones(shape, np.int32),
        "position_ids": np.broadcast_to(np.arange(8, dtype=np.int32), shape),
        "token_type_ids": np.zeros(shape, np.int32),
        "example": np.arange(number, dtype=np.int32),
        "label": rng.integers(0, 3, number).astype(np.int32),
    }


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of task."""

    kind: type[Task]
    labeled: str  # the content of `train` and `dev`
    unlabeled: str  # that of `test`
    suffix: str  # of the names of the files
    examples: list[Any]  # those of `dev`, in order
    targets: dict[str, Any]  # arrays that the head is trained on, of the rows of `dev`
    answers: list[dict[str, Any]]  # some fields of the answers to them
    floor: float  # the score of the best constant answer
    written: tuple[str, ...]  # the names of the files with predictions of `dev`
    object: dict[str, Any]  # a JSON object that stands for the first example
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # beside the files
    name: str = "task"

    @property
    def key(self) -> str:
        """The task in `config.data.kind`."""
        return next(key for key, kind in TASKS.items() if kind is self.kind)

    def make(self, directory: Path, log: Callable[[str], None] = print, **changes: Any) -> Task:
        """The task, its files below `directory`; `changes` are settings, or contents by split."""
        contents = {"train": self.labeled, "dev": self.labeled, "test": self.unlabeled}
        paths = {
            split: saved(directory / f"{split}{self.suffix}", changes.pop(split, content))
            for split, content in contents.items()
        }
        if self.kind is GlueTask:
            paths = {"source": str(directory)}
        settings = self.kind.Settings(**paths | self.settings | changes)
        return self.kind(self.name, settings, log=log)


PAIRS = [Text("7", "a b", 'c "d', "entailment"), Text("8", "a", "", "not_entailment")]
PAIRS += [Text("9", '"', "b", "not_entailment")]
RTE = "index\tsentence1\tsentence2\tlabel\n" + "".join(
    f"{x.id}\t{x.text_a}\t{x.text_b}\t{x.label}\n" for x in PAIRS
)
TEXTS = [Text("0", "a\u2028b", None, "no"), Text("1", "", None, "yes"), Text("2", "b", None, "yes")]
CONTEXT = "a  b c\nd e"
QUESTIONS = [
    Question("p", "b?", CONTEXT, (Answer("b c\nd", 3),)),
    Question("q", "e?", CONTEXT, (Answer("e", 9),)),
    Question("r", "a?", CONTEXT, ()),
]


def table(labels: list | None = None) -> str:
    """JSON lines of `TEXTS`, with a column of labels if there are any."""
    rows = [{"text": x.text_a} for x in TEXTS]
    if labels:
        rows = [row | {"label": label} for row, label in zip(rows, labels, strict=True)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def table_case(target: str, labels: list, parsed: list, **fields: Any) -> Case:
    """`TEXTS` with labels as they are in the file, and as the task has them."""
    examples = [dataclasses.replace(x, label=y) for x, y in zip(TEXTS, parsed, strict=True)]
    return Case(
        kind=TableTask,
        labeled=table(labels),
        unlabeled=table(),
        suffix=".jsonl",
        settings={"target": target},
        examples=examples,
        answers=[{"id": x.id, "label": x.label} for x in examples],
        written=("dev.jsonl",),
        object={"id": "0", "text": TEXTS[0].text_a},
        **fields,
    )


def squad_case(questions: list[Question], **fields: Any) -> Case:
    """Questions on `CONTEXT`."""
    entries = [(x.id, x.question, x.context, [y.text for y in x.answers]) for x in questions]
    return Case(
        kind=SquadTask,
        labeled=squad(*entries),
        unlabeled=squad(*((*entry[:3], None) for entry in entries)),
        suffix=".json",
        examples=questions,
        answers=[{"id": x.id, "text": x.answers[0].text if x.answers else ""} for x in questions],
        object={"id": "p", "question": "b?", "context": CONTEXT},
        **fields,
    )


def tagging_case(*sentences: tuple[str, str], **fields: Any) -> Case:
    """Sentences, words and tags between spaces."""
    pairs = [(words.split(), tags.split()) for words, tags in sentences]
    lines = [[f"{word} {tag}" for word, tag in zip(*pair, strict=True)] for pair in pairs]
    return Case(
        kind=TaggingTask,
        labeled="\n\n".join(map("\n".join, lines)),
        unlabeled="\n\n".join("\n".join(words) for words, _ in pairs),
        suffix=".txt",
        examples=[Sentence(str(i), tuple(x), tuple(y)) for i, (x, y) in enumerate(pairs)],
        answers=[{"id": str(i), "words": x, "tags": y} for i, (x, y) in enumerate(pairs)],
        written=("dev.conll", "dev.jsonl"),
        object={"id": "0", "words": pairs[0][0]},
        **fields,
    )


CASES = {
    "glue": Case(
        kind=GlueTask,
        name="rte",
        labeled=RTE,
        unlabeled=RTE.replace("\tlabel", "\tx"),
        suffix=".tsv",
        examples=PAIRS,
        targets={"label": [0, 1, 1]},
        answers=[{"id": x.id, "label": x.label} for x in PAIRS],
        floor=2 / 3,
        written=("dev.jsonl",),
        object={"id": "7", "sentence1": "a b", "sentence2": 'c "d'},
    ),
    "classification": table_case(
        "classification",
        ["no", "yes", "yes"],
        ["no", "yes", "yes"],
        targets={"label": [0, 1, 1]},
        floor=2 / 3,
    ),
    "multilabel": table_case(
        "multilabel",
        ["x, y", ["x"], []],
        [("x", "y"), ("x",), ()],
        targets={"label": [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]},
        floor=4 / 6,  # always x: two of three are right, and two of three found
    ),
    "regression": table_case(
        "regression",
        [-10, "30", 0.0],
        [-10.0, 30.0, 0.0],
        targets={"label": [0.0, 1.0, 0.25]},
        floor=0.0,
    ),
    "squad 1": squad_case(
        QUESTIONS[:2],
        targets={"start": [5, 8], "end": [7, 8], "is_impossible": [0, 0]},
        floor=0.0,
        written=("dev.predictions.json", "dev.nbest.json"),
    ),
    "squad 2": squad_case(
        QUESTIONS,
        settings={"unanswerable": True},
        targets={"start": [5, 8, 0], "end": [7, 8, 0], "is_impossible": [0, 0, 1]},
        floor=100 / 3,
        written=("dev.predictions.json", "dev.nbest.json", "dev.null_odds.json"),
    ),
    "entities": tagging_case(
        ("a bb \u200b", "B-X I-X O"),
        ("c", "B-Y"),
        targets={"label": [[-1, 1, 3, -1, 0, -1], [-1, 8, -1, -1, -1, -1]]},
        floor=0.0,
    ),
    "parts of speech": tagging_case(
        ("a bb \u200b", "N V N"),
        ("c", "N"),
        targets={"label": [[-1, 0, 1, -1, 0, -1], [-1, 0, -1, -1, -1, -1]]},
        floor=0.75,
    ),
}
