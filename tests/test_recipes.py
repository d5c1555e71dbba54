"""The paper's tables: every row is a valid configuration, of the size and FLOPs it should have."""

from pathlib import Path

import paper_flops
import pytest
import tiny
from test_config import VOCAB, load, parameters_of

from electra_jax.checks import objective_for, validate
from electra_jax.config import get_config
from electra_jax.errors import UserError
from electra_jax.recipes import read_argument

FILES = sorted((Path(__file__).parents[1] / "configs" / "paper").glob("*.py"))
TABLES = {path.stem: load(path) for path in FILES}


def make(table: str, row: str):
    return TABLES[table].get_config(row)


@pytest.mark.parametrize(
    ("table", "row"), [(table, row) for table in TABLES for row in TABLES[table].ROWS]
)
def test_every_row_is_valid_in_both_sizes(table, row):
    for argument in (row, f"{row},tiny"):
        for devices in (1, 8):
            validate(make(table, argument), devices)
    whole, small = make(table, row), make(table, f"{row},tiny")
    for name in ("objective", "algorithm", "loss", "masking"):
        assert whole[name] == small[name]
    for name in ("kind", "sharing"):
        assert whole.generator[name] == small.generator[name]
    share = whole.generator.mle_steps / whole.num_train_steps
    assert small.generator.mle_steps == share * small.num_train_steps
    assert tiny.count(parameters_of(small, 8192)) < 4_000_000


@pytest.mark.parametrize("table", TABLES)
def test_the_first_row_needs_no_name(table):
    first = TABLES[table].ROWS[0]
    assert TABLES[table].get_config() == make(table, first)
    assert make(table, "tiny") == make(table, f"{first},tiny")


def test_unknown_rows_are_refused():
    for argument in ("other", "joint,small", "tiny,joint", "jointtiny", ",tiny,tiny"):
        with pytest.raises(UserError, match=r"there is no row .*; allowed: joint, two_stage"):
            read_argument(argument, ("joint", "two_stage"))


@pytest.mark.parametrize(
    ("table", "row", "total"),
    [  # spec 7.11, and 7.6 for the paper's own rounding
        ("small", "electra", "1.424e+18"),
        ("small", "bert", "1.419e+18"),
        ("objectives", "electra", "6.425e+19"),
        ("objectives", "electra_15", "6.425e+19"),
        ("objectives", "bert", "6.428e+19"),
    ],
)
def test_flops_are_those_of_the_paper(table, row, total):
    assert f"{paper_flops.train_flops(make(table, row), VOCAB):.3e}" == total


@pytest.mark.parametrize("row", TABLES["generators"].ROWS)
def test_generator_of_a_row_has_the_width_in_its_name(row):
    discriminator, _, generator = row.partition("-")
    model = objective_for(make("generators", row), VOCAB).model
    assert model.discriminator.hidden_size == int(discriminator)
    assert str(model.generator.hidden_size if model.generator else "none") == (
        generator if generator.isdecimal() else "none"
    )


def test_default_is_the_first_objective():
    assert make("objectives", "electra").objective == get_config().objective
