"""The formats that text is read from: a file for each, and a line in `FORMATS`."""

from electra_jax.data.formats.base import Format
from electra_jax.data.formats.docstrings import Docstrings
from electra_jax.data.formats.jsonl import JsonLines
from electra_jax.data.formats.parquet import Parquet
from electra_jax.data.formats.text import Text
from electra_jax.data.formats.tfds import TensorFlowDataSet
from electra_jax.data.opening import suffix_of

FORMATS: dict[str, type[Format]] = {
    "text": Text,
    "jsonl": JsonLines,
    "parquet": Parquet,
    "tfds": TensorFlowDataSet,
    "docstrings": Docstrings,
}


def format_of_file(name: str) -> str:
    """The key of the format of a file, by its name without the suffix of a compression."""
    suffix = suffix_of(name)
    return next((key for key, form in FORMATS.items() if suffix in form.suffixes), "text")


def format_without_files(location: str) -> str | None:
    """The key of the format that a location names, as `docstrings` and `tfds:NAME` do."""
    key = location.partition(":")[0]
    return key if key in FORMATS and not FORMATS[key].suffixes else None
