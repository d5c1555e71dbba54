"""Tokens and how likely each of them is a replacement: as JSON, in colours, and as HTML.

A shaded text is a list of tokens, each a dict:

    token         as in the vocabulary, as the discriminator reads it
    starts_word   whether a space belongs in front of it
    probability   of being replaced, by the discriminator
    original      what the text has there, where the generator was asked; else missing
    proposals     [[token, probability], ...] of the generator there, the best first
"""

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.special import expit

from electra_jax.data.tokenizers.base import Tokenizer

Token = dict[str, Any]
Arrays = dict[str, np.ndarray]

# Control characters, ends of lines, and what reverses the direction of what follows.
HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)

# Of the palette of 256 colours: pale to vermilion, for a fifth of the probabilities each.
BACKGROUNDS = ("", "\x1b[38;5;16;48;5;223m", "\x1b[38;5;16;48;5;216m", "\x1b[38;5;16;48;5;209m")
BACKGROUNDS += ("\x1b[38;5;16;48;5;202m",)
RESET = "\x1b[0m"

COLUMNS = 16  # of a table

STYLE = """
.text { margin: 0 0 0.75rem; line-height: 1.9; overflow-wrap: anywhere; color: var(--ink); }
.token { background: rgb(213 94 0 / calc(var(--p) * 0.75)); border-radius: 0.2rem; }
.asked { cursor: help; border-bottom: 2px dotted currentColor; }
.replaced { border-bottom-style: solid; }
.tip { display: none; position: fixed; z-index: 1; left: 1rem; right: 1rem; bottom: 1rem;
       max-width: 40rem; margin: auto; padding: 0.6rem 0.9rem; line-height: 1.5;
       color: var(--ink); background: var(--card); border: 1px solid var(--line);
       border-radius: 0.5rem; box-shadow: 0 0.2rem 1rem rgb(0 0 0 / 0.35); }
.token:hover > .tip, .token:focus > .tip { display: block; }
@media print { .tip { display: none !important; }
               .token { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def shaded(tokenizer: Tokenizer, batch: Arrays, outputs: Arrays, row: int) -> list[list[Token]]:
    """The pieces of a row, without [CLS] and [SEP], as shaded texts.

    Args:
      batch: `input_ids` and `piece_ids` [B, L].
      outputs: of `verdicts.corrupted` or `verdicts.judged`, on the host.
    """
    original, pieces = batch["input_ids"][row], batch["piece_ids"][row]
    shown = outputs.get("shown_ids", batch["input_ids"])[row]
    is_shown = (pieces > 0) & (original != tokenizer.cls_id) & (original != tokenizer.sep_id)
    places = np.flatnonzero(is_shown)
    slots = {}
    if "positions" in outputs:
        used = np.flatnonzero(outputs["weights"][row])
        slots = dict(zip(outputs["positions"][row, used].tolist(), used.tolist(), strict=True))
    texts: list[list[Token]] = [[] for _ in range(pieces.max(initial=0))]
    for place, piece, token_id, starts_word, probability in zip(
        places.tolist(),
        pieces[places].tolist(),
        shown[places].tolist(),
        tokenizer.starts_word[shown[places]].tolist(),
        expit(outputs["logits"][row, places].astype(np.float64)).round(4).tolist(),
        strict=True,
    ):
        token = {
            "token": tokenizer.vocab[token_id],
            "starts_word": starts_word,
            "probability": probability,
        }
        if place in slots:
            token["original"] = tokenizer.vocab[original[place]]
            token["proposals"] = proposals(tokenizer, outputs, row, slots[place])
        texts[piece - 1].append(token)
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
    """A line with coloured backgrounds."""
    parts = []
    for token in text:
        color = BACKGROUNDS[min(4, int(token["probability"] * 5))]
        written = visible(word(token))
        shown = f"{color}{written}{RESET}" if color else written
        parts.append(" " * token["starts_word"] + shown)
    return "".join(parts).strip()


def as_html(text: Sequence[Token]) -> str:
    """A paragraph, to be styled by `STYLE`; a tip on hover or tap says what each token is.

    Nothing of no tokens.
    """
    if not text:
        return ""
    return f'<p class="text" dir="auto">{"".join(map(token_html, text)).strip()}</p>'


def token_html(token: Token) -> str:
    """A token, after a space if it starts a word."""
    written, tip = escape(word(token)), list(tip_of(token))
    kind = "token"
    if "original" in token:
        kind += " asked replaced" if token["token"] != token["original"] else " asked"
    return (
        f"{' ' * token['starts_word']}"
        f'<span class="{kind}" tabindex="0" style="--p:{token["probability"]:.2f}">{written}'
        f'<span class="tip">{"<br>".join(tip)}</span></span>'
    )


def tip_of(token: Token) -> Iterator[str]:
    """What is known of a token, in lines of HTML."""
    yield f"<b>{escape(token['token'])}</b>: replaced with probability {token['probability']:.0%}"
    if "original" in token:
        is_same = token["token"] == token["original"]
        yield "not replaced" if is_same else f"replaces <b>{escape(token['original'])}</b>"
        listed = ", ".join(f"{escape(name)} {share:.0%}" for name, share in token["proposals"])
        yield f"the generator proposes {listed}"


def as_markdown(texts: Sequence[Sequence[Token]]) -> str:
    """Tables for TensorBoard: the original, what the discriminator reads, and its verdicts."""
    parts = [text[i : i + COLUMNS] for text in texts for i in range(0, len(text), COLUMNS)]
    return "\n\n".join(map(table, parts))


def table(text: Sequence[Token]) -> str:
    """A column for each token; replaced ones are bold."""
    rows: dict[str, list[str]] = {"original": [], "read": [], "replaced": []}
    for token in text:
        read, original = (
            "".join(x if x.isalnum() else f"&#{ord(x)};" for x in visible(written))
            for written in (token["token"], token.get("original", token["token"]))
        )
        rows["original"].append(original)
        rows["read"].append(read if read == original else f"**{read}**")
        rows["replaced"].append(f"{token['probability']:.0%}")
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "| --- " * (len(text) + 1) + "|", *lines[1:]])


def word(token: Token) -> str:
    """What a token adds to a text: without the marks of the vocabulary."""
    mark = "\u2581" if token["starts_word"] else "##"
    return token["token"].removeprefix(mark) or token["token"]


def visible(text: str) -> str:
    """`text` with codes such as `\\u001b` for control characters: it only ever is text."""
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape(text: str) -> str:
    """`text` as the content of an element or attribute of HTML."""
    return html.escape(visible(text))
