"""A pre-training run on new texts: replaced tokens detected, masks filled, vectors.

Texts longer than the rows of the training are cut into pieces, each read by itself; nothing is
left out. A new mode is a class here and a line in `MODES`.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from electra_jax.data import layout, tokenizers
from electra_jax.data.features import Arrays, FeatureRows, pack, windows
from electra_jax.data.opening import read_lines
from electra_jax.data.store import TokenStore, open_store
from electra_jax.data.tables import is_table, read_table, text_cell
from electra_jax.data.tokenizers.base import encode_with_special_tokens
from electra_jax.errors import UserError
from electra_jax.inference import network_outputs
from electra_jax.inference.request import Answer, Model, Request
from electra_jax.modeling.params import Params
from electra_jax.objectives import make_objective
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.metrics import area_under_curve, score_histogram
from electra_jax.reporting import gallery
from electra_jax.training.prediction import Predict, predict_rows

# On a CPU, XLA takes longer to make a program fast than a slow one takes for a few rows.
QUICK = {"xla_backend_optimization_level": 0}
FEW_ROWS = 1000


class Pieces(NamedTuple):
    """Texts as rows."""

    arrays: Arrays  # fields of a batch, [N, L]
    text: np.ndarray  # the number of the text that each row belongs to, [N]
    offsets: list[list[tuple[int, int]]]  # of each row, the ranges of characters of its tokens


class TextModel(Model):
    """What all modes share: examples are texts, rows go through the networks of the run."""

    def __init__(self, config: ConfigDict, request: Request):
        self.config, self.length = config, config.data.sequence_length
        self.tokenizer = tokenizers.load(request.workdir / "tokenizer")
        counts = np.ones(self.tokenizer.vocab_size, int)  # the text's own are not in a run
        self.objective = make_objective(config, self.tokenizer, counts)
        self.top_k = min(request.top_k, self.tokenizer.vocab_size)
        outputs = self.outputs(request)
        super().__init__(request.workdir, request.step)
        options = QUICK if jax.default_backend() == "cpu" else None
        self.quick = Predict(self.mesh, outputs, options)
        self.thorough = Predict(self.mesh, outputs)

    @abstractmethod
    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """The function of parameters and a batch that is compiled.

        Raises UserError where the run lacks what the mode needs.
        """

    def run(self, rows: Any) -> Arrays:
        """The outputs for all rows."""
        predict = self.quick if len(rows) < FEW_ROWS else self.thorough
        return predict_rows(predict, self.params, rows, self.batch_size)

    def read(self, path: str) -> Any:
        """The lines of a text file, or the column `text` of a table."""
        if not is_table(path):
            return read_lines(path)
        return [self.example(0, row, f"{path}, line {line}") for line, row in read_table(path)]

    def example(self, number: int, values: Mapping[str, Any], where: str) -> str:
        """The text of a JSON object."""
        return text_cell(values, "text", where)

    def encode(self, text: str) -> tuple[Sequence[int], Any, Sequence[tuple[int, int]]]:
        """Token ids, tokens, and the ranges of characters that they stand for."""
        return self.tokenizer.encode_with_offsets(text)

    def cut(self, texts: Sequence[str]) -> Pieces:
        """Rows of at most `length` tokens, at least one for each text."""
        segments, numbers, offsets = [], [], []
        for number, text in enumerate(texts):
            ids, _, ranges = self.encode(text)
            for begin, end in windows(len(ids), self.length - 2, self.length - 2):
                segments.append((ids[begin:end],))
                numbers.append(number)
                offsets.append(ranges[begin:end])
        return Pieces(pack(self.tokenizer, segments, self.length), np.array(numbers), offsets)


class Detect(TextModel):
    """How likely each token is to be a replacement."""

    endings = (".jsonl", ".json", ".html")
    flags = ("replace", "top_k")

    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """Logits of the text as it is, or after the generator has replaced some tokens."""
        if not isinstance(self.objective, ReplacedTokenDetection):
            raise UserError(
                f"--mode=detect needs a discriminator; this run has config.objective = "
                f"{self.config.objective!r}; allowed: fill, embed"
            )
        self.replaces, self.histogram = request.replace, np.zeros((2, 1))
        if not self.replaces:
            return functools.partial(network_outputs.detected, self.objective)
        if self.config.generator.kind == "unigram":
            raise UserError(
                "--replace needs the frequencies of tokens, which are not in a run's directory "
                "where config.generator.kind = 'unigram'"
            )
        fixed = self.objective, self.config.seed, self.top_k
        return functools.partial(network_outputs.corrupted, *fixed)

    def read(self, path: str) -> Any:
        """As `TextModel.read`; or the token store at `path`, whose held-out rows are read."""
        return open_store(path) if Path(path, "manifest.json").exists() else super().read(path)

    def respond(self, texts: Sequence[str] | TokenStore) -> list[Answer]:
        """The tokens of each text; of each piece of a row of a store, whose text is not known."""
        if isinstance(texts, TokenStore):
            if texts.tokenizer.hash != self.tokenizer.hash:
                raise UserError("--input is a token store with another tokenizer than the run's")
            kind, seed = self.config.data.layout, self.config.seed
            rows = layout.rows(texts, "held_out", self.length, kind, seed=seed)
            by_row = self.shaded(rows, rows.batch(np.arange(len(rows))))
            return [{"tokens": tokens} for row in by_row for tokens in row]
        pieces = self.cut(texts)
        by_row = self.shaded(FeatureRows(pieces.arrays), pieces.arrays)
        answers = [{"text": text, "tokens": []} for text in texts]
        for row, number in enumerate(pieces.text):
            for token, (start, end) in zip(by_row[row][0], pieces.offsets[row], strict=True):
                answers[number]["tokens"].append(token | {"start": start, "end": end})
        return answers

    def shaded(self, rows: Any, arrays: Arrays) -> list[list[list[gallery.Token]]]:
        """The tokens of each piece of each row."""
        outputs = self.run(rows)
        if self.replaces:
            is_replaced = outputs["shown_ids"] != arrays["input_ids"]
            of_each = (outputs["logits"], is_replaced, outputs["loss_mask"])
            found = score_histogram(*map(jnp.asarray, of_each))
            self.histogram = self.histogram + np.asarray(found)
        numbers = range(len(arrays["input_ids"]))
        return [gallery.shaded(self.tokenizer, arrays, outputs, row) for row in numbers]

    def summary(self) -> str:
        """The AUC over all texts, where tokens were replaced."""
        counted, replaced = int(self.histogram.sum()), int(self.histogram[1].sum())
        if not counted:
            return ""
        area = area_under_curve(self.histogram)
        shown = "not defined" if area is None else f"{area:.4f}"
        return f"AUC {shown} over {counted:,} tokens, {replaced:,} of them replaced"


class Fill(TextModel):
    """What the generator proposes for every `[MASK]`."""

    flags = ("top_k",)

    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """The most probable tokens at some positions."""
        if self.objective.model.generator is None:
            raise UserError(
                f"--mode=fill needs a generator; this run has config.generator.kind = "
                f"{self.config.generator.kind!r}; allowed: detect, embed"
            )
        return functools.partial(network_outputs.filled, self.objective, self.top_k)

    def encode(self, text: str) -> tuple[Sequence[int], Any, Sequence[tuple[int, int]]]:
        """As `TextModel.encode`; `[MASK]` in the text is the special token."""
        return encode_with_special_tokens(self.tokenizer, text)

    def respond(self, texts: Sequence[str]) -> list[Answer]:
        """The proposals for each mask of each text."""
        pieces = self.cut(texts)
        ids = pieces.arrays["input_ids"]
        masks = [np.flatnonzero(row == self.tokenizer.mask_id) for row in ids]
        slots = 1 << (max(map(len, masks)) - 1).bit_length()  # few sizes to compile for
        positions = np.zeros((len(ids), max(1, slots)), np.int32)
        for row, places in enumerate(masks):
            positions[row, : len(places)] = places
        outputs = self.run(FeatureRows(pieces.arrays | {"positions": positions}))
        answers = [{"text": text, "masks": []} for text in texts]
        for row, places in enumerate(masks):
            for slot, place in enumerate(places):
                start, end = pieces.offsets[row][place - 1]
                proposed = [
                    {"token": token, "probability": share}
                    for token, share in gallery.proposals(self.tokenizer, outputs, row, slot)
                ]
                mask = {"start": start, "end": end, "proposals": proposed}
                answers[pieces.text[row]]["masks"].append(mask)
        return answers


class Embed(TextModel):
    """A vector for each text."""

    endings = (".npy", ".jsonl")
    flags = ("pooling",)

    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """Sums of states of the network that is kept."""
        self.pooling = request.pooling
        return functools.partial(network_outputs.embedded, self.objective, self.pooling)

    def respond(self, texts: Sequence[str]) -> list[Answer]:
        """The mean over all tokens of a text; or the state of the first `[CLS]`."""
        pieces = self.cut(texts)
        outputs = self.run(FeatureRows(pieces.arrays))
        if self.pooling == "cls":  # of a text's first piece
            _, first = np.unique(pieces.text, return_index=True)
            return [{"vector": vector.tolist()} for vector in outputs["sums"][first]]
        totals = np.zeros((len(texts), outputs["sums"].shape[1]))
        weights = np.zeros((len(texts), 1))
        np.add.at(totals, pieces.text, outputs["sums"])
        np.add.at(weights, pieces.text, outputs["weights"][:, None])
        return [{"vector": vector.tolist()} for vector in totals / weights]


MODES: dict[str, type[Model]] = {"detect": Detect, "fill": Fill, "embed": Embed}
