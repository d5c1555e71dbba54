"""The one exception for mistakes that the user can mend."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """A mistake in the configuration, data, checkpoint or flags.

    The message is one line that names the field or file, what was found and what is allowed.
    Commands print it without a traceback and exit with code 2 (see `electra_jax.cli`).
    """


@contextlib.contextmanager
def located(where: str | Path) -> Iterator[None]:
    """Puts `where` in front of the message of a UserError that is raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
