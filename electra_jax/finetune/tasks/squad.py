"""Question answering in the format of SQuAD: answers are spans of a text (spec 6.4).

A context that does not fit is divided into windows that overlap. Answers are ranges of characters
of the context from the beginning to the end: targets follow from them, predictions are them. So a
predicted text is `context[start:end]`, in every script, with all its spaces and accents.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from electra_jax.data.features import Arrays, pack, windows
from electra_jax.data.tables import is_json_lines, text_cell
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.finetune.heads.span import Spans
from electra_jax.finetune.scores import Score
from electra_jax.finetune.tasks import squad_files, squad_scores, squad_spans
from electra_jax.finetune.tasks.base import TRAIN, Files, Log, Scores, Task
from electra_jax.finetune.tasks.squad_files import Example
from electra_jax.finetune.tasks.squad_spans import Span
from electra_jax.finetune.tasks.squad_windows import Window, characters, encode_context, find_target
from electra_jax.settings import COUNT, one_of, setting

MAX_QUESTION = 64  # tokens of a question that are kept
F1 = Score("F1", "%", console="f1")
EXACT = dataclasses.replace(F1, label="exact match", console="exact")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is answered to the question `id`."""

    id: str
    text: str  # "" for no answer, as where `null_odds` are above the threshold
    null_odds: float  # a logit of "there is no answer"; 0 where there always is one
    n_best: tuple[Span, ...]  # with different texts, the best first; none of them is empty


