"""Weights to start from: every kind of source gives the same parameters, or says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import bundles
import jax
import numpy as np
import pytest
import tiny
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from electra_jax.config import get_config
from electra_jax.data.tokenizers.wordpiece import WordPiece
from electra_jax.errors import UserError
from electra_jax.interop import huggingface
from electra_jax.interop.export import write
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.pretrained import load_encoder, load_networks
from electra_jax.modeling.electra import network_of
from electra_jax.modeling.encoders.bert import NAMING
from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective, make_objective
from electra_jax.run.workdir import write_run_files
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.checkpoint import Checkpoints
from electra_jax.training.program import Program, make_program, with_params
from electra_jax.training.step import TrainState

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
VARIANTS = {  # of what one file or directory can hold
    "shared embeddings": {},
    "own embeddings": {"generator.sharing": "none"},
    "one tower": {"generator.sharing": "all", "generator.width": 1.0},
    "full-size generator": {"generator.width": 1.0},
    "bert": {"objective": "mlm", "generator.width": 1.0},
}


def recipe(**changes) -> ConfigDict:
    config = get_config()
    config.model.update(
        hidden_size=64, num_layers=2, embedding_size=16, max_positions=24, dropout=0.0
    )
    config.model.update(attention_dropout=0.0, num_heads=1)
    config.generator.width = 0.5
    config.data.sequence_length = 16
    config.update_from_flattened_dict(changes)
    return config


def vocabulary(vocab: list[str] = VOCAB, **settings) -> WordPiece:
    settings = {"lower_case": True, "strip_accents": True, "max_word_chars": 200} | settings
    return WordPiece(vocab, **settings)


def random_params(config: ConfigDict, vocab: list[str] = VOCAB) -> tuple[Objective, Params]:
    """Numbers of no pattern in every place, biases too."""
    objective, rng = make_objective(config, vocabulary(vocab)), np.random.default_rng(0)
    make = lambda x: rng.normal(size=x.shape).astype(np.float32)  # noqa: E731
    return objective, jax.tree.map(make, objective.structure())


def save_run(directory: Path, config: ConfigDict, params: Params) -> str:
    state = TrainState(np.int32(3), params, {"mu": jax.tree.map(np.zeros_like, params)})
    with Checkpoints(directory / "checkpoints", "hash", keep=1) as checkpoints:
        checkpoints.save(3, jax.tree.map(jax.numpy.asarray, state), {}, {})
    write_run_files(config, directory, vocabulary(), {})
    return str(directory)


def save_huggingface(
    directory: Path, params: Params, part: str, tokenizer: WordPiece | None = None
) -> str:
    network = network_of(params, part.replace("encoder", "discriminator"))
    if part == "encoder":
        del network["head"]
    config = huggingface.to_config(tiny.encoder_of(network), part, 0)
    layout = HuggingFaceLayout(NAMING, part)
    write(directory, layout, network, config, tokenizer or vocabulary(), "float32", "")
    return str(directory)


def save_both(directory: Path, params: Params) -> str:
    directory.mkdir(exist_ok=True)
    parts = [part for part in ("discriminator", "generator") if part in params]
    return ",".join(save_huggingface(directory / part, params, part) for part in parts)


def save_original(directory: Path, params: Params, **more: np.ndarray) -> str:
    tensors = bundles.original_names(params)
    moments = {
        f"{name}/adam_{moment}": np.zeros_like(tensor)
        for name, tensor in tensors.items()
        for moment in "mv"
    }
    tensors |= moments | {"global_step": np.int64(4_000_000), "temperature": np.float32(1)} | more
    directory.mkdir(exist_ok=True)
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCAB))
    bundles.write_bundle(directory / "model.ckpt-7", {k: np.asarray(x) for k, x in tensors.items()})
    return str(directory)


def load(config: ConfigDict, location: str, vocab: list[str] = VOCAB, **changes):
    config = config.copy_and_resolve_references()
    config.init_from = location
    config.update_from_flattened_dict(changes)
    log: list[str] = []
    tokenizer = vocabulary(vocab)
    loaded = load_networks(
        make_objective(config, tokenizer),
        tokenizer,
        log.append,
        init_from=location,
        init_missing=config.init_missing,
        init_resize=config.init_resize,
        seed=config.seed,
    )
    return loaded, log


def assert_loaded(found: dict[str, np.ndarray], expected: Params) -> None:
    expected = tiny.flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, strict=True, err_msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_and_the_original_and_hugging_face_give_the_parameters_back(variant, tmp_path):
    config = recipe(**VARIANTS[variant] | {"init_missing": "error"})
    _, params = random_params(config)
    for location in (
        save_run(tmp_path / "run", config, params),
        save_original(tmp_path / "original", params),
        save_both(tmp_path / "huggingface", params),
    ):
        loaded, log = load(config, location)
        assert_loaded(loaded, params)
        assert "initialized: nothing" in log


@pytest.mark.parametrize("name", ["model.ckpt-7", "model.ckpt-7.index"])
def test_a_checkpoint_can_be_named_by_its_files(name, tmp_path):
    _, params = random_params(recipe())
    location = save_original(tmp_path / "original", params)
    assert_loaded(load(recipe(), f"{location}/{name}")[0], params)


def test_every_tensor_of_the_original_is_in_the_table(tmp_path):
    _, params = random_params(recipe())
    log = load(recipe(), save_original(tmp_path / "original", params))[1]
    lines = {line.strip() for line in log}
    for line in (
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
    ):
        assert line in lines
    assert len(lines) == 3 * (5 + 2 * 18 + 4 + 5) + 2 + 2  # kinds of weights, moments, two, title


def test_every_tensor_of_hugging_face_is_in_the_table(tmp_path):
    _, params = random_params(recipe())
    pretrained = load_encoder(save_huggingface(tmp_path / "a", params, "generator"))
    sources = [line.split(" -> ")[0] for line in pretrained.table]
    names = {
        name.replace("layer.1", "layer.*").replace("layer.0", "layer.*")
        for name in load_file(tmp_path / "a" / "model.safetensors")
    }
    assert sorted(sources) == sorted(names)
    lines = [line for line in pretrained.table if "not used" in line]
    assert len(lines) == 6  # dense, norm, bias, and the word table once more
    assert "generator_lm_head.weight -> not used: the word table once more" in lines
    assert "generator_lm_head.bias -> not used: a head that is not needed here" in lines


@pytest.mark.parametrize("save", [save_both, save_original])
def test_an_encoder_for_fine_tuning(save, tmp_path):
    _, params = random_params(recipe())
    location = save(tmp_path / "source", params).split(",")[0]
    pretrained = load_encoder(location)
    expected = {"embeddings": params["embeddings"], "encoder": params["discriminator"]["encoder"]}
    assert_loaded(tiny.flat(pretrained.params), expected)
    assert pretrained.tokenizer.hash == vocabulary().hash
    sizes = pretrained.encoder_config
    assert (sizes.hidden_size, sizes.num_layers, sizes.num_heads) == (64, 2, 1)
    assert (sizes.embedding_size, sizes.intermediate_size, sizes.max_positions) == (16, 256, 24)


def test_the_encoder_of_a_run_is_the_discriminators_or_the_only_one(tmp_path):
    config = recipe(**VARIANTS["bert"], **{"model.dropout": 0.25})
    _, params = random_params(config)
    pretrained = load_encoder(save_run(tmp_path / "bert", config, params))
    expected = {"embeddings": params["embeddings"], "encoder": params["generator"]["encoder"]}
    assert_loaded(tiny.flat(pretrained.params), expected)
    assert pretrained.encoder_config.dropout == 0.25


def as_bert(directory: Path, prefix: str = "bert.") -> None:
    """Renames an ELECTRA file whose embedding is as wide as its layers to BERT's names."""
    tensors = load_file(directory / "model.safetensors")
    names = {
        "generator_predictions.": "cls.predictions.transform.",
        "generator_lm_head.bias": "cls.predictions.bias",
        "generator_lm_head.weight": "cls.predictions.decoder.weight",
        "electra.": prefix,
    }
    for ours, theirs in names.items():
        tensors = {name.replace(ours, theirs): x for name, x in tensors.items()}
    tensors[f"{prefix}pooler.dense.weight"] = np.zeros((64, 64), np.float32)
    tensors["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    tensors[f"{prefix}embeddings.position_ids"] = np.arange(24)[None]
    save_file(tensors, directory / "model.safetensors")
    change_json(directory / "config.json", model_type="bert", embedding_size=None)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_bert_with_its_head_continues_as_masked_language_model(prefix, tmp_path):
    config = recipe(**VARIANTS["bert"], **{"model.embedding_size": 64})
    _, params = random_params(config)
    location = save_huggingface(tmp_path / "bert", params, "generator")
    as_bert(tmp_path / "bert", prefix)
    loaded, log = load(config, location)
    assert_loaded(loaded, params)
    unused = {line.strip() for line in log if "not used" in line}
    assert unused == {
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
    assert_loaded(loaded, params)
    assert [line for line in log if "generator/encoder/layers/up/kernel" in line] == [log[-1]]
    assert log[-1].startswith("initialized: ")

    loaded, log = load(config, location, init_missing="copy")
    encoder = params["discriminator"]["encoder"]
    assert_loaded(loaded, params | {"generator": {"encoder": encoder}})
    assert "generator/head/dense/kernel" in log[-1]
    line = next(line for line in log if "layer.*.output.dense.bias" in line)
    assert "discriminator/encoder/layers/down/bias, generator/encoder/layers/down/bias" in line


def test_an_encoder_without_a_head_is_the_main_networks(tmp_path):
    config = recipe(**{"generator.width": 1.0})
    _, params = random_params(config)
    location = save_huggingface(tmp_path / "a", params, "encoder")
    with pytest.raises(UserError, match="holds encoder, but no discriminator and no generator"):
        load(config, location)
    loaded, _ = load(config, location, init_missing="initialize")
    encoder = params["discriminator"]["encoder"]
    assert_loaded(
        loaded, {"embeddings": params["embeddings"], "discriminator": {"encoder": encoder}}
    )
    loaded, _ = load(config, location, init_missing="copy")
    assert {name.split("/")[0] for name in loaded} == {"embeddings", "discriminator", "generator"}


def test_nothing_that_would_be_used_is_refused(tmp_path):
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
    with pytest.raises(UserError, match=r"embeddings/norm/bias is one for both .*sharing = 'none'"):
        load(recipe(), f"{first},{second}")
    with pytest.raises(UserError, match="both hold a network of the kind 'generator'"):
        load(recipe(), f"{second},{second}")


def test_a_configuration_of_another_size_is_refused_by_its_fields(tmp_path):
    _, params = random_params(recipe())
    location = save_both(tmp_path / "a", params)
    with pytest.raises(
        UserError, match=r"generator .*hidden_size is 32 there and 64 here"
    ) as error:
        load(recipe(**{"generator.width": 1.0}), location)
    assert "config.generator.width" in str(error.value)
    with pytest.raises(
        UserError, match=r"num_heads is 1 there and 2 here \(config.model.num_heads"
    ):
        load(recipe(**{"model.num_heads": 2}), location)
    with pytest.raises(UserError, match=r"max_positions is 24 there and 32 here"):
        load(recipe(**{"model.max_positions": 32}), location)


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
    expected = tiny.flat(params)
    del expected["embeddings/position"]
    assert_loaded(loaded, expected)


def test_rows_of_another_vocabulary_are_matched_by_token_on_request(tmp_path):
    _, params = random_params(recipe())
    location = save_both(tmp_path / "a", params)
    vocab = ["new", *VOCAB[:5], "##x", *reversed(VOCAB[10:])]
    with pytest.raises(UserError, match=r"vocabulary of .* is not that of config.data.*resize"):
        load(recipe(), location, vocab)
    config = recipe(**{"model.max_positions": 40})
    loaded, log = load(config, location, vocab, init_resize="positions,vocabulary")
    fresh = tiny.flat(on_devices(make_objective(config, vocabulary(vocab))).init().params)
    theirs = tiny.flat(params)
    for name in ("embeddings/word", "generator/head/bias"):
        for i, token in enumerate(vocab):
            row = theirs[name][VOCAB.index(token)] if token in VOCAB else fresh[name][i]
            np.testing.assert_array_equal(loaded[name][i], row)
    np.testing.assert_array_equal(
        loaded["embeddings/position"][24:], fresh["embeddings/position"][24:]
    )
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
    with pytest.raises(UserError, match=r"lower_case is False in .*config.data.lower_case is True"):
        load(recipe(), location, init_missing="initialize")


def test_a_vocabulary_one_row_short_is_refused(tmp_path):
    _, params = random_params(recipe())
    location = save_both(tmp_path / "a", params).split(",")[0]
    (Path(location) / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCAB[:-1]))
    message = "the vocabulary has 30 tokens, but the word table of the discriminator has 31 rows"
    for attempt in (
        lambda: load_encoder(location),
        lambda: load(recipe(), location, VOCAB, init_missing="initialize"),
    ):
        with pytest.raises(UserError, match=message):
            attempt()


def test_fine_tuning_needs_a_vocabulary(tmp_path):
    _, params = random_params(recipe())
    location = save_huggingface(tmp_path / "a", params, "discriminator")
    for path in (tmp_path / "a").glob("*"):
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    with pytest.raises(UserError, match="there is no vocabulary beside the weights"):
        load_encoder(location)


def drop(name: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        del tensors[name]
        save_file(tensors, directory / "model.safetensors")

    return apply


def rename(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = "electra.encoder.layer.1.output.dense.bias"
    tensors[name.replace("bias", "offset")] = tensors.pop(name)
    save_file(tensors, directory / "model.safetensors")


def cut_off(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def numbers(dtype: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        name = "electra.embeddings.LayerNorm.weight"
        tensors[name] = tensors[name].astype(dtype)
        save_file(tensors, directory / "model.safetensors")

    return apply


def not_finite(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["electra.embeddings_project.bias"][7] = np.nan
    save_file(tensors, directory / "model.safetensors")


def config_json(**changes) -> Callable[[Path], None]:
    return lambda directory: change_json(directory / "config.json", **changes)


def shards(**weight_map) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        shutil.copy(directory / "model.safetensors", directory.parent / "part.safetensors")
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        index = {"weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


DAMAGE = {
    "a renamed tensor": (
        rename,
        "layer.1.output.dense.bias is missing; .*layer.1.output.dense.offset is not known",
    ),
    "a missing tensor": (
        drop("electra.embeddings_project.bias"),
        "electra.embeddings_project.bias is missing",
    ),
    "integers": (numbers("int32"), "LayerNorm.weight holds int32; allowed: float32"),
    "not a number": (not_finite, "embeddings_project.bias holds numbers that are not finite"),
    "more than float32": (numbers("float64"), "LayerNorm.weight holds float64; allowed: float32"),
    "a file that is cut off": (cut_off, "model.safetensors: not readable as safetensors"),
    "an empty file": (empty, "model.safetensors: not readable as safetensors"),
    "a pickle": (pickle, "pytorch_model.bin: weights are read from safetensors"),
    "fewer layers": (config_json(num_hidden_layers=1), "is 1, but the weights have 2 layers"),
    "a billion layers": (config_json(num_hidden_layers=10**9), "but the weights have 2 layers"),
    "another width": (
        config_json(intermediate_size=32),
        r"layer.0.intermediate.dense.weight is \(256, 64\), the model's is \(32, 64\)",
    ),
    "two billion tokens": (
        config_json(vocab_size=2**31 - 1),
        r"word_embeddings.weight is \(31, 16\), the model's is \(2147483647, 16\)",
    ),
    "heads": (config_json(num_attention_heads=5), "allowed: heads that divide the hidden size"),
    "another activation": (config_json(hidden_act="gelu_new"), "hidden_act is 'gelu_new'; allowed"),
    "another epsilon": (config_json(layer_norm_eps=1e-5), "layer_norm_eps is 1e-05; allowed"),
    "another model": (config_json(model_type="roberta"), "model_type is 'roberta'; allowed"),
    "a size that is text": (
        config_json(hidden_size="64"),
        "hidden_size is '64'; allowed: a number",
    ),
    "a rate of 7": (config_json(hidden_dropout_prob=7), "hidden_dropout_prob is 7; allowed"),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), "config.json: not JSON"),
    "a list": (lambda path: (path / "config.json").write_text("[]"), "config.json: .* list"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json: cannot be read"),
    "a shard elsewhere": (
        shards(x="../part.safetensors"),
        "there is no file '../part.safetensors'",
    ),
    "a shard that is not there": (shards(x="x.safetensors"), "there is no file 'x.safetensors'"),
    "no shards": (shards(), "names no files"),
    "nothing": (lambda path: shutil.rmtree(path), "there are no weights; allowed: a run directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_refused_by_name(damage, tmp_path):
    _, params = random_params(recipe())
    location = save_huggingface(tmp_path / "a", params, "discriminator")
    harm, message = DAMAGE[damage]
    harm(tmp_path / "a")
    with pytest.raises(UserError, match=message) as error:
        load_encoder(location)
    assert location in str(error.value)


def test_files_in_parts_are_put_together(tmp_path):
    _, params = random_params(recipe())
    location = save_huggingface(tmp_path / "a", params, "discriminator")
    expected = load_encoder(location).params
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    shards(x="part.safetensors", y="rest.safetensors")(tmp_path / "a")
    rest = {"electra.embeddings_project.bias": tensors.pop("electra.embeddings_project.bias")}
    save_file(tensors, tmp_path / "a" / "part.safetensors")
    save_file(rest, tmp_path / "a" / "rest.safetensors")
    assert_loaded(tiny.flat(load_encoder(location).params), expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"generator_ltr/encoder/x": np.float32(0)}, "not known: generator_ltr/encoder/x"),
        ({"electra/encoder/layer_9/output/dense/bias": np.zeros(64, np.float32)}, "layer.9.output"),
        ({"electra/embeddings/word_embeddings": np.zeros(9, np.float32)}, "no table or kernel for"),
        (
            {"generator_predictions/dense/kernel": np.zeros((16, 32), np.float32)},
            r"generator_predictions.dense.weight is \(32, 16\), the model's is \(16, 32\)",
        ),
    ],
)
def test_an_original_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    _, params = random_params(recipe())
    with pytest.raises(UserError, match=message):
        load(recipe(), save_original(tmp_path / "a", params, **change))


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
    found, expected = tiny.flat(started.params), tiny.flat(params)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    batch = program.place(tiny.packed(4, 16, len(VOCAB)))
    losses = program.eval_step(started.params, batch)
    expected = program.eval_step(with_params(program.init(), expected).params, batch)
    assert losses["mlm_loss"][1] > 0
    for name in ("mlm_loss", "rtd_loss"):
        np.testing.assert_array_equal(losses[name], expected[name])


@pytest.mark.parametrize("kind", ["replace_mlm", "all_tokens_mlm"])
def test_networks_that_predict_words_are_encoders_to_others(kind, tmp_path):
    """What stands on the discriminator of these objectives is no part that there is elsewhere."""
    config = recipe(objective=kind)
    _, params = random_params(config)
    found = load_encoder(save_run(tmp_path / "run", config, params))
    expected = tiny.flat(params["discriminator"]["encoder"])
    for name, value in tiny.flat(found.params["encoder"]).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert any(line.startswith("discriminator/head/") for line in found.table)
