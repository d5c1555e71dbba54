"""What all commands share: parse the flags, run, and turn mistakes into one line and exit code 2."""

import difflib
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from absl import flags
from ml_collections import ConfigDict, config_flags

from electra_jax.config import flatten, get_config
from electra_jax.errors import UserError

OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")


def run(main: Callable[[], None]) -> NoReturn:
    """Parse the command line, call `main`, exit.

    Exit codes: 0 done; 2 a mistake in configuration, data or flags, said in one line on standard
    error. Anything else is a fault of ours and keeps its traceback.
    """
    try:
        parse(sys.argv)
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def parse(argv: list[str]) -> None:
    """Parse `argv` into the flags, with our kind of error for everything that can be wrong in it."""
    if any(arg in ("--help", "-h", "--helpfull", "--helpshort") for arg in argv[1:]):
        print(f"{sys.modules['__main__'].__doc__}\n{flags.FLAGS.main_module_help()}")
        sys.exit(0)
    names = flatten(get_config())
    for override in filter(None, (OVERRIDE.match(arg) for arg in argv[1:])):
        if override[1] not in names:
            nearest = difflib.get_close_matches(override[1], names, n=1)
            hint = f"; did you mean config.{nearest[0]}?" if nearest else ""
            raise UserError(f"there is no field config.{override[1]}{hint}")
    try:
        left_over = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from error
    if left_over:
        raise UserError(f"unexpected argument {left_over[0]!r}; flags look like --name=value")


def recipe(flag: flags.FlagHolder) -> ConfigDict:
    """The configuration behind a `--config` flag."""
    if flag.value is None:
        raise UserError("--config is missing; give a recipe, e.g. --config=configs/tiny.py")
    if not isinstance(flag.value, ConfigDict):  # how ml_collections keeps a file it cannot read
        raise UserError(f"--config: there is no file {config_flags.get_config_filename(flags.FLAGS[flag.name])}")
    return flag.value
