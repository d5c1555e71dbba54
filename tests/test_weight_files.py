"""Files with weights: damaged, made up, in parts, or without what they need."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import weights
from safetensors.numpy import load_file, save_file
from weights import (
    assert_equal,
    change_json,
    main_network,
    random_params,
    recipe,
    save_huggingface,
    save_original,
)

from electra_jax.errors import UserError
from electra_jax.interop.pretrained import load_encoder


def changed(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return apply


def retyped(dtype: str) -> Callable[[Path], None]:
    name = "electra.embeddings.LayerNorm.weight"
    return changed(lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))


def cut(size: int) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return apply


def config_json(**changes) -> Callable[[Path], None]:
    return lambda directory: change_json(directory / "config.json", **changes)


def shards(**weight_map) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        shutil.copy(directory / "model.safetensors", directory.parent / "part.safetensors")
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        index = {"weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


BIAS, DOWN = "electra.embeddings_project.bias", "electra.encoder.layer.1.output.dense."
DAMAGE = {
    "a renamed tensor": (
        changed(lambda tensors: tensors.update({f"{DOWN}offset": tensors.pop(f"{DOWN}bias")})),
        "layer.1.output.dense.bias is missing; .*layer.1.output.dense.offset is not known",
    ),
    "a missing tensor": (changed(lambda tensors: tensors.pop(BIAS)), f"{BIAS} is missing"),
    "integers": (retyped("int32"), "LayerNorm.weight holds int32; allowed: float32"),
    "more than float32": (retyped("float64"), "LayerNorm.weight holds float64; allowed: float32"),
    "not a number": (
        changed(lambda tensors: tensors[BIAS].fill(np.nan)),
        f"{BIAS} holds numbers that are not finite",
    ),
    "a file that is cut off": (cut(-10), "model.safetensors: not readable as safetensors"),
    "an empty file": (cut(0), "model.safetensors: not readable as safetensors"),
    "a pickle": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        "pytorch_model.bin: weights are read from safetensors",
    ),
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
    "heads": (config_json(num_attention_heads=5), "_heads is 5; allowed: what divides .* 64"),
    "another activation": (config_json(hidden_act="gelu_new"), "hidden_act is 'gelu_new'; allowed"),
    "another epsilon": (config_json(layer_norm_eps=1e-5), "layer_norm_eps is 1e-05; allowed"),
    "another model": (config_json(model_type="roberta"), "model_type is 'roberta'; allowed"),
    "a size that is text": (config_json(hidden_size="64"), "hidden_size is '64'; allowed: a num"),
    "a rate of 7": (config_json(hidden_dropout_prob=7), "hidden_dropout_prob is 7; allowed"),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), "config.json: not JSON"),
    "a list": (lambda path: (path / "config.json").write_text("[]"), "config.json: .* list"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json: cannot be read"),
    "a shard elsewhere": (shards(x="../part.safetensors"), "no file '../part.safetensors'"),
    "a shard that is not there": (shards(x="x.safetensors"), "there is no file 'x.safetensors'"),
    "no shards": (shards(), "names no files"),
    "no vocabulary": (
        lambda path: [file.unlink() for file in (*path.glob("tok*"), *path.glob("voc*"))],
        "there is no vocabulary beside the weights",
    ),
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
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    shards(x="part.safetensors", y="rest.safetensors")(tmp_path / "a")
    save_file({BIAS: tensors.pop(BIAS)}, tmp_path / "a" / "rest.safetensors")
    save_file(tensors, tmp_path / "a" / "part.safetensors")
    assert_equal(tiny.flat(load_encoder(location).params), main_network(params))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"generator_ltr/encoder/x": np.float32(0)}, "not known: generator_ltr/encoder/x"),
        ({"electra/encoder/layer_9/output/dense/bias": np.zeros(64, np.float32)}, "layer.9.output"),
        ({"electra/embeddings/word_embeddings": np.zeros(9, np.float32)}, "no table or kernel for"),
        (
            {"electra/embeddings_project/kernel": np.zeros((64, 16), np.float32)},
            r"embeddings_project.weight is \(16, 64\), the model's is \(64, 16\)",
        ),
        (
            {"electra/encoder/layer_0/intermediate/dense/kernel": np.zeros((129, 256))},
            "width is 129",
        ),
    ],
)
def test_an_original_that_does_not_fit_is_refused_by_name(change, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", weights.TENSORFLOW)
    _, params = random_params(recipe())
    with pytest.raises(UserError, match=message):
        load_encoder(save_original(tmp_path / "a", params, **change))


def test_the_package_that_reads_the_original_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    _, params = random_params(recipe())
    location = save_original(tmp_path / "a", params)
    with pytest.raises(UserError, match=r"a/model.ckpt-7.index .* pip install tensorflow"):
        load_encoder(location)
