"""What a setting is: default, meaning, check, and whether a run may go on with another value.

A section is a frozen dataclass whose fields are made by `setting`, each said once:

    @dataclasses.dataclass(frozen=True)
    class Optimizer:
        learning_rate: float = setting(5e-4, "at its peak", POSITIVE)
        b1: float = setting(0.9, "decay of the first moments", RATE)

A configuration is a section of sections. All else follows from them: the `ConfigDict` that recipes
and the command line change, the checks, and what may change when a run is resumed.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from electra_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Check:
    """Which values a setting may have: a predicate, and either words for it or all `choices`."""

    is_allowed: Callable[[Any], bool]
    allowed: str = ""
    choices: Collection[str] = ()

    def __str__(self) -> str:
        return self.allowed or "one of " + ", ".join(map(repr, self.choices))


ANY = Check(lambda x: True, "any value of this type")
GIVEN = Check(bool, "anything but nothing")
POSITIVE = Check(lambda x: 0 < x < math.inf, "a number above 0")
NOT_NEGATIVE = Check(lambda x: 0 <= x < math.inf, "0 or more")
SHARE = Check(lambda x: 0 <= x <= 1, "between 0 and 1")
RATE = Check(lambda x: 0 <= x < 1, "at least 0 and below 1")
FRACTION = Check(lambda x: 0 < x < 1, "above 0 and below 1")


def at_least(bound: int) -> Check:
    """This number and all above."""
    return Check(lambda x: x >= bound, f"at least {bound}")


COUNT = at_least(1)


def key_of(table: Collection[str]) -> Check:
    """Any key of `table`, which may grow."""
    return Check(lambda x: x in table, choices=table)


def one_of(*values: str) -> Check:
    """Any of these."""
    return key_of(values)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is said of a field; `is_free`: no number changes if a run goes on with another value."""

    default: Any
    meaning: str
    check: Check = ANY
    is_free: bool = False
    type: type = object


def setting(default: Any, meaning: str, check: Check = ANY, *, free: bool = False) -> Any:
    """A field of a section. None stands for "follows from others", and needs no check."""
    made = Setting(default, meaning, check, free)
    return dataclasses.field(default=default, metadata={"setting": made})


def settings_of(*sections: type) -> dict[str, Setting]:
    """All settings of some dataclasses, by dotted name; a field that is a dataclass is a section.

    Raises:
      TypeError: two of the sections say different things of one name.
    """
    found: dict[str, Setting] = {}
    for section in sections:
        hints, new = typing.get_type_hints(section), {}
        for field in dataclasses.fields(section):
            hint = hints[field.name]
            if dataclasses.is_dataclass(hint):
                new |= prefixed(field.name, settings_of(hint))
            elif made := field.metadata.get("setting"):
                new[field.name] = dataclasses.replace(made, type=_plain_type(hint))
        for name, made in new.items():
            if found.setdefault(name, made) != made:
                raise TypeError(f"{section.__name__} has another {name} than a section before")
    return found


def _plain_type(hint: Any) -> type:
    """`int` of `int | None` and of `int`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (x for x in typing.get_args(hint) if x is not types.NoneType)
    return typing.get_origin(hint) or hint


def to_config(settings: Mapping[str, Setting]) -> ConfigDict:
    """The configuration with all defaults, locked: unknown names are errors."""
    nested: dict[str, Any] = {}
    for name, one in settings.items():
        *sections, leaf = name.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[leaf] = placeholder(one.type) if one.default is None else one.default
    return ConfigDict(nested).lock()


def restored(stored: Mapping[str, Any], settings: Mapping[str, Setting]) -> ConfigDict:
    """A configuration that was stored as JSON, by an older or newer version.

    What it lacks has its default; what is no setting is passed over.

    Raises:
      TypeError, ValueError: a value is of another type than the setting.
    """
    config, values = to_config(settings), flatten(ConfigDict(stored))
    config.update_from_flattened_dict({x: values[x] for x in values if x in settings})
    return config


def check_values(config: ConfigDict, settings: Mapping[str, Setting]) -> None:
    """Raises UserError where a value by itself is not allowed."""
    for name, one in settings.items():
        value = field(config, name)
        if value is not None and not one.check.is_allowed(value):
            raise not_allowed(config, name, str(one.check))


class RecordedConfig:
    """A configuration, for reading alone, that adds the dotted names that are read to `read`."""

    def __init__(self, config: ConfigDict, read: set[str], prefix: str = ""):
        self._config, self._read, self._prefix = config, read, prefix

    def __getitem__(self, name: str) -> Any:
        value = self._config[name]
        if isinstance(value, ConfigDict):
            return RecordedConfig(value, self._read, f"{self._prefix}{name}.")
        self._read.add(self._prefix + name)
        return value

    __getattr__ = __getitem__


Config = ConfigDict | RecordedConfig


def field(config: Config, name: str) -> Any:
    """The value of a dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def not_allowed(config: Config, name: str, allowed: str, *causes: str) -> UserError:
    """The error that the value of `name` is wrong, given those of the settings `causes`."""
    given = " and ".join(f"config.{cause} = {field(config, cause)!r}" for cause in causes)
    allowed += f" with {given}" if given else ""
    return UserError(f"config.{name} is {field(config, name)!r}; allowed: {allowed}")


def flatten(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of all fields."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        is_section = isinstance(value, ConfigDict)
        flat |= flatten(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat


def prefixed(prefix: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """`settings` as those of the section `prefix`."""
    return {f"{prefix}.{name}": one for name, one in settings.items()}
