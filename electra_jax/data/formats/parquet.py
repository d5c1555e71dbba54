"""Parquet: a record a row, its fields in columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from electra_jax.data.formats.base import BATCH, Record, Records
from electra_jax.data.opening import open_file
from electra_jax.errors import UserError
from electra_jax.settings import setting


@dataclass(frozen=True)
class Parquet(Records):
    """Documents are in a column."""

    suffixes = (".parquet",)
    field: str = setting("text", "of a record that holds its text")

    def batches(self, name: str) -> Iterator[tuple[list[Any], float]]:
        """See `Records.batches`."""
        import pyarrow.parquet  # slow to import, and seldom needed

        read = 0
        with open_file(name) as file, pyarrow.parquet.ParquetFile(file) as table:
            if self.field not in table.schema_arrow.names:
                allowed = ", ".join(table.schema_arrow.names)
                raise UserError(
                    f"{name}: there is no column {self.field!r}; allowed as #field=: {allowed}"
                )
            for batch in table.iter_batches(BATCH, columns=[self.field]):
                read += len(batch)
                yield batch[0].to_pylist(), read / table.metadata.num_rows

    @staticmethod
    def records(name: str) -> Iterator[Record]:
        """See `Format.records`."""
        import pyarrow.parquet

        try:
            with open_file(name) as file:
                rows = pyarrow.parquet.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{name}: cannot be read: {error}") from error
        yield from enumerate(rows, 1)
