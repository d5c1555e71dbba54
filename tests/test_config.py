import math
import runpy
import types
from pathlib import Path

import pytest
import tiny
from ml_collections import ConfigDict

import electra_jax.config as page
import electra_jax.settings as settings_page
from electra_jax.checks import objective_for, validate
from electra_jax.config import get_config, settings
from electra_jax.errors import UserError
from electra_jax.modeling.electra import structure
from electra_jax.settings import ANY, field, flatten

FINE_TUNING = ("classify", "glue", "squad", "tagging")
FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
RECIPES = [path for path in FILES if path.stem not in FINE_TUNING]
VOCAB = 30522

# Spec 4.4 and, for the last two columns, 1.1 and 2.1: hidden size and layers of both networks.
PUBLISHED = {
    # recipe: length, batch, steps, learning rate, masked, discriminator, generator
    "small": (128, 128, 1_000_000, 5e-4, 0.15, (256, 12), (64, 12)),
    "small_plus": (512, 128, 4_000_000, 5e-4, 0.15, (256, 12), (256, 12)),
    "base": (512, 256, 766_000, 2e-4, 0.15, (768, 12), (256, 12)),
    "large": (512, 2048, 400_000, 2e-4, 0.25, (1024, 24), (256, 24)),
    "large_plus": (512, 2048, 1_750_000, 2e-4, 0.25, (1024, 24), (256, 24)),
    "bert_small": (128, 128, 1_450_000, 5e-4, 0.15, None, (256, 12)),
    "bert_base": (512, 256, 1_000_000, 2e-4, 0.15, None, (768, 12)),
    "bert_large": (512, 2048, 464_000, 2e-4, 0.15, None, (1024, 24)),
}

COMMON = {  # spec 4.4, "Common to all"
    "data.vocab_size": 30522,
    "model.dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.init_stddev": 0.02,
    "model.max_positions": 512,
    "masking.mask_token_share": 0.85,
    "masking.random_token_share": 0.0,
    "loss.generator_weight": 1.0,
    "loss.discriminator_weight": 50.0,
    "optimizer.warmup_steps": 10_000,
    "optimizer.decay_power": 1.0,
    "optimizer.b1": 0.9,
    "optimizer.b2": 0.999,
    "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay": 0.01,
}


def load(path: Path) -> types.SimpleNamespace:
    """A recipe the way `--config=PATH` loads it: by its path alone."""
    return types.SimpleNamespace(**runpy.run_path(str(path)))


def recipe(name: str) -> ConfigDict:
    return load(next(path for path in RECIPES if path.stem == name)).get_config()


def changed(**overrides) -> ConfigDict:
    """The default with `section__field=value`s in place."""
    config = get_config()
    for name, value in overrides.items():
        assign(config, name.replace("__", "."), value)
    return config


def assign(config: ConfigDict, name: str, value: object) -> None:
    *sections, leaf = name.split(".")
    section = field(config, ".".join(sections)) if sections else config
    setattr(section, leaf, value)


def parameters_of(config: ConfigDict, vocab_size: int) -> dict:
    return structure(objective_for(config, vocab_size).model)[1]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_on_one_and_on_eight_devices(path):
    validate(load(path).get_config(), num_devices=1)
    validate(load(path).get_config(), num_devices=8)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_state_only_what_differs(path, monkeypatch):
    default, stated = flatten(get_config()), flatten(load(path).get_config())
    unset = object()
    blank = ConfigDict(get_config().to_dict(), type_safe=False)
    for name in default:
        assign(blank, name, unset)
    monkeypatch.setattr(page, "get_config", blank.lock)
    assigned = {
        name for name, value in flatten(load(path).get_config()).items() if value is not unset
    }
    assert assigned == {name for name in default if stated[name] != default[name]}


def test_every_published_recipe_is_there():
    assert {path.stem for path in RECIPES} >= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_equal_the_published_table(name):
    config = recipe(name)
    model = objective_for(config, VOCAB).model
    encoders = model.discriminator, model.generator
    sizes = [encoder and (encoder.hidden_size, encoder.num_layers) for encoder in encoders]
    assert PUBLISHED[name] == (
        config.data.sequence_length,
        config.batch_size,
        config.num_train_steps,
        config.optimizer.learning_rate,
        config.masking.rate,
        *sizes,
    )
    assert {field_name: field(config, field_name) for field_name in COMMON} == COMMON
    for encoder in filter(None, encoders):
        assert encoder.num_heads == encoder.hidden_size // 64
        assert encoder.intermediate_size == 4 * encoder.hidden_size
        assert encoder.embedding_size == (128 if "small" in name else config.model.hidden_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_tell_their_true_parameter_count(name):
    count = tiny.count(parameters_of(recipe(name), VOCAB))
    text = next(path for path in RECIPES if path.stem == name).read_text()
    assert f"\n{count:,} parameters" in text


@pytest.mark.parametrize("sharing", ["embeddings", "none", "all", "gdes"])
def test_the_table_of_sharing_modes_has_their_true_parameter_counts(sharing):
    config = recipe("base")
    config.generator.sharing = sharing
    config.generator.width = 1.0 if sharing == "all" else config.generator.width
    count = tiny.count(parameters_of(config, VOCAB))
    lines = (Path(__file__).parents[1] / "docs" / "objectives.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{sharing}` |")]
    assert row.endswith(f" {count:,} |")


