import dataclasses

import pytest
from ml_collections import ConfigDict

from electra_jax.errors import UserError
from electra_jax.settings import (
    COUNT,
    RecordedConfig,
    check_values,
    flatten,
    key_of,
    setting,
    settings_of,
    to_config,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = setting(4, "of what", COUNT)
    height: int | None = setting(None, "default: as width", COUNT, free=True)
    computed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str = setting("a", "of it")
    inner: Inner


def test_a_section_says_everything_once():
    settings = settings_of(Outer)
    assert [*settings] == ["name", "inner.width", "inner.height"]
    assert settings["inner.height"].is_free and settings["inner.height"].type is int
    config = to_config(settings)
    assert flatten(config) == {"name": "a", "inner.width": 4, "inner.height": None}
    config.inner.height = 3
    with pytest.raises(TypeError):
        config.inner.height = "high"
    with pytest.raises(AttributeError):
        config.inner.depth = 3
    check_values(config, settings)
    config.inner.height = 0
    with pytest.raises(UserError, match=r"config.inner.height is 0; allowed: at least 1"):
        check_values(config, settings)


def test_sections_of_several_parts_agree_on_what_they_share():
    @dataclasses.dataclass(frozen=True)
    class Other:
        width: int = setting(5, "of what", COUNT)

    same = settings_of(Inner, Inner)
    assert [*same] == ["width", "height"]
    with pytest.raises(TypeError, match="width"):
        settings_of(Inner, Other)


def test_a_table_that_grows_allows_its_new_keys():
    table = {"a": 1}
    check = key_of(table)
    assert not check.is_allowed("b") and str(check) == "one of 'a'"
    table["b"] = 2
    assert check.is_allowed("b") and str(check) == "one of 'a', 'b'"


def test_what_was_read_is_known_by_its_dotted_name():
    read: set[str] = set()
    config = RecordedConfig(ConfigDict({"a": 1, "inner": {"b": 2, "c": 3}}), read)
    assert config.inner.b + config["inner"]["b"] == 4
    assert read == {"inner.b"}
