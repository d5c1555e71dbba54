"""A pre-training run on new texts: replaced tokens detected, masks filled, vectors.

Texts longer than the rows of the training are cut into pieces, each judged for itself; nothing is
left out.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from electra_jax.config import get_config
from electra_jax.data import layout, tokenizers
from electra_jax.data.features import Arrays, FeatureRows
from electra_jax.data.store import TokenStore
from electra_jax.data.tokenizers.base import Tokenizer, encode_with_special_tokens
from electra_jax.errors import UserError
from electra_jax.finetune.encoding import pack, windows
from electra_jax.inference import network_outputs
from electra_jax.objectives import make_objective
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.metrics import area_under_curve, score_histogram
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.reporting import gallery
from electra_jax.sharding.mesh import everywhere, make_mesh
from electra_jax.training.checkpoint import restore_params
from electra_jax.training.prediction import make_predict, predict_rows

# On a CPU, XLA takes longer to make a program fast than a slow one takes for a few rows.
QUICK = {"xla_backend_optimization_level": 0}
FEW_ROWS = 1000

Answer = dict[str, Any]
Respond = Callable[[Sequence[str] | TokenStore], list[Answer]]


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


def load(
    workdir: Path,
    config: ConfigDict,
    mode: str,
    step: int | None,
    batch_size: int,
    top_k: int,
    replace: bool,
    pooling: str,
) -> tuple[Respond, Callable[[], str]]:
    """A function from texts to answers, and one that then has a line about all of them.

    Args:
      mode: detect, fill or embed.
      replace: of `detect`: by the generator's samples, first.

    Raises:
      UserError: the run cannot do that, or the checkpoint is missing or damaged.
    """
    tokenizer = tokenizers.load(workdir / "tokenizer")
    counts = np.ones(tokenizer.vocab_size, int)  # the text's own are not in a run's directory
    objective = make_objective(config, tokenizer, counts)
    require(config, objective, mode, replace)
    _, params = restore_params(workdir / "checkpoints", step)
    mesh = make_mesh(get_config().parallel)  # the devices here, not those of the training
    params = everywhere(mesh, params)
    rows_at_once = -(batch_size // -mesh.size) * mesh.size
    top_k = min(top_k, tokenizer.vocab_size)
    outputs = {
        "detect": functools.partial(network_outputs.corrupted, objective, config.seed, top_k)
        if replace
        else functools.partial(network_outputs.judged, objective),
        "fill": functools.partial(network_outputs.filled, objective, top_k),
        "embed": functools.partial(network_outputs.embedded, objective, pooling),
    }[mode]
    thorough = make_predict(mesh, outputs)
    quick = make_predict(mesh, outputs, QUICK) if is_cpu(mesh) else thorough
    length = config.data.sequence_length

    def run(rows: Any) -> Arrays:
        predict = quick if len(rows) < FEW_ROWS else thorough
        return predict_rows(predict, params, rows, rows_at_once)

    histogram = np.zeros((2, 1))

    def detect(texts: Sequence[str] | TokenStore) -> list[Answer]:
        if isinstance(texts, TokenStore):
            found, rows = None, held_out(texts, config, tokenizer)
            arrays = rows.batch(np.arange(len(rows)))
        else:
            found = pieces(texts, tokenizer, length)
            rows, arrays = FeatureRows(found.arrays), found.arrays
        outputs = run(rows)
        if replace:
            is_replaced = outputs["shown_ids"] != arrays["input_ids"]
            of_each = (outputs["logits"], is_replaced, outputs["judged"])
            nonlocal histogram
            histogram = histogram + np.asarray(score_histogram(*map(jnp.asarray, of_each)))
        return shaded_answers(tokenizer, arrays, outputs, found, texts)

    def fill(texts: Sequence[str]) -> list[Answer]:
        found = pieces(texts, tokenizer, length, with_special_tokens=True)
        ids = found.arrays["input_ids"]
        masks = [np.flatnonzero(row == tokenizer.mask_id) for row in ids]
        slots = 1 << (max(map(len, masks)) - 1).bit_length()  # few sizes to compile for
        positions = np.zeros((len(ids), max(1, slots)), np.int32)
        for row, places in enumerate(masks):
            positions[row, : len(places)] = places
        outputs = run(FeatureRows(found.arrays | {"positions": positions}))
        answers = [{"text": text, "masks": []} for text in texts]
        for row, places in enumerate(masks):
            for slot, place in enumerate(places):
                start, end = found.offsets[row][place - 1]
                proposed = [
                    {"token": token, "probability": share}
                    for token, share in gallery.proposals(tokenizer, outputs, row, slot)
                ]
                mask = {"start": start, "end": end, "proposals": proposed}
                answers[found.text[row]]["masks"].append(mask)
        return answers

    def embed(texts: Sequence[str]) -> list[Answer]:
        found = pieces(texts, tokenizer, length)
        outputs = run(FeatureRows(found.arrays))
        if pooling == "cls":  # of a text's first piece
            _, first = np.unique(found.text, return_index=True)
            return [{"vector": vector.tolist()} for vector in outputs["sums"][first]]
        totals = np.zeros((len(texts), outputs["sums"].shape[1]))
        weights = np.zeros((len(texts), 1))
        np.add.at(totals, found.text, outputs["sums"])
        np.add.at(weights, found.text, outputs["weights"][:, None])
        return [{"vector": vector.tolist()} for vector in totals / weights]

    def summary() -> str:
        if not replace or not histogram.sum():
            return ""
        area = area_under_curve(histogram)
        shown = "not defined" if area is None else f"{area:.4f}"
        judged, replaced = int(histogram.sum()), int(histogram[1].sum())
        return f"AUC {shown} over {judged:,} tokens, {replaced:,} of them replaced"

    respond = {"detect": detect, "fill": fill, "embed": embed}[mode]
    return lambda texts: respond(texts) if len_of(texts) else [], summary


def is_cpu(mesh: Mesh) -> bool:
    """Whether the devices are CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def len_of(texts: Sequence[str] | TokenStore) -> int:
    """How many texts there are; a store has some."""
    return 1 if isinstance(texts, TokenStore) else len(texts)


