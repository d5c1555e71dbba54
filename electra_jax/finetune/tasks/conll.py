"""Files of words in columns, as the shared tasks of CoNLL have them.

    EU      B-ORG
    rejects O
    German  B-MISC

    Peter   B-PER
    Blackburn   I-PER

A word a line, its tag in the last column, a blank line between sentences. Columns are separated by
tabs, or by spaces in a file whose first line has no tab. Lines that say `-DOCSTART-` are skipped.
"""

import dataclasses
import re

from electra_jax.data.opening import read_lines
from electra_jax.errors import UserError

_DOCUMENT = "-DOCSTART-"


@dataclasses.dataclass(frozen=True)
class Example:
    """The words of a sentence and their tags, as in the file."""

    id: str  # the number of the sentence in its file, from 0
    words: tuple[str, ...]  # none of them is split or joined
    tags: tuple[str, ...] | None  # as many; None when they are not known
    line: int = dataclasses.field(default=0, compare=False)  # of the first word, from 1


def read_sentences(path: str, expected: int | None) -> tuple[list[Example], int]:
    """The sentences of a file, and its number of columns.

    Tags are None if there are fewer columns than `expected`, the training file's.

    Raises:
      UserError: a line has another number of columns; names it.
    """
    lines, columns = read_lines(path), 0
    tabs = "\t" in next((line for line in lines if line.strip()), "")
    groups: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(lines, 1):
        # Other white space, such as that without a break, may be part of a word.
        fields = line.split("\t") if tabs else re.split(" +", line.strip(" "))
        if not line.strip(" \t") or fields[0] == _DOCUMENT:
            groups.append([])
            continue
        columns = columns or len(fields)
        if len(fields) != columns or not fields[-1]:
            raise UserError(
                f"{path}, line {number}: found the columns {fields}; the first line of words has "
                f"{columns}, and a tag is not empty"
            )
        groups[-1].append((number, fields))
    if expected is not None and columns > expected:
        raise UserError(f"{path}: {columns} columns; the training file has {expected}")
    sentences = []
    for group in filter(None, groups):
        numbers, rows = zip(*group, strict=True)
        by_column = [*zip(*rows, strict=True)]
        tags = by_column[-1] if columns >= (expected or 2) else None
        sentences.append(Example(str(len(sentences)), by_column[0], tags, numbers[0]))
    return sentences, columns