class SquadTask(Task):
    """Questions on texts. The file of a split may also be `tfds:squad/v1.1` and the like."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Files):
        """What may be answered, and how long contexts are divided."""

        unanswerable: bool = setting(False, "questions may have no answer, as in SQuAD 2.0")
        # The original's is that of its joint head; between independent ends, 0 is neutral.
        null_threshold: float | None = setting(
            None, "greater null odds mean no answer; default: -2.75, or 0"
        )
        # A vocabulary that cuts a language into small pieces needs more than English does.
        max_answer_length: int = setting(30, "of predictions, in tokens", COUNT)
        doc_stride: int = setting(
            128, "tokens from a window of a long text to the next, if that leaves no gap", COUNT
        )
        # The published numbers of the original come from `question`.
        answerability: str = setting(
            "window",
            "of windows that lack the answer: there is none; question: as in the question",
            one_of("window", "question"),
        )

    settings: Settings

    def __init__(self, name: str, settings: Settings, style: str = "original", log: Log = print):
        super().__init__(name, settings, style, log)
        self.head = Spans(style=style)
        self.metrics = {"f1": F1, "exact" if settings.unanswerable else "exact_match": EXACT}
        given = settings.null_threshold
        self.null_threshold = self.head.kind.null_threshold if given is None else float(given)

    def is_labeled(self, example: Example) -> bool:
        """See `Task.is_labeled`."""
        return example.answers is not None

    def read_file(self, split: str, path: str) -> list[Example]:
        """See `Task.read`. Answers may be anywhere, even where their text is not.

        Either all questions have answers or none has; these can only be predicted.
        """
        unanswerable, is_training = self.settings.unanswerable, split == TRAIN
        if path.startswith("tfds:"):
            examples = list(squad_files.read_squad_data_set(path, split, unanswerable))
        else:
            _, examples = squad_files.read_squad(path)
        squad_files.check_ids(examples, path)
        is_labeled = is_training or any(map(self.is_labeled, examples))
        for example in examples:
            if example.answers is None and is_labeled:
                others = "the network cannot be trained on it" if is_training else "others have"
                raise UserError(f"{path}: question {example.id!r} lacks answers, but {others}")
            if example.answers == () and not unanswerable:
                raise UserError(
                    f"{path}: question {example.id!r} has no answer, which only data sets with "
                    "unanswerable questions may have"
                )
        return examples

    def features(
        self, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, training: bool
    ) -> Arrays:
        """See `Task.features`. A row is a window.

        For predictions there are also, int32 [N, L], `char_start` and `char_end`, the range of each
        token of the context (-1 elsewhere), and `max_context`, 1 where no other window shows a
        token with more around it. Rows to train on leave out questions whose answers are not in
        their context; the target is the first answer that is.
        """
        questions = tokenizer.encode_batch([example.question for example in examples])
        contexts = {x: encode_context(tokenizer, x) for x in {x.context: None for x in examples}}
        rows: list[Window] = []
        lost = 0
        for index, (example, question) in enumerate(zip(examples, questions, strict=True)):
            context, question = contexts[example.context], question[:MAX_QUESTION]
            target = find_target(example, context)
            if training and example.answers and target is None:
                lost += 1
                continue
            room = max_length - len(question) - 3
            if room < 1:
                raise UserError(
                    f"max_length is {max_length}; with questions of up to {MAX_QUESTION} tokens, "
                    f"it must be greater than {MAX_QUESTION + 3}"
                )
            for begin, end in windows(len(context.ids), room, self.settings.doc_stride):
                rows.append(Window(index, question, context, begin, end, target))
        if lost:
            self.log(f"left out: {lost:,} questions whose answers are not in their contexts")
        segments = [(row.question, row.context.ids[row.begin : row.end]) for row in rows]
        arrays = pack(tokenizer, segments, max_length)
        # The last [SEP] is allowed, too, as in the original; no prediction ends there.
        arrays["allowed"] = arrays["token_type_ids"].copy()
        arrays["allowed"][:, 0] = 1
        arrays["example"] = np.array([row.example for row in rows], np.int32)
        if all(map(self.is_labeled, examples)):
            spans = np.array([row.span for row in rows], np.int32).reshape(-1, 2)
            arrays["start"], arrays["end"] = spans.T
            none = np.array([not examples[row.example].answers for row in rows], bool)
            if self.settings.answerability == "window":
                none |= arrays["start"] == 0
            arrays["is_impossible"] = none.astype(np.int32)
        return arrays if training else arrays | characters(rows, max_length)

    def predict(
        self, examples: Sequence[Example], features: Arrays, outputs: Arrays
    ) -> list[Prediction]:
        """See `Task.predict`. Spans are ranked over all windows of a question."""
        proposals = squad_spans.propose(features, outputs, self.settings.max_answer_length)
        odds = squad_spans.null_odds(features, outputs, len(examples), proposals).tolist()
        unanswerable, threshold = self.settings.unanswerable, self.null_threshold
        predictions = []
        for index, (example, null) in enumerate(zip(examples, odds, strict=True)):
            best = ()
            if index in proposals:
                best = squad_spans.n_best(example.context, proposals[index])
            text = best[0].text if best and not (unanswerable and null > threshold) else ""
            predictions.append(Prediction(example.id, text, null if unanswerable else 0.0, best))
        return predictions

    def compare(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> Scores:
        """See `Task.compare`; the keys of the official programs, in percent."""
        gold = {example.id: [answer.text for answer in example.answers] for example in examples}
        texts = {guess.id: guess.n_best[0].text if guess.n_best else "" for guess in predictions}
        if not self.settings.unanswerable:
            return squad_scores.score_v1(gold, texts)
        odds = {guess.id: guess.null_odds for guess in predictions}
        return squad_scores.score_v2(gold, texts, odds, self.null_threshold)

    def floor(self, examples: Sequence[Example]) -> float:
        """See `Task.floor`: the score of never giving an answer."""
        return 100 * sum(not example.answers for example in examples) / len(examples)

    def write(self, predictions: Sequence[Prediction], directory: Path, split: str) -> list[Path]:
        """Writes JSON objects by question id.

        `SPLIT.predictions.json` has the answers, for the official programs and servers;
        `SPLIT.nbest.json` possible answers with characters, scores and probabilities; and
        `SPLIT.null_odds.json`, where questions may have no answer, the null odds.
        """
        contents: dict[str, dict[str, Any]] = {
            "predictions": {guess.id: guess.text for guess in predictions},
            "nbest": {guess.id: [vars(span) for span in guess.n_best] for guess in predictions},
        }
        if self.settings.unanswerable:
            contents["null_odds"] = {guess.id: guess.null_odds for guess in predictions}
        return [
            write_text(directory / f"{split}.{name}.json", json.dumps(content, indent=1) + "\n")
            for name, content in contents.items()
        ]

    def example(self, number: int, values: Mapping[str, Any], where: str) -> Example:
        """See `Task.example`: an object with `question` and `context`."""
        question, context = (text_cell(values, name, where) for name in ("question", "context"))
        return Example(str(values.get("id", number)), question, context, None)

    def unlabeled(self, path: str, by_line: bool = False) -> list[Example]:
        """See `Task.unlabeled`: a file in SQuAD's format, or JSON lines."""
        if is_json_lines(path):
            return super().unlabeled(path)
        _, examples = squad_files.read_squad(path)
        return [dataclasses.replace(example, answers=None) for example in examples]

    def answer(self, prediction: Prediction) -> dict[str, Any]:
        """See `Task.answer`."""
        best = vars(prediction.n_best[0]) if prediction.text else {}
        place = {name: best.get(name) for name in ("start", "end", "probability")}
        n_best = [vars(span) for span in prediction.n_best]
        odds = prediction.null_odds
        return dict(id=prediction.id, text=prediction.text, **place, null_odds=odds, n_best=n_best)