def require(config: ConfigDict, objective: MaskedLanguageModel, mode: str, replace: bool) -> None:
    """Raises UserError where a run does not have the network that a mode needs."""
    if mode == "detect" and not isinstance(objective, ReplacedTokenDetection):
        raise UserError(
            f"--mode=detect needs a discriminator; this run has config.objective = "
            f"{config.objective!r}; allowed: fill, embed"
        )
    if mode == "fill" and objective.model.generator is None:
        raise UserError(
            f"--mode=fill needs a generator; this run has config.generator.kind = "
            f"{config.generator.kind!r}; allowed: detect, embed"
        )
    if replace and config.generator.kind == "unigram":
        raise UserError(
            "--replace needs the frequencies of tokens, which are not in a run's directory where "
            "config.generator.kind = 'unigram'"
        )


def held_out(store: TokenStore, config: ConfigDict, tokenizer: Tokenizer) -> layout.Rows:
    """The rows that the run is evaluated on.

    Raises:
      UserError: the store has another vocabulary.
    """
    if store.tokenizer.hash != tokenizer.hash:
        raise UserError("--input is a token store with another tokenizer than the run's")
    data = config.data
    return layout.rows(store, "held_out", data.sequence_length, data.layout, seed=config.seed)


def pieces(
    texts: Sequence[str], tokenizer: Tokenizer, length: int, with_special_tokens: bool = False
) -> Pieces:
    """Rows of at most `length` tokens, at least one for each text."""
    encode = tokenizer.encode_with_offsets
    if with_special_tokens:
        encode = functools.partial(encode_with_special_tokens, tokenizer)
    segments, numbers, offsets = [], [], []
    for number, text in enumerate(texts):
        ids, _, ranges = encode(text)
        for begin, end in windows(len(ids), length - 2, length - 2):
            segments.append((ids[begin:end],))
            numbers.append(number)
            offsets.append(ranges[begin:end])
    return Pieces(pack(tokenizer, segments, length), np.array(numbers), offsets)


def shaded_answers(
    tokenizer: Tokenizer,
    arrays: Arrays,
    outputs: Arrays,
    found: Pieces | None,
    texts: Sequence[str] | TokenStore,
) -> list[Answer]:
    """An answer for each text; for each piece of a row of a store, whose text is not known."""
    rows = range(len(arrays["input_ids"]))
    by_row = [gallery.shaded(tokenizer, arrays, outputs, row) for row in rows]
    if found is None:
        return [{"tokens": tokens} for row in by_row for tokens in row]
    answers = [{"text": text, "tokens": []} for text in texts]
    for row, number in enumerate(found.text):
        for token, (start, end) in zip(by_row[row][0], found.offsets[row], strict=True):
            answers[number]["tokens"].append(token | {"start": start, "end": end})
    return answers
