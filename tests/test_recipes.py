"""The paper's tables: every row is a valid configuration, of the size and FLOPs it should have."""

import importlib.util
from pathlib import Path

import jax
import paper_flops
import pytest

from electra_jax.checks import objective_for, validate
from electra_jax.config import get_config
from electra_jax.errors import UserError
from electra_jax.modeling.electra import structure
from electra_jax.recipes import read_argument

FILES = sorted((Path(__file__).parents[1] / "configs" / "paper").glob("*.py"))
VOCAB = 30522


def load(path: Path):
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECIPES = [(path, row) for path in FILES for row in load(path).ROWS]


def make(stem: str, argument: str):
    return load(next(path for path in FILES if path.stem == stem)).get_config(argument)


@pytest.mark.parametrize(
    ("path", "row"), RECIPES, ids=[f"{path.stem}:{row}" for path, row in RECIPES]
)
def test_every_row_is_valid_in_both_sizes(path, row):
    get = load(path).get_config
    for argument in (row, f"{row},tiny"):
        for devices in (1, 8):
            validate(get(argument), devices)
    whole, tiny = get(row), get(f"{row},tiny")
    for name in ("objective", "algorithm"):
        assert whole[name] == tiny[name]
    for name in ("kind", "sharing"):
        assert whole.generator[name] == tiny.generator[name]
    assert whole.loss == tiny.loss and whole.masking == tiny.masking
    share = whole.generator.mle_steps / whole.num_train_steps
    assert tiny.generator.mle_steps == share * tiny.num_train_steps
    params = structure(objective_for(tiny, 8192).model)[1]
    assert sum(x.size for x in jax.tree.leaves(params)) < 4_000_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_first_row_needs_no_name(path):
    module = load(path)
    assert module.get_config() == module.get_config(module.ROWS[0])
    assert module.get_config("tiny") == module.get_config(f"{module.ROWS[0]},tiny")


def test_unknown_rows_are_refused():
    for argument in ("other", "joint,small", "tiny,joint", "jointtiny", ",tiny,tiny"):
        with pytest.raises(UserError, match=r"there is no row .*; allowed: joint, two_stage"):
            read_argument(argument, ("joint", "two_stage"))


@pytest.mark.parametrize(
    ("recipe", "row", "total"),
    [  # spec 7.11, and 7.6 for the paper's own rounding
        ("small", "electra", "1.424e+18"),
        ("small", "bert", "1.419e+18"),
        ("objectives", "electra", "6.425e+19"),
        ("objectives", "electra_15", "6.425e+19"),
        ("objectives", "bert", "6.428e+19"),
    ],
)
def test_flops_are_those_of_the_paper(recipe, row, total):
    assert f"{paper_flops.train_flops(make(recipe, row), VOCAB):.3e}" == total


def test_generator_of_a_row_has_the_width_in_its_name():
    for row in load(next(path for path in FILES if path.stem == "generators")).ROWS:
        discriminator, _, generator = row.partition("-")
        model = objective_for(make("generators", row), VOCAB).model
        assert model.discriminator.hidden_size == int(discriminator)
        found = model.generator.hidden_size if model.generator else "no network"
        assert found == (int(generator) if generator.isdecimal() else "no network")


def test_default_is_the_first_objective():
    assert make("objectives", "electra").objective == get_config().objective
