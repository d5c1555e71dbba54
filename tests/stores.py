"""Token stores made of documents in memory."""

from collections.abc import Iterable
from pathlib import Path

from electra_jax.data.formats.base import Input, Part
from electra_jax.data.formats.docstrings import Docstrings
from electra_jax.data.reader import Group
from electra_jax.data.store import TokenStore, open_store, write_store
from electra_jax.data.tokenizers.base import Tokenizer


def groups(documents: Iterable[list[str]], size: int = 1000, source: int = 0) -> list[Group]:
    """What reading these documents, each a list of lines, gives: groups of `size` of them."""
    texts = ["\n".join(document) for document in documents]
    memory = Input(source, "memory", Docstrings(), size=0)  # parts of it are lists of texts
    return [
        Group([Part(memory, texts[first : first + size], first + 1)])
        for first in range(0, len(texts), size)
    ]


def make_store(
    directory: Path,
    documents: Iterable[list[str]],
    tokenizer: Tokenizer,
    held_out: float = 0.1,
    size: int = 1000,
    **arguments,
) -> TokenStore:
    """Writes and opens a store."""
    origin = {"sources": ["memory"], "fingerprint": []}
    write_store(
        directory,
        groups(documents, size),
        tokenizer,
        held_out,
        **{"origin": origin, "log": lambda _: None, **arguments},
    )
    return open_store(directory)
