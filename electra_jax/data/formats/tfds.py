"""TensorFlow data sets, read without TensorFlow: `tfds:NAME`."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from electra_jax.data.formats.base import BATCH, Records
from electra_jax.errors import UserError
from electra_jax.settings import setting


@functools.cache
def data_set(name: str, split: str, *fields: str) -> Any:
    """A data set as a random-access sequence of dicts, in which only `fields` are decoded.

    Raises:
      UserError: there is no such data set, split or field, or it cannot be read this way.
    """
    import tensorflow_datasets as tfds  # heavy, and seldom needed

    name = name.removeprefix("tfds:")
    try:
        builder = tfds.builder(name, file_format="array_record")
        builder.download_and_prepare()
        known = builder.info.features.keys()
        for field in fields:
            if field not in known:
                raise UserError(f"#field={field} is missing; it has {', '.join(sorted(known))}")
        return tfds.data_source(
            name,
            split=split,
            builder_kwargs={"file_format": "array_record"},
            decoders={other: tfds.decode.SkipDecoding() for other in {*known} - {*fields}},
        )
    except Exception as error:  # tfds raises all sorts
        reason = str(error).partition("\n")[0]
        raise UserError(f"tfds:{name}, split {split}: {reason}") from error


def records(name: str, split: str, *fields: str) -> list[dict[str, Any]]:
    """Some fields of all records of a data set; bytes are text.

    Raises:
      UserError: as `data_set`.
    """
    source = data_set(name, split, *fields)
    records = source.__getitems__(range(len(source)))
    return [{field: _text(record[field]) for field in fields} for record in records]


def _text(value: Any) -> Any:
    return value.decode("utf-8") if isinstance(value, bytes) else value


@dataclass(frozen=True)
class TensorFlowDataSet(Records):
    """Documents are in a field of the records of a split."""

    field: str = setting("text", "of a record that holds its text")
    split: str = setting("train", "the records that are read, such as train[:10%]")

    def batches(self, name: str) -> Iterator[tuple[list[Any], float]]:
        """See `Records.batches`."""
        source = data_set(name, self.split, self.field)
        for begin in range(0, len(source), BATCH):
            numbers = range(begin, min(begin + BATCH, len(source)))
            texts = [record[self.field] for record in source.__getitems__(numbers)]
            yield texts, numbers.stop / len(source)

    def fingerprint(self, name: str, size: int) -> dict:
        """A data set is known by its version and its number of records."""
        source = data_set(name, self.split, self.field)
        version = source.dataset_info.full_name
        return {"name": name, "version": version, "examples": len(source)}
