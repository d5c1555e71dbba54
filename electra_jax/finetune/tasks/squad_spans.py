"""From the outputs of a network to the answers that it proposes, the best first."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from electra_jax.data.features import Arrays

N_BEST = 20  # answers that are kept of each question; starts that are tried in each window

_CHUNK = 2048  # rows whose spans are compared at once

# Possible answers to a question, the best first: first character, character after the last, score.
Proposals = Float[np.ndarray, "N 3"]


@dataclass(frozen=True)
class Span:
    """A possible answer: `context[start:end]` is `text`."""

    text: str
    start: int
    end: int
    score: float  # the sum of two logarithms of probabilities, or of two logits
    probability: float  # among the spans that were kept of the question


def propose(features: Arrays, outputs: Arrays, max_length: int) -> dict[int, Proposals]:
    """All possible spans of at most `max_length` tokens, by example."""
    parts = []
    for begin in range(0, max(1, len(features["example"])), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        chunk, of_chunk = ({name: x[rows] for name, x in y.items()} for y in (features, outputs))
        parts.append(_possible(chunk, of_chunk, max_length))
    example, *columns = (np.concatenate(part) for part in zip(*parts, strict=True))
    # Best first within each example, equal scores in the order of the rows.
    order = np.lexsort((-columns[-1], example))
    present, firsts = np.unique(example[order], return_index=True)
    spans = np.split(np.stack(columns, axis=1)[order], firsts[1:])
    return dict(zip(present.tolist(), spans, strict=False))  # of no rows, one that is empty


def _possible(features: Arrays, outputs: Arrays, max_length: int) -> tuple[np.ndarray, ...]:
    """Example, first and last character and score of each possible span of some rows."""
    start, end, score = _candidates(features, outputs, max_length)
    rows = np.arange(len(start))[:, None, None]
    first, last = features["char_start"][rows, start], features["char_end"][rows, end]
    possible = (
        (first >= 0)
        & (last > first)  # so it does not end before it starts, or where there is no context
        & (features["max_context"][rows, start] == 1)
        & (end < start + max_length)
    )
    rows = np.broadcast_to(features["example"][:, None, None], possible.shape)
    return rows[possible], first[possible], last[possible], score[possible]


def _candidates(features: Arrays, outputs: Arrays, max_length: int) -> tuple[np.ndarray, ...]:
    """Start, end and score of spans that the network proposes, each [rows, starts, ends]."""
    if "start_top" in outputs:
        start, end = outputs["start_top"][:, :, None], outputs["end_top"]
        score = outputs["start_log_prob"].astype(np.float64)[:, :, None] + outputs["end_log_prob"]
        return np.broadcast_to(start, end.shape), end, score
    length = outputs["start_logits"].shape[1]
    can_start = (features["char_start"] >= 0) & (features["max_context"] == 1)
    logits = np.where(can_start, outputs["start_logits"], -np.inf).astype(np.float64)
    start = np.argsort(-logits, axis=1, kind="stable")[:, :N_BEST]
    end = start[:, :, None] + np.arange(max_length)
    end = np.minimum(end, length - 1)  # which is [SEP] or padding: no answer ends there
    rows = np.arange(len(start))[:, None]
    score = logits[rows, start][:, :, None] + outputs["end_logits"][rows[:, :, None], end]
    return np.broadcast_to(start[:, :, None], end.shape), end, score


def null_odds(
    features: Arrays, outputs: Arrays, count: int, proposals: Mapping[int, Proposals]
) -> np.ndarray:
    """For each of `count` examples the logit of "no answer": the least one of its windows."""
    odds = np.full(count, np.inf)
    if "null_logit" in outputs:
        np.minimum.at(odds, features["example"], outputs["null_logit"])
        return odds
    null = outputs["start_logits"][:, 0].astype(np.float64) + outputs["end_logits"][:, 0]
    np.minimum.at(odds, features["example"], null)
    for index, spans in proposals.items():
        odds[index] -= spans[0, -1]
    return odds


def n_best(context: str, proposals: Proposals) -> tuple[Span, ...]:
    """The best `N_BEST` spans with different texts, none of them empty."""
    best: dict[str, tuple[int, int, float]] = {}
    for *span, score in proposals.tolist():
        start, end = map(int, span)
        # A token of SentencePiece may be a space alone.
        shown = context[start:end]
        text = shown.strip()
        if text and text not in best:
            start += len(shown) - len(shown.lstrip())
            best[text] = start, start + len(text), score
            if len(best) == N_BEST:
                break
    scores = np.array([score for *_, score in best.values()])
    shares = np.exp(scores - scores.max(initial=-np.inf))
    shares /= shares.sum() or 1.0
    return tuple(
        Span(text, *found, share)
        for (text, found), share in zip(best.items(), shares.tolist(), strict=True)
    )
