"""The one exception for mistakes that the user can mend."""


class UserError(Exception):
    """A mistake in the configuration, data, checkpoint or flags.

    The message is one line that names the field or file, what was found and what is allowed.
    Commands print it without a traceback and exit with code 2 (see `electra_jax.cli`).
    """
