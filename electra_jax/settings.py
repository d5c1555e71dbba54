"""What a setting is: its checks, and the names of all settings of a configuration."""

import math
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from electra_jax.errors import UserError

Check = tuple[Callable[[Any], bool], str]


POSITIVE: Check = (lambda x: 0 < x < math.inf, "a number above 0")


COUNT: Check = (lambda x: x >= 1, "at least 1")


OPTIONAL_NOT_NEGATIVE: Check = (lambda x: x is None or 0 <= x < math.inf, "0 or more")


OPTIONAL_COUNT: Check = (lambda x: x is None or x >= 1, "at least 1")


NOT_NEGATIVE: Check = (lambda x: 0 <= x < math.inf, "0 or more")


SHARE: Check = (lambda x: 0 <= x <= 1, "between 0 and 1")


RATE: Check = (lambda x: 0 <= x < 1, "at least 0 and below 1")


FRACTION: Check = (lambda x: 0 < x < 1, "above 0 and below 1")


# Less than that, and logits that it divides are no longer numbers.
TEMPERATURE: Check = (lambda x: x is None or 1e-3 <= x < math.inf, "at least 0.001")


def one_of(*values: str) -> Check:
    """A check that lists what is allowed."""
    return lambda x: x in values, "one of " + ", ".join(repr(value) for value in values)


def check_fields(config: ConfigDict, checks: dict[str, Check]) -> None:
    """Check every value alone."""
    for name, (is_allowed, allowed) in checks.items():
        value = field(config, name)
        if not is_allowed(value):
            raise UserError(f"config.{name} is {value!r}; allowed: {allowed}")


def field(config: ConfigDict, name: str) -> Any:
    """The value behind a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted names and values of all fields."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{name}.{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[name] = value
    return flat
