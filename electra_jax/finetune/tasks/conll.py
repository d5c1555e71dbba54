"""Files of words in columns, as the shared tasks of CoNLL have them.

    EU      B-ORG
    rejects O
    German  B-MISC

    Peter   B-PER
    Blackburn   I-PER

A word a line, its tag in the last column, a blank line between sentences. Columns are separated by
tabs, or by spaces in a file whose first line has no tab. Lines that say `-DOCSTART-` are skipped.
"""

import re
from dataclasses import dataclass

from electra_jax.data.opening import read_lines
from electra_jax.errors import UserError

_DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, and their tags if they are known.

    Attributes:
      line: the number of the line with the first word, from 1.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    line: int


def read_sentences(path: str, expected: int | None) -> tuple[list[Sentence], int]:
    """The sentences of a file, and its number of columns.

    Tags are None if there are fewer columns than `expected`, the training file's.

    Raises:
      UserError: a line has another number of columns; names it.
    """
    lines = read_lines(path)
    tabs = "\t" in next((line for line in lines if line.strip()), "")
    groups: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(lines, 1):
        # Other white space, such as that without a break, may be part of a word.
        fields = line.split("\t") if tabs else re.split(" +", line.strip(" "))
        if line.strip(" \t") and fields[0] != _DOCUMENT:
            groups[-1].append((number, fields))
        else:
            groups.append([])
    groups = [group for group in groups if group]
    columns = len(groups[0][0][1]) if groups else 0
    for number, fields in (row for group in groups for row in group):
        if len(fields) != columns or not fields[-1]:
            raise UserError(
                f"{path}, line {number}: found the columns {fields}; the first line of words has "
                f"{columns}, and a tag is not empty"
            )
    if expected is not None and columns > expected:
        raise UserError(f"{path}: {columns} columns; the training file has {expected}")
    labeled = columns >= (expected or 2)
    sentences = [
        Sentence(
            words=tuple(fields[0] for _, fields in group),
            tags=tuple(fields[-1] for _, fields in group) if labeled else None,
            line=group[0][0],
        )
        for group in groups
    ]
    return sentences, columns
