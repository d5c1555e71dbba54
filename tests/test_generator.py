"""Generators that another run has trained."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from electra_jax.config import get_config
from electra_jax.data.tokenizers.base import SPECIAL_TOKENS
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.interop.generator import generator_weights
from electra_jax.jobs.pretraining import refuse_other_tables
from electra_jax.modeling.electra import network_of
from electra_jax.objectives import Objective
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import Checkpoints, restore_params
from electra_jax.training.program import make_program, with_params
from electra_jax.training.step import TrainState

SETTINGS = {"lower_case": True, "strip_accents": True, "max_word_chars": 200}
VOCABULARY = [*SPECIAL_TOKENS, *(f"word{i}" for i in range(tiny.VOCAB - 5))]
TOKENIZER = WordPiece(VOCABULARY, **SETTINGS)
STRUCTURE = tiny.objective("adversarial").structure()


@functools.cache
def start(objective: Objective, seed: int) -> TrainState:
    mesh = make_mesh(get_config().parallel)
    return make_program(mesh, objective, tiny.optimizer(), seed).init()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two: of masked language modeling, and of ELECTRA with a generator of half the width."""
    path = tmp_path_factory.mktemp("runs")
    for name, objective in {
        "bert": tiny.objective("mlm", embedding_size=32),
        "electra": tiny.objective(embedding_size=8),
    }.items():
        TOKENIZER.save(path / name / "tokenizer")
        with Checkpoints(path / name / "checkpoints", "hash", keep=1) as checkpoints:
            checkpoints.save(3, start(objective, seed=1), {}, {})
    return path


def restored(run: Path) -> dict[str, np.ndarray]:
    return tiny.flat(network_of(restore_params(run / "checkpoints")[1], "generator"))


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("bert", tiny.objective("two_stage", "none", embedding_size=32)),
        ("bert", tiny.objective("two_stage", "gdes", embedding_size=32)),
        ("electra", tiny.objective("adversarial")),
    ],
    ids=["own tables", "gdes", "shared tables and a baseline"],
)
def test_weights_go_where_the_generator_reads_them_and_nowhere_else(runs, name, objective):
    structure = objective.structure()
    found = generator_weights(runs / name, TOKENIZER, structure)
    has_own = "embeddings" in structure["generator"]
    expected = {
        f"generator/{path}" if has_own or not path.startswith("embeddings") else path: value
        for path, value in restored(runs / name).items()
    }
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    state = start(objective, seed=2)
    after = with_params(state, found)
    before = tiny.flat(state.params)
    for path, value in tiny.flat(after.params).items():
        np.testing.assert_array_equal(value, expected.get(path, before[path]), err_msg=path)
    layout = lambda state: jax.tree.map(lambda x: x.sharding, state)  # noqa: E731
    assert layout(after) == layout(state)


def test_another_size_is_refused(runs):
    with pytest.raises(
        UserError, match=r"init_from .* does not fit: embeddings/norm/bias is \(32,"
    ):
        generator_weights(runs / "bert", TOKENIZER, STRUCTURE)


def test_another_tokenizer_is_refused(runs):
    other = WordPiece(VOCABULARY[::-1], **SETTINGS)
    with pytest.raises(UserError, match=r"init_from is '.*bert', .* another tokenizer"):
        generator_weights(runs / "bert", other, STRUCTURE)


def test_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"checkpoints: there is no checkpoint"):
        generator_weights(tmp_path, TOKENIZER, STRUCTURE)


def test_run_without_a_generator_is_refused(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer")
    with Checkpoints(tmp_path / "checkpoints", "hash", keep=1) as checkpoints:
        checkpoints.save(3, TrainState(np.int32(3), {"embeddings": np.zeros(2)}, {}), {}, {})
    with pytest.raises(UserError, match="has no generator"):
        generator_weights(tmp_path, TOKENIZER, STRUCTURE)


def test_shared_tables_are_those_of_both_sources_or_refused():
    config = get_config()
    config.init_from, config.generator.init_from = "a", "b"
    table, other = np.zeros(3), np.ones(3)
    initial = {"embeddings/word": table, "generator/head": table}
    refuse_other_tables(config, initial, {"embeddings/word": table, "generator/head": other})
    message = "init_from is 'b', whose embeddings/word is not that of config.init_from = 'a'"
    with pytest.raises(UserError, match=message):
        refuse_other_tables(config, initial, {"embeddings/word": other})
