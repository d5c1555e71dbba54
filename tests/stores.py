"""Tokenizers trained on the standard library, token stores and rows made in memory."""

import os
import sys
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
from stdlib_text import stdlib_documents

from electra_jax.data import tokenizers
from electra_jax.data.formats.base import Input, Part
from electra_jax.data.formats.docstrings import Docstrings
from electra_jax.data.layout import Rows
from electra_jax.data.reader import Group
from electra_jax.data.store import Tokens, TokenStore, open_store
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.data.writing import write_store

UNCASED = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
CASED = {**UNCASED, "lower_case": False, "strip_accents": False}
LINES = list(chain.from_iterable(stdlib_documents()))
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # of other processes


@cache
def trained(kind: str = "wordpiece") -> Tokenizer:
    """A tokenizer of 1,000 tokens."""
    return tokenizers.train(kind, LINES, 1000, **UNCASED)


def groups(documents: Iterable[list[str]], size: int = 1000, source: int = 0) -> list[Group]:
    """What reading these documents, each a list of lines, gives: groups of `size` of them."""
    texts = ["\n".join(document) for document in documents]
    memory = Input(source, "memory", Docstrings(), size=0)  # parts of it are lists of texts
    return [
        Group([Part(memory, texts[first : first + size], first + 1)])
        for first in range(0, len(texts), size)
    ]


def store_of(
    directory: Path, read: Iterable[Group], tokenizer: Tokenizer, sources="m", **arguments
) -> TokenStore:
    """Writes groups into a store and opens it; a letter names each source."""
    origin = {"sources": [*sources], "fingerprint": []}
    arguments = {"held_out": 0.1, "origin": origin, "log": lambda _: None, **arguments}
    write_store(directory, read, tokenizer, **arguments)
    return open_store(directory)


def make_store(
    directory: Path, documents: Iterable[list[str]], tokenizer: Tokenizer, size=1000, **arguments
) -> TokenStore:
    """A store of documents, read in groups of `size` of them."""
    return store_of(directory, groups(documents, size), tokenizer, **arguments)


def rows_of(tokens: Tokens, starts, sizes, marks, first, *, length: int, groups=None) -> Rows:
    """Rows of ranges of tokens; [PAD], [CLS] and [SEP] are 0, 2 and 3. One group by default."""
    return Rows(
        length=length,
        tokens=tokens,
        starts=np.array(starts),
        sizes=np.array(sizes, np.int32),
        marks=np.array(marks, np.uint8),
        first=np.array(first),
        groups=np.array([0, len(first) - 1]) if groups is None else groups,
        dropped_tokens=0,
        pad_id=0,
        cls_id=2,
        sep_id=3,
    )