def test_the_default_is_complete_and_locked():
    with pytest.raises(AttributeError, match="learning_rat"):
        get_config().optimizer.learning_rat = 1.0
    unchecked = {name for name, one in settings().items() if one.check is ANY}
    # File names, and switches: any value of their type makes sense.
    assert unchecked == {
        "init_from",
        "data.vocab",
        "data.lower_case",
        "data.strip_accents",
        "generator.init_from",
        "generator.disallow_correct",
        "checkpoint.keep_best",  # by the metrics of the objective, see `CLASHES`
        "parallel.shard_optimizer",
        "histograms",
    }


# What each check refuses; of a check with choices, any other word.
REFUSED = {
    settings_page.COUNT: [0],
    settings_page.NOT_NEGATIVE: [-1, math.inf],
    settings_page.POSITIVE: [0.0, math.nan],
    settings_page.SHARE: [-0.1, 1.1],
    settings_page.RATE: [-0.1, 1.0],
    settings_page.FRACTION: [0.0, 1.0],
    settings_page.GIVEN: [""],
    page.SEED: [-1, 2**32],
    page.TEMPERATURE: [0.0, -1.0, math.inf],
    page.FIVE_NAMES: [("[PAD]",), ("a", "a", "b", "c", "d"), ("a", "b", "c", "d", "")],
    page.STEPS: [(3,), (0, 2), (5, 4), (1, 2, 3), ("a", "b")],
    page.IF_INSTALLED: ["project"],
    page.DEVICES: [0, -2],
    settings()["data.vocab_size"].check: [99],
    settings()["data.sequence_length"].check: [7],
}
CASES = [
    (name, value)
    for name, one in settings().items()
    for value in (["other"] if one.check.choices else REFUSED.get(one.check, []))
    if isinstance(value, str | tuple) or one.type is float or value not in (math.inf, math.nan)
]


def test_every_check_is_tried():
    checks = {one.check for one in settings().values() if not one.check.choices}
    assert checks - {ANY} == {*REFUSED}


@pytest.mark.parametrize(("name", "value"), CASES)
def test_bad_values_are_refused_with_field_value_and_remedy(name, value):
    config = get_config()
    assign(config, name, value)
    with pytest.raises(UserError) as error:
        validate(config, num_devices=1)
    assert f"config.{name} is {value!r}" in str(error.value)
    assert str(settings()[name].check) in str(error.value)


# See the file; `config.` is left out in front of names.
CONFLICTS = Path(__file__).with_name("conflicts.txt").read_text().splitlines()[2:]


@pytest.mark.parametrize("line", CONFLICTS)
def test_values_that_do_not_go_together_are_refused_by_name(line):
    changes, *expected = line.split(" | ")
    config = get_config()
    for name, value in (change.split("=") for change in changes.split()):
        kind = settings()[name].type
        assign(config, name, value == "True" if kind is bool else kind(value))
    with pytest.raises(UserError) as error:
        validate(config, num_devices=8)
    assert [part for part in expected if part not in str(error.value)] == []


def test_tensor_parallel_devices_do_not_split_the_batch():
    config = changed(batch_size=2, parallel__tensor=4)
    validate(config, num_devices=8)


def test_half_a_generator_follows_its_width():
    generator = objective_for(
        changed(generator__width=0.5, generator__depth=0.25), 300
    ).model.generator
    found = generator.hidden_size, generator.num_heads, generator.intermediate_size
    assert found == (128, 2, 512)
    assert (generator.num_layers, generator.embedding_size) == (3, 128)


def test_explicit_heads_and_feed_forward_do_not_reach_the_generator():
    model = objective_for(changed(model__num_heads=8, model__intermediate_size=500), 300).model
    discriminator, generator = model.discriminator, model.generator
    assert (discriminator.num_heads, discriminator.intermediate_size) == (8, 500)
    assert (generator.num_heads, generator.intermediate_size) == (1, 256)
