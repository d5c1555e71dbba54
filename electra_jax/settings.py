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
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from electra_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Check:
    """Which values a setting may have.

    Attributes:
      is_allowed: of a value.
      allowed: these values in words.
      choices: all of these values where they are few; the keys of a table that may grow.
    """

    is_allowed: Callable[[Any], bool]
    allowed: str = ""
    choices: Collection[str] = ()

    def __str__(self) -> str:
        return self.allowed or "one of " + ", ".join(map(repr, self.choices))


ANY = Check(lambda x: True, "any value of this type")
GIVEN = Check(bool, "anything but nothing")
POSITIVE = Check(lambda x: 0 < x < math.inf, "a number above 0")
COUNT = Check(lambda x: x >= 1, "at least 1")
NOT_NEGATIVE = Check(lambda x: 0 <= x < math.inf, "0 or more")
SHARE = Check(lambda x: 0 <= x <= 1, "between 0 and 1")
RATE = Check(lambda x: 0 <= x < 1, "at least 0 and below 1")
FRACTION = Check(lambda x: 0 < x < 1, "above 0 and below 1")


def one_of(*values: str) -> Check:
    """Any of these."""
    return Check(lambda x: x in values, choices=values)


def key_of(table: Mapping[str, Any]) -> Check:
    """Any key of `table`, which may grow."""
    return Check(lambda x: x in table, choices=table.keys())


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is said of a field beside its name and type.

    Attributes:
      meaning: in a few words, with the unit.
      check: of values other than None.
      is_free: whether a run may go on with another value: no number that it computes changes.
    """

    default: Any
    meaning: str
    check: Check = ANY
    is_free: bool = False
    type: type = object


def setting(default: Any, meaning: str, check: Check = ANY, *, free: bool = False) -> Any:
    """The default of a field of a section. None stands for "follows from others"."""
    made = Setting(default, meaning, check, free)
    return dataclasses.field(default=default, metadata={"setting": made})


def settings_of(*sections: type) -> dict[str, Setting]:
    """All settings of a section, by dotted name; of several sections, those of all in one.

    Args:
      sections: dataclasses. A field whose type is a dataclass is a section inside. Fields that are
        not made by `setting` are none.

    Raises:
      TypeError: two of the sections say different things of one name.
    """
    found: dict[str, Setting] = {}
    for section in sections:
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            hint = hints[field.name]
            if dataclasses.is_dataclass(hint):
                new = {f"{field.name}.{name}": x for name, x in settings_of(hint).items()}
            elif "setting" in field.metadata:
                made = dataclasses.replace(field.metadata["setting"], type=_plain_type(hint))
                new = {field.name: made}
            else:
                new = {}
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
    config = ConfigDict()
    for name, one in settings.items():
        *sections, leaf = name.split(".")
        section = config
        for part in sections:
            if part not in section:
                section[part] = ConfigDict()
            section = section[part]
        section[leaf] = placeholder(one.type) if one.default is None else one.default
    return config.lock()


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
    """Check every value alone.

    Raises:
      UserError: names the field, what was found and what is allowed.
    """
    for name, one in settings.items():
        value = field(config, name)
        if value is not None and not one.check.is_allowed(value):
            raise UserError(f"config.{name} is {value!r}; allowed: {one.check}")


class RecordedConfig:
    """A configuration, for reading alone, that remembers the fields that were read.

    Args:
      read: receives their dotted names.
    """

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


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted names and values of all fields."""
    return dict(_flatten(config, ""))


def _flatten(config: ConfigDict, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def prefixed(prefix: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """`settings` as those of the section `prefix`."""
    return {f"{prefix}.{name}": one for name, one in settings.items()}
