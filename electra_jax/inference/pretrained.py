"""A pre-training run on new texts: replaced tokens detected, masks filled, vectors.

Texts longer than the rows of the training are cut into pieces, each read by itself; nothing is
left out. A new mode is a class here and a line in `MODES`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from electra_jax.config import get_config
from electra_jax.data import layout, tokenizers
from electra_jax.data.features import Arrays, FeatureRows, pack, windows
from electra_jax.data.opening import read_lines
from electra_jax.data.store import TokenStore, open_store
from electra_jax.data.tables import is_table, read_table, text_cell
from electra_jax.data.tokenizers.base import Tokenizer, encode_with_special_tokens
from electra_jax.errors import UserError
from electra_jax.inference import network_outputs
from electra_jax.inference.request import Answer, Model, Request
from electra_jax.modeling.params import Params
from electra_jax.objectives import make_objective
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.metrics import area_under_curve, score_histogram
from electra_jax.reporting import gallery
from electra_jax.sharding.mesh import everywhere, make_mesh
from electra_jax.training.checkpoint import restore_params
from electra_jax.training.prediction import Predict, predict_rows

# On a CPU, XLA takes longer to make a program fast than a slow one takes for a few rows.
QUICK = {"xla_backend_optimization_level": 0}
FEW_ROWS = 1000


@dataclass(frozen=True)
class Pieces:
    """Texts as rows.

    Attributes:
      arrays: fields of a batch, [N, L].
      text: the number of the text that each row belongs to, [N].
      offsets: of each row, the ranges of characters of its tokens.
    """

    arrays: Arrays
    text: np.ndarray
    offsets: list[list[tuple[int, int]]]


class TextModel(Model):
    """What all modes share: examples are texts, rows go through the networks of the run.

    Attributes:
      config, tokenizer, objective: of the run.
      params: on all devices.
      length: of a row, in tokens.
    """

    def __init__(self, config: ConfigDict, request: Request):
        self.config = config
        self.tokenizer = tokenizers.load(request.workdir / "tokenizer")
        counts = np.ones(self.tokenizer.vocab_size, int)  # the text's own are not in a run
        self.objective = make_objective(config, self.tokenizer, counts)
        self.require(request)
        _, params = restore_params(request.workdir / "checkpoints", request.step)
        mesh = make_mesh(get_config().parallel)  # the devices here, not those of the training
        self.params = everywhere(mesh, params)
        self.rows_at_once = -(request.batch_size // -mesh.size) * mesh.size
        self.length = config.data.sequence_length
        outputs = self.outputs(request)
        self.thorough = self.quick = Predict(mesh, outputs)
        if is_cpu(mesh):
            self.quick = Predict(mesh, outputs, QUICK)

    def require(self, request: Request) -> None:
        """Raises UserError where the run lacks what the mode needs."""

    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """The function of parameters and a batch that is compiled."""
        raise NotImplementedError

    def run(self, rows: Any) -> Arrays:
        """The outputs for all rows."""
        predict = self.quick if len(rows) < FEW_ROWS else self.thorough
        return predict_rows(predict, self.params, rows, self.rows_at_once)

    def read(self, path: str) -> Any:
        """The lines of a text file, or the column `text` of a table."""
        if not is_table(path):
            return read_lines(path)
        return [
            text_cell(values, "text", f"{path}, line {line}") for line, values in read_table(path)
        ]

    def example(self, number: int, values: Mapping[str, Any], where: str) -> str:
        """The text of a JSON object."""
        return text_cell(values, "text", where)


class Detect(TextModel):
    """How likely each token is to be a replacement."""

    endings = (".jsonl", ".json", ".html")
    flags = ("replace", "top_k")

    def require(self, request: Request) -> None:
        """Raises UserError where there is no discriminator, or no way to replace tokens."""
        if not isinstance(self.objective, ReplacedTokenDetection):
            raise UserError(
                f"--mode=detect needs a discriminator; this run has config.objective = "
                f"{self.config.objective!r}; allowed: fill, embed"
            )
        if request.replace and self.config.generator.kind == "unigram":
            raise UserError(
                "--replace needs the frequencies of tokens, which are not in a run's directory "
                "where config.generator.kind = 'unigram'"
            )

    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """Logits of the text as it is, or after the generator has replaced some tokens."""
        self.replaces, self.histogram = request.replace, np.zeros((2, 1))
        if not self.replaces:
            return functools.partial(network_outputs.detected, self.objective)
        top_k = min(request.top_k, self.tokenizer.vocab_size)
        return functools.partial(network_outputs.corrupted, self.objective, self.config.seed, top_k)

    def read(self, path: str) -> Any:
        """As `TextModel.read`; or the token store at `path`, whose held-out rows are read."""
        return open_store(path) if Path(path, "manifest.json").exists() else super().read(path)

    def respond(self, texts: Sequence[str] | TokenStore) -> list[Answer]:
        """The tokens of each text; of each piece of a row of a store, whose text is not known."""
        if isinstance(texts, TokenStore):
            rows = held_out(texts, self.config, self.tokenizer)
            arrays = rows.batch(np.arange(len(rows)))
            by_row = self.shaded(rows, arrays)
            return [{"tokens": tokens} for row in by_row for tokens in row]
        pieces = cut(texts, self.tokenizer, self.length)
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
            self.histogram = self.histogram + np.asarray(
                score_histogram(*map(jnp.asarray, of_each))
            )
        return [
            gallery.shaded(self.tokenizer, arrays, outputs, row)
            for row in range(len(arrays["input_ids"]))
        ]

    def summary(self) -> str:
        """The AUC over all texts, where tokens were replaced."""
        if not self.replaces or not self.histogram.sum():
            return ""
        area = area_under_curve(self.histogram)
        shown = "not defined" if area is None else f"{area:.4f}"
        counted, replaced = int(self.histogram.sum()), int(self.histogram[1].sum())
        return f"AUC {shown} over {counted:,} tokens, {replaced:,} of them replaced"


class Fill(TextModel):
    """What the generator proposes for every `[MASK]`."""

    flags = ("top_k",)

    def require(self, request: Request) -> None:
        """Raises UserError where the generator is no network."""
        if self.objective.model.generator is None:
            raise UserError(
                f"--mode=fill needs a generator; this run has config.generator.kind = "
                f"{self.config.generator.kind!r}; allowed: detect, embed"
            )

    def outputs(self, request: Request) -> Callable[[Params, Arrays], Arrays]:
        """The most probable tokens at some positions."""
        top_k = min(request.top_k, self.tokenizer.vocab_size)
        return functools.partial(network_outputs.filled, self.objective, top_k)

    def respond(self, texts: Sequence[str]) -> list[Answer]:
        """The proposals for each mask of each text."""
        pieces = cut(texts, self.tokenizer, self.length, with_special_tokens=True)
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
        pieces = cut(texts, self.tokenizer, self.length)
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


def is_cpu(mesh: Mesh) -> bool:
    """Whether the devices are CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def held_out(store: TokenStore, config: ConfigDict, tokenizer: Tokenizer) -> layout.Rows:
    """The rows that the run is evaluated on.

    Raises:
      UserError: the store has another vocabulary.
    """
    if store.tokenizer.hash != tokenizer.hash:
        raise UserError("--input is a token store with another tokenizer than the run's")
    data = config.data
    return layout.rows(store, "held_out", data.sequence_length, data.layout, seed=config.seed)


def cut(
    texts: Sequence[str], tokenizer: Tokenizer, length: int, with_special_tokens: bool = False
) -> Pieces:
    """Rows of at most `length` tokens, at least one for each text."""
    encode = tokenizer.encode_with_offsets
    if with_special_tokens:
        encode = functools.partial(encode_with_special_tokens, tokenizer)
    segments, numbers, offsets = [], [], []
    for number, one in enumerate(texts):
        ids, _, ranges = encode(one)
        for begin, end in windows(len(ids), length - 2, length - 2):
            segments.append((ids[begin:end],))
            numbers.append(number)
            offsets.append(ranges[begin:end])
    return Pieces(pack(tokenizer, segments, length), np.array(numbers), offsets)
