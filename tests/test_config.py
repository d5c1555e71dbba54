import importlib.util
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

import electra_jax.config
from electra_jax.config import (
    get_config,
    model_config,
    settings,
    validate,
)
from electra_jax.errors import UserError
from electra_jax.modeling.electra import structure
from electra_jax.settings import ANY, field, flatten

FINE_TUNING = ("classify", "glue", "squad", "tagging")
FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))
RECIPES = [path for path in FILES if path.stem not in FINE_TUNING]
VOCAB = 30522

# Spec 4.4 and, for the last two columns, 1.1 and 2.1: hidden size and layers of both towers.
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


def load(path: Path) -> ConfigDict:
    """A recipe the way `--config=PATH` loads it: by its path alone."""
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def recipe(name: str) -> ConfigDict:
    return load(next(path for path in RECIPES if path.stem == name))


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


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_on_one_and_on_eight_devices(path):
    validate(load(path), num_devices=1)
    validate(load(path), num_devices=8)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_state_only_what_differs(path, monkeypatch):
    default, stated = flatten(get_config()), flatten(load(path))
    unset = object()
    blank = ConfigDict(get_config().to_dict(), type_safe=False)
    for name in default:
        assign(blank, name, unset)
    monkeypatch.setattr(electra_jax.config, "get_config", blank.lock)
    assigned = {name for name, value in flatten(load(path)).items() if value is not unset}
    assert assigned == {name for name in default if stated[name] != default[name]}


def test_every_published_recipe_is_there():
    assert {path.stem for path in RECIPES} >= set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_equal_the_published_table(name):
    config = recipe(name)
    model = model_config(config, VOCAB)
    towers = model.discriminator, model.generator
    sizes = [tower and (tower.hidden_size, tower.num_layers) for tower in towers]
    assert PUBLISHED[name] == (
        config.data.sequence_length,
        config.batch_size,
        config.num_train_steps,
        config.optimizer.learning_rate,
        config.masking.rate,
        *sizes,
    )
    assert {field_name: field(config, field_name) for field_name in COMMON} == COMMON
    for tower in filter(None, towers):
        assert tower.num_heads == tower.hidden_size // 64
        assert tower.intermediate_size == 4 * tower.hidden_size
        assert tower.embedding_size == (128 if "small" in name else config.model.hidden_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_tell_their_true_parameter_count(name):
    parameters = structure(model_config(recipe(name), VOCAB))[1]
    count = sum(x.size for x in jax.tree.leaves(parameters))
    text = next(path for path in RECIPES if path.stem == name).read_text()
    assert f"\n{count:,} parameters" in text


@pytest.mark.parametrize("sharing", ["embeddings", "none", "all", "gdes"])
def test_the_table_of_sharing_modes_has_their_true_parameter_counts(sharing):
    config = recipe("base")
    config.generator.sharing = sharing
    config.generator.width = 1.0 if sharing == "all" else config.generator.width
    parameters = structure(model_config(config, VOCAB))[1]
    count = sum(x.size for x in jax.tree.leaves(parameters))
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


BAD_VALUES = {
    "task": ["finetune"],
    "objective": ["bert"],
    "algorithm": ["gan"],
    "seed": [-1, 2**32],
    "num_train_steps": [0],
    "init_missing": ["skip"],
    "init_resize": ["all"],
    "batch_size": [0],
    "ramp_steps": [-1],
    "num_microbatches": [0],
    "data.source": [""],
    "data.on_error": ["ignore"],
    "data.dir": [""],
    "data.tokenizer": ["sentencepiece"],
    "data.special_tokens": [("[PAD]",), ("a", "a", "b", "c", "d"), ("a", "b", "c", "d", "")],
    "data.vocab_size": [99],
    "data.max_word_chars": [0],
    "data.held_out": [0.0, 1.0],
    "data.layout": ["padded"],
    "data.sequence_length": [7],
    "data.num_threads": [0],
    "data.num_workers": [-1],
    "data.prefetch": [0],
    "model.hidden_size": [0],
    "model.num_layers": [0],
    "model.embedding_size": [0],
    "model.num_heads": [0, -1],
    "model.intermediate_size": [0],
    "model.max_positions": [0],
    "model.dropout": [-0.1, 1.0],
    "model.attention_dropout": [-0.1, 1.0],
    "model.init_stddev": [0.0],
    "model.dtype": ["float16"],
    "model.remat": ["some"],
    "model.scan_unroll": [0],
    "generator.kind": ["bigram"],
    "generator.mle_steps": [-1],
    "generator.width": [0.0, float("inf")],
    "generator.depth": [0.0, float("inf")],
    "generator.sharing": ["some"],
    "generator.temperature": [0.0, 1e-4, float("inf")],
    "generator.temperature_start": [0.0, 1e-4, float("inf")],
    "masking.mode": ["dirty"],
    "masking.unit": ["sentence"],
    "masking.rate": [0.0, 1.0],
    "masking.mask_token_share": [-0.1, 1.1],
    "masking.random_token_share": [-0.1, 1.1],
    "loss.generator_weight": [-1.0, float("inf")],
    "loss.generator_weight_start": [-1.0],
    "loss.discriminator_weight": [-1.0],
    "loss.discriminator_weight_start": [-1.0],
    "optimizer.learning_rate": [0.0, float("nan")],
    "optimizer.warmup_steps": [-1],
    "optimizer.decay_power": [0.0],
    "optimizer.b1": [-0.1, 1.0],
    "optimizer.b2": [-0.1, 1.0],
    "optimizer.epsilon": [0.0],
    "optimizer.weight_decay": [-0.1],
    "optimizer.max_grad_norm": [-1.0],
    "parallel.api": ["xmap"],
    "parallel.data": [0, -2],
    "parallel.fsdp": [0],
    "parallel.tensor": [0],
    "log_every_steps": [0],
    "eval_every_steps": [0],
    "max_skipped_updates": [-1],
    "profile_steps": [(3,), (0, 2), (5, 4), (1, 2, 3), ("a", "b")],
    "wandb": ["project"],
    "resume": ["other"],
    "checkpoint.every_steps": [0],
    "checkpoint.keep": [0],
}


def test_every_check_has_a_bad_value():
    assert set(BAD_VALUES) == {name for name, one in settings().items() if one.check is not ANY}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in BAD_VALUES for value in BAD_VALUES[name]]
)
def test_bad_values_are_refused_with_field_value_and_remedy(name, value):
    config = get_config()
    assign(config, name, value)
    with pytest.raises(UserError) as error:
        validate(config, num_devices=1)
    assert str(error.value) == f"config.{name} is {value!r}; allowed: {settings()[name].check}"


