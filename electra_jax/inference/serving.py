"""Texts in, answers out: files, standard input and the formats of answers."""

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from electra_jax.errors import UserError

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """What answers.

    Attributes:
      read: the examples of a file.
      example: (number, JSON object, where it is from) to an example.
      respond: answers to examples, in order.
      summary: a line about all answers, or "".
    """

    read: Callable[[str], list]
    example: Callable[[int, dict, str], Any]
    respond: Callable[[Sequence], list[Answer]]
    summary: Callable[[], str] = lambda: ""


def read_texts_or_store(path: str) -> Any:
    """As `read_texts`; or the token store at `path`."""
    if Path(path, "manifest.json").exists():
        from electra_jax.data.store import open_store

        return open_store(path)
    return read_texts(path)


def read_texts(path: str) -> list[str]:
    """The lines of a text file, or the column `text` of a table."""
    from electra_jax.data.text import read_lines
    from electra_jax.finetune.sentences import text
    from electra_jax.finetune.tables import is_table, read_table

    if not is_table(path):
        return read_lines(path)
    return [text(values, "text", f"{path}, line {line}") for line, values in read_table(path)]


def answer_lines(model: Model, lines: Iterator[bytes]) -> None:
    """Answer every line as soon as it is there."""
    for number, line in enumerate(lines):
        where = f"line {number + 1}"
        try:
            answer = model.respond([model.example(number, parsed(line, where), where)])[0]
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def parsed(line: bytes, where: str) -> dict:
    """The JSON object of a line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: not a JSON object but {type(found).__name__}")
    return found


def write(answers: Sequence[Answer], output: str, mode: str) -> None:
    """Write all answers, as a whole or not at all, in the format that the ending says."""
    from electra_jax.files import write_bytes
    from electra_jax.reporting import gallery

    if output == "-" and mode == "detect" and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        for answer in answers:
            print(gallery.as_terminal(answer["tokens"]))
        return
    match Path(output).suffix:
        case ".npy":
            buffer = io.BytesIO()
            np.save(buffer, np.array([answer["vector"] for answer in answers], np.float32))
            content = buffer.getvalue()
        case ".html":
            content = page(answers).encode()
        case ".json":
            content = (json.dumps(answers, indent=1) + "\n").encode()
        case _:
            content = "".join(json.dumps(answer) + "\n" for answer in answers).encode()
    if output == "-":
        sys.stdout.buffer.write(content)
    else:
        write_bytes(Path(output), content)


def page(answers: Sequence[Answer]) -> str:
    """Shaded texts as a page that needs nothing else."""
    from electra_jax.reporting import gallery, page

    body = "".join(gallery.as_html(answer["tokens"]) for answer in answers)
    note = "The darker a token, the more the discriminator takes it for a replacement."
    return page.page("Replaced token detection", [note], f"<section>{body}</section>")
