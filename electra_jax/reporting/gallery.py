"""Tokens and how likely each of them is a replacement: as JSON, in colors, and as HTML.

A shaded text is a list of tokens, each a dict:

    token         as in the vocabulary, as the discriminator reads it
    starts_word   whether a space belongs in front of it
    probability   of being replaced, by the discriminator
    original      what the text has there, where the generator was asked; else missing
    proposals     [[token, probability], ...] of the generator there, the best first
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from scipy.special import expit

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.reporting.templates import render, visible

Token = dict[str, Any]
Arrays = dict[str, np.ndarray]

# Of the palette of 256 colors: pale to vermilion, for a fifth of the probabilities each.
BACKGROUNDS = ("", *(f"\x1b[38;5;16;48;5;{color}m" for color in (223, 216, 209, 202)))
RESET = "\x1b[0m"


def shaded(tokenizer: Tokenizer, batch: Arrays, outputs: Arrays, row: int) -> list[list[Token]]:
    """The pieces of a row, without [CLS] and [SEP], as shaded texts.

    Args:
      batch: `input_ids` and `segment_ids` [B, L].
      outputs: of `network_outputs.corrupted` or `network_outputs.detected`, on the host.
    """
    original, pieces = batch["input_ids"][row], batch["segment_ids"][row]
    shown = outputs.get("shown_ids", batch["input_ids"])[row]
    probabilities = expit(outputs["logits"][row].astype(np.float64)).round(4)
    slots = {}
    if "positions" in outputs:
        used = np.flatnonzero(outputs["weights"][row])
        slots = dict(zip(outputs["positions"][row, used].tolist(), used.tolist(), strict=True))
    texts: list[list[Token]] = [[] for _ in range(pieces.max(initial=0))]
    is_text = (original != tokenizer.cls_id) & (original != tokenizer.sep_id)
    for place in np.flatnonzero((pieces > 0) & is_text).tolist():
        token = {
            "token": tokenizer.vocab[shown[place]],
            "starts_word": bool(tokenizer.starts_word[shown[place]]),
            "probability": float(probabilities[place]),
        }
        if place in slots:
            token["original"] = tokenizer.vocab[original[place]]
            token["proposals"] = proposals(tokenizer, outputs, row, slots[place])
        texts[pieces[place] - 1].append(token)
    return texts


def proposals(
    tokenizer: Tokenizer, outputs: Arrays, row: int, slot: int
) -> list[tuple[str, float]]:
    """The generator's proposals for a slot, and their probabilities."""
    ids, shares = (outputs[name][row, slot].tolist() for name in ("proposals", "probabilities"))
    return [
        (tokenizer.vocab[i], round(share, 4))
        for i, share in zip(ids, shares, strict=True)
        if i < tokenizer.vocab_size  # the columns after it are padding
    ]


def as_terminal(text: Sequence[Token]) -> str:
    """A line with colored backgrounds."""
    line = ""
    for token in text:
        color = BACKGROUNDS[min(4, int(token["probability"] * 5))]
        line += " " * token["starts_word"] + color + visible(word(token)) + RESET * bool(color)
    return line.strip()


def as_html(texts: Sequence[Sequence[Token]], step: int | None = None) -> Markup:
    """A section with a paragraph for each text; a tip on hover or tap says what each token is.

    `step` is that of a training in which the texts are held out; None: they are from elsewhere.
    """
    return render("gallery.html", texts=texts, step=step, word=word)


def as_markdown(texts: Sequence[Sequence[Token]]) -> str:
    """Tables for TensorBoard: the original, what the discriminator reads, and what it says of it.

    They have a row for each token; replaced ones are bold.
    """
    head = "| original | read | replaced |\n| --- | --- | --- |\n"
    return "\n\n".join(head + "\n".join(map(_table_row, text)) for text in texts if text)


def _table_row(token: Token) -> str:
    read, original = (
        "".join(x if x.isalnum() else f"&#{ord(x)};" for x in visible(written))
        for written in (token["token"], token.get("original", token["token"]))
    )
    shown = read if read == original else f"**{read}**"
    return f"| {original} | {shown} | {token['probability']:.0%} |"


def word(token: Token) -> str:
    """What a token adds to a text: without the marks of the vocabulary."""
    mark = "\u2581" if token["starts_word"] else "##"
    return token["token"].removeprefix(mark) or token["token"]