FULL_SIZE = {"generator__width": 1.0, "generator__depth": 1.0}

# Changes to the default, and what the message must name. All are checked on 8 devices.
CLASHES = {
    "length beyond positions": (
        {"data__sequence_length": 513},
        ["config.data.sequence_length is 513", "config.model.max_positions = 512"],
    ),
    "heads do not divide": (
        {"model__num_heads": 3},
        ["config.model.hidden_size is 256", "config.model.num_heads is 3"],
    ),
    "default heads do not divide": (
        {"model__hidden_size": 200, "generator__width": 0.32},
        ["config.model.hidden_size is 200", "config.model.num_heads is 3"],
    ),
    "generator's heads do not divide": (
        {"generator__width": 0.55},
        ["config.generator.width is 0.55", "141", "config.model.hidden_size = 256"],
    ),
    "full-size generator's heads do not divide": (
        {"model__hidden_size": 200, "model__num_heads": 5, **FULL_SIZE},
        ["config.generator.width is 1.0", "config.model.hidden_size = 200"],
    ),
    "generator without width": (
        {"generator__width": 0.001},
        ["config.generator.width is 0.001", "config.model.hidden_size = 256"],
    ),
    "generator without layers": (
        {"generator__depth": 0.04},
        ["config.generator.depth is 0.04", "config.model.num_layers = 12"],
    ),
    "BERT with a small generator": (
        {"objective": "mlm"},
        ["config.objective = 'mlm'", "config.generator.width = 1", "found 0.25 and 1.0"],
    ),
    "BERT with a flat generator": (
        {"objective": "mlm", **FULL_SIZE, "generator__depth": 0.5},
        ["config.objective = 'mlm'", "config.generator.depth = 1", "found 1.0 and 0.5"],
    ),
    "one tower of two sizes": (
        {"generator__sharing": "all"},
        ["config.generator.sharing = 'all'", "config.generator.width = 1", "found 0.25"],
    ),
    "nothing to share with": (
        {"objective": "mlm", **FULL_SIZE, "generator__sharing": "none"},
        ["config.generator.sharing is 'none'", "config.objective = 'mlm'"],
    ),
    "best by what is not measured": (
        {
            "objective": "mlm",
            **FULL_SIZE,
            "checkpoint__keep_best": "eval/rtd_auc",
            "checkpoint__every_steps": 10_000,
        },
        ["config.checkpoint.keep_best is 'eval/rtd_auc'", "config.objective = 'mlm'"],
    ),
    "an algorithm for one network": (
        {"objective": "mlm", **FULL_SIZE, "algorithm": "two_stage"},
        ["config.algorithm is 'two_stage'", "config.objective = 'mlm'", "leave it at 'joint'"],
    ),
    "samples that are never drawn": (
        {"objective": "mlm", **FULL_SIZE, "generator__temperature": 2.0},
        ["config.generator.temperature is 2.0", "config.objective = 'mlm'", "leave it at 1.0"],
    ),
    "a second loss of one network": (
        {"objective": "mlm", **FULL_SIZE, "loss__discriminator_weight": 1.0},
        ["config.loss.discriminator_weight is 1.0", "leave it at 50.0"],
    ),
    "size of no network": (
        {"generator__kind": "unigram", "generator__width": 0.5},
        ["config.generator.width is 0.5", "config.generator.kind = 'unigram'"],
    ),
    "temperature of equal logits": (
        {"generator__kind": "uniform", "generator__temperature": 0.5},
        ["config.generator.temperature is 0.5", "config.generator.kind = 'uniform'"],
    ),
    "masks that nobody sees": (
        {"generator__kind": "unigram", "masking__mask_token_share": 1.0},
        ["config.masking.mask_token_share is 1.0", "config.generator.kind = 'unigram'"],
    ),
    "loss of the frozen": (
        {
            "generator__kind": "frozen",
            "generator__sharing": "gdes",
            "loss__generator_weight": 2.0,
        },
        ["config.loss.generator_weight is 2.0", "config.generator.kind = 'frozen'"],
    ),
    "frozen tables that move": (
        {"generator__kind": "frozen"},
        ["config.generator.sharing is 'embeddings'", "config.generator.kind = 'frozen'", "'gdes'"],
    ),
    "two stages and shared tables": (
        {"algorithm": "two_stage", **FULL_SIZE, "generator__mle_steps": 100},
        ["config.generator.sharing is 'embeddings'", "config.algorithm = 'two_stage'", "'gdes'"],
    ),
    "two stages of two sizes": (
        {"algorithm": "two_stage", "generator__sharing": "gdes", "generator__mle_steps": 100},
        ["config.algorithm = 'two_stage'", "config.generator.width = 1"],
    ),
    "two stages of two embedding sizes": (
        {
            "algorithm": "two_stage",
            **FULL_SIZE,
            "generator__sharing": "none",
            "generator__mle_steps": 100,
        },
        ["config.algorithm = 'two_stage'", "config.model.embedding_size"],
    ),
    "no second stage": (
        {
            "algorithm": "two_stage",
            **FULL_SIZE,
            "generator__sharing": "gdes",
            "generator__mle_steps": 1_000_000,
        },
        ["config.generator.mle_steps is 1000000", "config.num_train_steps = 1000000"],
    ),
    "stages of joint training": (
        {"generator__mle_steps": 5},
        ["config.generator.mle_steps is 5", "config.algorithm = 'joint'", "leave it at 0"],
    ),
    "rewards without verdicts": (
        {"algorithm": "adversarial", "objective": "replace_mlm"},
        ["config.objective is 'replace_mlm'", "config.algorithm = 'adversarial'"],
    ),
    "rewards for averages": (
        {"algorithm": "adversarial", "masking__mode": "faithful"},
        ["config.masking.mode is 'faithful'", "config.algorithm = 'adversarial'"],
    ),
    "weights for half a tower": (
        {"generator__init_from": "runs/x", "generator__sharing": "all", **FULL_SIZE},
        ["config.generator.init_from is 'runs/x'", "config.generator.sharing = 'all'"],
    ),
    "a start without an end": (
        {"loss__discriminator_weight_start": 1.0},
        ["config.loss.discriminator_weight_start is 1.0", "config.ramp_steps = 0"],
    ),
    "a ramp of nothing": (
        {"ramp_steps": 10},
        ["config.ramp_steps is 10", "config.generator.temperature_start"],
    ),
    "a ramp beyond the end": (
        {"ramp_steps": 1_000_001, "loss__discriminator_weight_start": 0.0},
        ["config.ramp_steps is 1000001", "config.num_train_steps = 1000000"],
    ),
    "a ramp that ends before the second stage": (
        {
            "algorithm": "two_stage",
            **FULL_SIZE,
            "generator__sharing": "gdes",
            "generator__mle_steps": 100,
            "ramp_steps": 100,
            "generator__temperature_start": 2.0,
        },
        ["config.generator.temperature_start is 2.0", "ramp_steps = 100", "mle_steps = 100"],
    ),
    "the weight of a stage that is not there": (
        {
            "algorithm": "two_stage",
            "generator__sharing": "gdes",
            "loss__generator_weight": 2.0,
        },
        ["config.loss.generator_weight is 2.0", "config.generator.mle_steps = 0"],
    ),
    "no time for a policy": (
        {"algorithm": "adversarial", "generator__mle_steps": 1_000_000},
        ["config.generator.mle_steps is 1000000", "config.num_train_steps = 1000000"],
    ),
    "nothing to train": (
        {"loss__generator_weight": 0.0, "loss__discriminator_weight": 0.0},
        ["config.loss.generator_weight and config.loss.discriminator_weight = 0", "nothing"],
    ),
    "nothing to train beside a table": (
        {"generator__kind": "unigram", "loss__discriminator_weight": 0.0},
        ["config.loss.discriminator_weight = 0", "nothing to train"],
    ),
    "other sizes of nothing": (
        {"init_resize": "positions"},
        ["config.init_resize is 'positions'", "config.init_from = ''"],
    ),
    "best loss of a policy": (
        {
            "algorithm": "adversarial",
            "checkpoint__keep_best": "eval/loss",
            "checkpoint__every_steps": 10_000,
        },
        ["config.checkpoint.keep_best is 'eval/loss'", "config.algorithm = 'adversarial'"],
    ),
    "best verdicts of a reconstruction": (
        {
            "objective": "all_tokens_mlm",
            "checkpoint__keep_best": "eval/rtd_auc",
            "checkpoint__every_steps": 10_000,
        },
        ["config.checkpoint.keep_best is 'eval/rtd_auc'", "config.objective = 'all_tokens_mlm'"],
    ),
    "best likelihood of a table": (
        {
            "generator__kind": "uniform",
            "checkpoint__keep_best": "eval/mlm_loss",
            "checkpoint__every_steps": 10_000,
        },
        ["config.checkpoint.keep_best is 'eval/mlm_loss'", "config.generator.kind = 'uniform'"],
    ),
    "best without evaluation": (
        {"checkpoint__keep_best": "eval/loss"},
        [
            "config.checkpoint.every_steps is 1000",
            "config.checkpoint.keep_best",
            "config.eval_every_steps = 10000",
        ],
    ),
    "shares above one": (
        {"masking__random_token_share": 0.2},
        ["config.masking.mask_token_share", "config.masking.random_token_share", "0.85 and 0.2"],
    ),
    "words drawn with replacement": (
        {"masking__unit": "word", "masking__mode": "faithful"},
        ["config.masking.unit is 'word'", "config.masking.mode = 'faithful'"],
    ),
    "accents of upper case": (
        {"data__lower_case": False},
        ["config.data.strip_accents is True", "config.data.lower_case"],
    ),
    "mesh too small": (
        {"parallel__data": 2},
        ["config.parallel.data", "config.parallel.fsdp", "are 2, 1 and 1", "devices, 8"],
    ),
    "mesh does not divide": (
        {"parallel__fsdp": 3},
        ["config.parallel.fsdp", "config.parallel.tensor", "are -1, 3 and 1", "devices, 8"],
    ),
    "pmap with sharded parameters": (
        {"parallel__api": "pmap", "parallel__fsdp": 2},
        ["config.parallel.api = 'pmap'", "config.parallel.fsdp = 1", "found 2 and 1"],
    ),
    "pmap with a sharded optimiser": (
        {"parallel__api": "pmap", "parallel__shard_optimizer": True},
        ["config.parallel.shard_optimizer is True", "config.parallel.api = 'pmap'"],
    ),
    "batch does not divide over devices": (
        {"batch_size": 100},
        ["config.batch_size is 100", "multiple of 8", "8 devices"],
    ),
    "batch does not divide over micro-batches": (
        {"num_microbatches": 3},
        ["config.batch_size is 128", "multiple of 24", "config.num_microbatches = 3"],
    ),
}


@pytest.mark.parametrize("case", CLASHES)
def test_clashing_values_are_refused_by_name(case):
    overrides, expected = CLASHES[case]
    config = changed(**overrides)
    with pytest.raises(UserError) as error:
        validate(config, num_devices=8)
    assert [part for part in expected if part not in str(error.value)] == []


def test_tensor_parallel_devices_do_not_split_the_batch():
    config = changed(batch_size=2, parallel__tensor=4)
    validate(config, num_devices=8)


def test_half_a_generator_follows_its_width():
    generator = model_config(changed(generator__width=0.5, generator__depth=0.25), 300).generator
    assert (generator.hidden_size, generator.num_heads, generator.intermediate_size) == (
        128,
        2,
        512,
    )
    assert (generator.num_layers, generator.embedding_size) == (3, 128)


def test_explicit_heads_and_feed_forward_do_not_reach_the_generator():
    model = model_config(changed(model__num_heads=8, model__intermediate_size=500), 300)
    discriminator, generator = model.discriminator, model.generator
    assert (discriminator.num_heads, discriminator.intermediate_size) == (8, 500)
    assert (generator.num_heads, generator.intermediate_size) == (1, 256)
