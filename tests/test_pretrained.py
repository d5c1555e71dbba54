"""Weights to start from: every kind of source gives the same parameters, or says why not."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import weights
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file
from weights import (
    VOCAB,
    assert_equal,
    change_json,
    main_network,
    random_params,
    recipe,
    save_both,
    save_huggingface,
    save_original,
    save_run,
    vocabulary,
)

from electra_jax.errors import UserError
from electra_jax.interop.pretrained import load_encoder, load_networks
from electra_jax.objectives import Objective, make_objective
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.program import Program, make_program, with_params

pytestmark = pytest.mark.process

VARIANTS = {  # of what one file or directory can hold
    "shared embeddings": {},
    "own embeddings": {"generator.sharing": "none"},
    "one encoder": {"generator.sharing": "all", "generator.width": 1.0},
    "full-size generator": {"generator.width": 1.0},
    "bert": {"objective": "mlm", "generator.width": 1.0},
}


@pytest.fixture(autouse=True)
def tensorflow(monkeypatch):
    """Reads what `save_original` writes; tests/test_tensorflow.py has the real one."""
    monkeypatch.setitem(sys.modules, "tensorflow", weights.TENSORFLOW)


def load(config: ConfigDict, location: str, vocab: list[str] = VOCAB, **changes):
    config = config.copy_and_resolve_references()
    config.init_from = location
    config.update_from_flattened_dict(changes)
    log: list[str] = []
    tokenizer = vocabulary(vocab)
    loaded = load_networks(config, make_objective(config, tokenizer), tokenizer, log.append)
    return loaded, log


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_and_the_original_and_hugging_face_give_the_parameters_back(variant, tmp_path):
    config = recipe(**VARIANTS[variant], init_missing="error")
    _, params = random_params(config)
    original = save_original(tmp_path / "original", params)
    for location in (
        save_run(tmp_path / "run", config, params),
        save_both(tmp_path / "huggingface", params),
        original,
        f"{original}/model.ckpt-7",
        f"{original}/model.ckpt-7.index",
    ):
        loaded, log = load(config, location)
        assert_equal(loaded, params)
        assert "initialized: nothing" in log


def test_every_tensor_of_the_original_is_in_the_table(tmp_path):
    _, params = random_params(recipe())
    log = load(recipe(), save_original(tmp_path / "original", params))[1]
    lines = {line.strip() for line in log}
    assert lines > {
        "electra/embeddings/word_embeddings -> embeddings/word",
        "electra/encoder/layer_*/attention/self/key/kernel -> "
        "discriminator/encoder/layers/attention/qkv/kernel",
        "generator/encoder/layer_*/output/LayerNorm/beta -> "
        "generator/encoder/layers/output_norm/bias",
        "generator_predictions/output_bias -> generator/head/bias",
        "generator/embeddings_project/kernel/adam_m -> not used: the optimizer's moments; training "
        "starts with fresh ones",
        "global_step -> not used: the step; training starts at 0",
        "temperature -> not used: left in published checkpoints, read by nothing",
    }
    assert len(lines) == 3 * (5 + 2 * 18 + 4 + 5) + 2 + 2  # kinds of weights, moments, two, title


def test_every_tensor_of_hugging_face_is_in_the_table(tmp_path):
    _, params = random_params(recipe())
    pretrained = load_encoder(save_huggingface(tmp_path / "a", params, "generator"))
    names = {
        name.replace("layer.1", "layer.*").replace("layer.0", "layer.*")
        for name in load_file(tmp_path / "a" / "model.safetensors")
    }
    assert sorted(line.split(" -> ")[0] for line in pretrained.table) == sorted(names)
    lines = [line for line in pretrained.table if "not used" in line]
    assert len(lines) == 6  # dense, norm, bias, and the word table once more
    assert "generator_lm_head.weight -> not used: the word table once more" in lines
    assert "generator_lm_head.bias -> not used: a head that is not needed here" in lines


@pytest.mark.parametrize("save", [save_both, save_original])
def test_an_encoder_for_fine_tuning(save, tmp_path):
    _, params = random_params(recipe())
    pretrained = load_encoder(save(tmp_path / "source", params).split(",")[0])
    assert_equal(tiny.flat(pretrained.params), main_network(params))
    assert pretrained.tokenizer.hash == vocabulary().hash
    sizes = pretrained.encoder_config
    assert (sizes.hidden_size, sizes.num_layers, sizes.num_heads) == (64, 2, 1)
    assert (sizes.embedding_size, sizes.intermediate_size, sizes.max_positions) == (16, 256, 24)


@pytest.mark.parametrize("objective", ["mlm", "replace_mlm", "all_tokens_mlm"])
def test_the_encoder_of_a_run_is_the_discriminators_or_the_only_one(objective, tmp_path):
    """Heads that only some objectives have are no parts, and are named as not used."""
    width = 1.0 if objective == "mlm" else 0.5
    config = recipe(**{"objective": objective, "model.dropout": 0.25, "generator.width": width})
    _, params = random_params(config)
    pretrained = load_encoder(save_run(tmp_path / "run", config, params))
    assert_equal(tiny.flat(pretrained.params), main_network(params))
    assert pretrained.encoder_config.dropout == 0.25
    owner = "generator" if objective == "mlm" else "discriminator"
    head = [line for line in pretrained.table if line.startswith(f"{owner}/head/")]
    assert len(head) >= 5 and all("not used: a head" in line for line in head)


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_bert_with_its_head_continues_as_masked_language_model(prefix, tmp_path):
    config = recipe(**VARIANTS["bert"], **{"model.embedding_size": 64})
    _, params = random_params(config)
    location = save_huggingface(tmp_path / "bert", params, "generator")
    tensors = load_file(tmp_path / "bert" / "model.safetensors")
    for ours, theirs in {
        "generator_predictions.": "cls.predictions.transform.",
        "generator_lm_head.bias": "cls.predictions.bias",
        "generator_lm_head.weight": "cls.predictions.decoder.weight",
        "electra.": prefix,
    }.items():
        tensors = {name.replace(ours, theirs): x for name, x in tensors.items()}
    tensors[f"{prefix}pooler.dense.weight"] = np.zeros((64, 64), np.float32)
    tensors["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    tensors[f"{prefix}embeddings.position_ids"] = np.arange(24)[None]
    save_file(tensors, tmp_path / "bert" / "model.safetensors")
    change_json(tmp_path / "bert" / "config.json", model_type="bert", embedding_size=None)
    loaded, log = load(config, location)
    assert_equal(loaded, params)
    assert {line.strip() for line in log if "not used" in line} == {
        f"{prefix}pooler.dense.weight -> not used: BERT's pooler; ELECTRA has none",
        "cls.seq_relationship.bias -> not used: BERT's head for the next sentence; ELECTRA has "
        "none",
        f"{prefix}embeddings.position_ids -> not used: numbers 0, 1, 2 ..., no weights",
        "cls.predictions.decoder.weight -> not used: the word table once more",
    }


def test_a_missing_network_is_an_explicit_choice(tmp_path):
    config = recipe(**{"generator.width": 1.0})
    _, params = random_params(config)
    location = save_huggingface(tmp_path / "a", params, "discriminator")
    with pytest.raises(UserError, match=r"holds discriminator, but no generator; .*init_missing"):
        load(config, location)

    loaded, log = load(config, location, init_missing="initialize")
    del params["generator"]
    assert_equal(loaded, params)
    assert [line for line in log if "generator/encoder/layers/up/kernel" in line] == [log[-1]]
    assert log[-1].startswith("initialized: ")

    loaded, log = load(config, location, init_missing="copy")
    encoder = params["discriminator"]["encoder"]
    assert_equal(loaded, params | {"generator": {"encoder": encoder}})
    assert "generator/head/dense/kernel" in log[-1]
    line = next(line for line in log if "layer.*.output.dense.bias" in line)
    assert "discriminator/encoder/layers/down/bias, generator/encoder/layers/down/bias" in line


def test_an_encoder_without_a_head_is_the_main_networks(tmp_path):
    config = recipe(**{"generator.width": 1.0})
    _, params = random_params(config)
    location = save_huggingface(tmp_path / "a", params, "encoder")
    with pytest.raises(UserError, match="holds encoder, but no discriminator and no generator"):
        load(config, location)
    tree = {"embeddings": params["embeddings"]}
    encoder = {"encoder": params["discriminator"]["encoder"]}
    loaded, _ = load(config, location, init_missing="initialize")
    assert_equal(loaded, tree | {"discriminator": encoder})
    loaded, _ = load(config, location, init_missing="copy")
    assert_equal(loaded, tree | {"discriminator": encoder, "generator": encoder})


def test_sources_of_which_nothing_would_be_used_are_refused(tmp_path):
    _, params = random_params(recipe())
    location = save_huggingface(tmp_path / "a", params, "discriminator")
    config = recipe(**VARIANTS["bert"])
    with pytest.raises(UserError, match="nothing would be used"):
        load(config, location, init_missing="initialize")
    loaded, _ = load(config, location, init_missing="copy")
    assert {name.split("/")[0] for name in loaded} == {"embeddings", "generator"}


def test_networks_of_two_runs_share_no_embeddings(tmp_path):
    _, params = random_params(recipe())
    first = save_huggingface(tmp_path / "a", params, "discriminator")
    params["embeddings"]["norm"]["bias"] = params["embeddings"]["norm"]["bias"] + 1
    second = save_huggingface(tmp_path / "b", params, "generator")
    for change in ({"location": f"{first},{second}"}, {"generator.init_from": second}):
        changes = {"location": first, "init_missing": "error"} | change
        with pytest.raises(UserError, match=r"embeddings/norm/bias is one .*/b .*sharing = 'none'"):
            load(recipe(), **changes)
    with pytest.raises(UserError, match="both hold a network of the kind 'generator'"):
        load(recipe(), f"{second},{second}")


@pytest.mark.parametrize(
    ("source", "run"),
    [
        ({"model.embedding_size": 64}, {"generator.sharing": "none"}),
        ({}, {"generator.sharing": "gdes"}),
        ({}, {"algorithm": "adversarial", "generator.mle_steps": 2}),
    ],
    ids=["own tables", "gdes", "shared tables and a baseline"],
)
def test_the_generator_of_another_run_goes_where_it_is_read_and_nowhere_else(source, run, tmp_path):
    source = recipe(**VARIANTS["bert"], **source)
    _, params = random_params(source)
    location = save_run(tmp_path / "run", source, params)
    config = recipe(**{"generator.width": 1.0, **run})
    found, log = load(config, "", **{"generator.init_from": location})
    own = make_objective(config, vocabulary()).structure()["generator"]
    expected = {"generator": params["generator"]}
    if "embeddings" in own:
        expected["generator"] |= {"embeddings": params["embeddings"]}
    else:
        expected["embeddings"] = params["embeddings"]
    assert_equal(found, expected)
    assert f"weights of {location}:" in log
    assert log[-1].startswith("initialized: discriminator/")


def test_two_settings_can_give_a_network_each(tmp_path):
    _, params = random_params(recipe())
    first, second = save_both(tmp_path / "a", params).split(",")
    assert_equal(load(recipe(), first, **{"generator.init_from": second})[0], params)
    with pytest.raises(UserError, match=r"generator.init_from is '.*discr.*there is no generator"):
        load(recipe(), first, **{"generator.init_from": first})


def test_a_configuration_of_another_size_is_refused_by_its_fields(tmp_path):
    _, params = random_params(recipe())
    location = save_both(tmp_path / "a", params)
    for changes, message in (
        (
            {"generator.width": 1.0},
            r"generator .*size is 32 there and 64 here \(config.generator.w",
        ),
        ({"model.num_heads": 2}, r"num_heads is 1 there and 2 here \(config.model.num_heads"),
        ({"model.max_positions": 32}, "max_positions is 24 there and 32 here"),
    ):
        with pytest.raises(UserError, match=message):
            load(recipe(**changes), location)


@pytest.mark.parametrize("length", [17, 40])
def test_position_tables_are_cut_or_lengthened_on_request(length, tmp_path):
    _, params = random_params(recipe())
    config = recipe(**{"model.max_positions": length})
    loaded, log = load(config, save_both(tmp_path / "a", params), init_resize="positions")
    kept = min(24, length)
    assert any(f"first {kept} rows" in line and f"{24 - kept} of the" in line for line in log)
    table = loaded.pop("embeddings/position")
    np.testing.assert_array_equal(table[:kept], params["embeddings"]["position"][:kept])
    assert len(table) == length
    del params["embeddings"]["position"]
    assert_equal(loaded, params)


def test_rows_of_another_vocabulary_are_matched_by_token_on_request(tmp_path):
    _, params = random_params(recipe())
    location = save_both(tmp_path / "a", params)
    vocab = ["new", *VOCAB[:5], "##x", *reversed(VOCAB[10:])]
    with pytest.raises(UserError, match=r"token 0 on .* vocabulary of config.data.*init_resize"):
        load(recipe(), location, vocab)
    config = recipe(**{"model.max_positions": 40})
    loaded, log = load(config, location, vocab, init_resize="positions,vocabulary")
    fresh = tiny.flat(on_devices(make_objective(config, vocabulary(vocab))).init().params)
    theirs = tiny.flat(params)
    for name in ("embeddings/word", "generator/head/bias"):
        for i, token in enumerate(vocab):
            row = theirs[name][VOCAB.index(token)] if token in VOCAB else fresh[name][i]
            np.testing.assert_array_equal(loaded[name][i], row)
    rest = loaded["embeddings/position"][24:]
    np.testing.assert_array_equal(rest, fresh["embeddings/position"][24:])
    assert any("26 rows are those of the same tokens" in line for line in log)
    assert any("2 are initialized, 5 of the source are left out" in line for line in log)


def test_special_tokens_are_matched_by_what_they_are_for(tmp_path):
    _, params = random_params(recipe())
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    theirs = vocabulary(names + VOCAB[5:], special_tokens=names)
    location = save_huggingface(tmp_path / "a", params, "discriminator", theirs)
    changes = {"init_resize": "vocabulary", "init_missing": "initialize"}
    loaded, _ = load(recipe(), location, **changes)
    np.testing.assert_array_equal(loaded["embeddings/word"], params["embeddings"]["word"])


def test_flags_of_the_tokenizer_are_compared(tmp_path):
    _, params = random_params(recipe())
    tokenizer = vocabulary(lower_case=False, strip_accents=False)
    location = save_huggingface(tmp_path / "a", params, "discriminator", tokenizer)
    with pytest.raises(UserError, match=r"lower_case is False there and True here; .*allowed: "):
        load(recipe(), location, init_missing="initialize")


def test_a_vocabulary_one_row_short_is_refused(tmp_path):
    _, params = random_params(recipe())
    location = save_both(tmp_path / "a", params).split(",")[0]
    (Path(location) / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCAB[:-1]))
    message = "the vocabulary has 30 tokens, but the word table of the discriminator has 31 rows"
    for attempt in (load_encoder, lambda x: load(recipe(), x, VOCAB, init_missing="initialize")):
        with pytest.raises(UserError, match=message):
            attempt(location)


def on_devices(objective: Objective, fsdp: int = 1) -> Program:
    sizes = ConfigDict({"data": 1, "fsdp": fsdp, "tensor": 1})
    mesh = make_mesh(sizes, devices=jax.devices()[:fsdp])
    return make_program(mesh, objective, tiny.optimizer(), seed=0)


def test_the_first_loss_is_that_of_the_source_and_all_else_is_fresh(tmp_path):
    config = recipe()
    objective, params = random_params(config)
    loaded, _ = load(config, save_both(tmp_path / "a", params))
    program = on_devices(objective, fsdp=4)
    started = with_params(program.init(), loaded)
    assert int(started.step) == 0
    assert all(not x.any() for x in jax.tree.leaves(started.opt_state))
    assert_equal(tiny.flat(started.params), params)
    batch = program.place(tiny.packed(4, 16, len(VOCAB)))
    losses = program.eval_step(started.params, batch)
    expected = program.eval_step(with_params(program.init(), tiny.flat(params)).params, batch)
    assert losses["mlm_loss"][1] > 0
    for name in ("mlm_loss", "rtd_loss"):
        np.testing.assert_array_equal(losses[name], expected[name])
