"""English text that every machine has: the documentation of some standard library modules."""

import argparse
import collections
import functools
import inspect
import logging
import pathlib
import subprocess
from functools import cache

_MODULES = (argparse, collections, functools, inspect, logging, pathlib, subprocess)


@cache
def stdlib_documents() -> list[list[str]]:
    """Some 300 documents, each a list of stripped, non-empty lines."""
    owners = [*_MODULES]
    for module in _MODULES:
        owners += [member for _, member in inspect.getmembers(module, inspect.isclass)]
    texts: dict[str, None] = {}
    for owner in owners:
        for _, member in inspect.getmembers(owner, callable):
            texts[inspect.getdoc(member) or ""] = None
    documents = [[line.strip() for line in text.split("\n") if line.strip()] for text in texts]
    return [document for document in documents if document]
