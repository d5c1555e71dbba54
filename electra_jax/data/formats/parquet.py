"""Parquet: a record a row, its fields in columns."""

from collections.abc import Iterator
from dataclasses import dataclass

from electra_jax.data.formats.base import (
    RECORDS,
    Input,
    Limits,
    Part,
    Parts,
    Record,
    Records,
    unreadable,
)
from electra_jax.data.opening import open_file
from electra_jax.errors import UserError


def records(name: str) -> Iterator[Record]:
    """The rows of a file, numbered from 1."""
    import pyarrow  # slow to import, and seldom needed
    import pyarrow.parquet

    try:
        with open_file(name) as file:
            rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{name}: cannot be read: {error}") from error
    return enumerate(rows, 1)


@dataclass(frozen=True)
class Parquet(Records):
    """Documents are in a column."""

    suffixes = (".parquet",)
    records = staticmethod(records)

    def parts(self, input: Input, limits: Limits) -> Parts:
        """See `Format.parts`."""
        import pyarrow
        import pyarrow.parquet

        row = 0
        try:
            with open_file(input.name) as file, pyarrow.parquet.ParquetFile(file) as table:
                if self.field not in table.schema_arrow.names:
                    raise UserError(
                        f"{input.name}: there is no column {self.field!r}; allowed as #field=: "
                        + ", ".join(table.schema_arrow.names)
                    )
                for batch in table.iter_batches(RECORDS, columns=[self.field]):
                    yield Part(input, batch[0].to_pylist(), row + 1), row / table.metadata.num_rows
                    row += len(batch)
        except (OSError, pyarrow.ArrowException) as error:
            yield unreadable(input, row, "row", error), 1.0
