"""What all commands share: the command line, and mistakes said in one line with an exit code."""

import difflib
import errno
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from absl import flags
from ml_collections import ConfigDict, config_flags

from electra_jax.errors import UserError
from electra_jax.inference.configuration import SETTINGS
from electra_jax.run.interruption import EXIT_CODE, Stopped
from electra_jax.settings import field

# What a full disk, a quota, a limit, a read-only file system and missing permission are called;
# and what a path is that a file or directory cannot have.
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
CANNOT_WRITE |= {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
NO_READER = 128 + signal.SIGPIPE

RECIPE = re.compile(r"--?config=([^:]*)")
OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")


def run(main: Callable[[], None]) -> NoReturn:
    """Call `main` and exit, with a code of the list in docs/design.md and one line that says why.

    Anything that is not in the list is a fault of ours and keeps its traceback.
    """
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not is_unread(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(NO_READER)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(EXIT_CODE)
    except FloatingPointError as error:
        fail(1, error)
    except UserError as error:
        fail(2, error)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        # Whatever else was being written fails, too, and would be told of after the last line.
        logging.getLogger("asyncio").disabled = True
        place = error.filename or "writing a file"
        fail(2, f"{place}: {error.strerror}; once mended, the same command goes on")
    except KeyboardInterrupt:
        fail(130, "interrupted; run the same command again to go on")
    sys.exit(0)


def is_unread(descriptor: int) -> bool:
    """Whether this is a pipe at whose other end nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def fail(code: int, message: object) -> NoReturn:
    """Exit with `code` after one line on standard error."""
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(code)


def recipe_flags() -> flags.FlagValues:
    """The flags of a command that works from a recipe: `--config` and its overrides."""
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "recipe, e.g. configs/tiny.py", flag_values=values
    )
    flags.DEFINE_bool("print_config", False, "show all fields, and stop", flag_values=values)
    return values


def parse(values: flags.FlagValues, doc: str, *names: str) -> list[str]:
    """Read `sys.argv` into `values`; `--help` prints `doc` and the flags, and exits.

    Returns the arguments without a flag, one for each of `names`, which are what messages call
    them; more may come where the last name ends in `...`. Raises UserError for a flag that does not
    exist, a value of another type, or another number of arguments.
    """
    if {"--help", "-help", "-h"} & set(sys.argv[1:]):
        print(doc, values.get_help(), sep="\n")
        sys.exit(0)
    try:
        found = values(sys.argv)[1:]
    except flags.UnrecognizedFlagError as error:
        flag = error.flagname
        raise UserError(f"there is no flag --{flag}{hint(flag, values)}") from None
    except flags.Error as error:
        raise UserError(error) from error
    if len(found) < len(names):
        raise UserError(f"{names[len(found)]} is missing; give {' '.join(names)}")
    if len(found) > len(names) and not (names and names[-1].endswith("...")):
        raise UserError(f"unexpected argument {found[len(names)]!r}; flags look like --name=value")
    return found


def parse_with_recipe(values: flags.FlagValues, doc: str) -> tuple[ConfigDict, Path]:
    """Read `sys.argv` into `values`, which `recipe_flags` has made.

    Returns the configuration, overrides applied, and the path of the recipe. Raises UserError as
    `parse`, and where there is no such field, or the recipe is missing or fails.
    """
    names = SETTINGS["pretrain"]() | SETTINGS["finetune"]()
    for name in (match[1] for match in map(OVERRIDE.match, sys.argv[1:]) if match):
        if name not in names:
            raise UserError(f"there is no field config.{name}{hint(name, names)}")
    given = [match[1] for match in map(RECIPE.match, sys.argv[1:]) if match]
    if given and not given[0]:
        raise UserError("--config is empty; give a recipe, e.g. --config=configs/tiny.py")
    path = Path(*given[:1])
    if path.name and not path.is_file():
        raise UserError(f"--config: there is no file {path}")
    try:
        parse(values, doc)
        config = values.config
        if config is None:
            raise UserError("--config is missing; give a recipe, e.g. --config=configs/tiny.py")
        config.items()  # a recipe that failed to read a file of its own raises only here
        path = Path(config_flags.get_config_filename(values["config"]).partition(":")[0])
    except Exception as error:  # a mistake in the flags, or in the recipe, which parsing has run
        found = raised_in(path, error)
        if found is None and isinstance(error, UserError):
            raise
        where, cause = found or (path, error)
        raise UserError(f"{where}: {type(cause).__name__}: {cause}") from error
    if values.print_config:
        print_config(config)
        sys.exit(0)
    return config, path


def print_config(config: ConfigDict) -> None:
    """A line for each field, in the form of a flag, with its meaning and what its default is."""
    for name, one in SETTINGS[config.task]().items():
        value = field(config, name)
        changed = "" if value == one.default else f"; default: {one.default!r}"
        print(f"--config.{name}={value!r}  # {one.meaning}{changed}")


def raised_in(path: Path, error: BaseException | None) -> tuple[str, BaseException] | None:
    """Line and exception behind `error` that the file `path` raised, if it raised one."""
    while error is not None:
        for place in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(place.filename).absolute() == path.absolute():
                return f"{path}, line {place.lineno}", error
        error = error.__cause__ or error.__context__
    return None


def hint(name: str, names: Iterable[str]) -> str:
    """The existing name that looks most like `name`, if one does."""
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
