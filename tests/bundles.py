"""Checkpoints as TensorFlow 1 writes them, without it; and the original's names for our weights."""

import itertools
import struct
from pathlib import Path

import jax
import numpy as np
from tensorboardX.crc32c import crc32c

from electra_jax.interop.tensor_bundle import DTYPES, FOOTER_BYTES, MAGIC
from electra_jax.modeling.params import Params

NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
ENTRIES_PER_BLOCK = 50


def write_bundle(prefix: Path, tensors: dict[str, np.ndarray]) -> None:
    """`NAME.index` and `NAME.data-00000-of-00001`, the index in several blocks."""
    data, entries = b"", {b"": field(1, 1) + field(3, field(1, 1))}
    for name in sorted(tensors):
        entries[name.encode()] = entry(tensors[name], len(data))
        data += tensors[name].tobytes()
    Path(f"{prefix}.data-00000-of-00001").write_bytes(data)
    Path(f"{prefix}.index").write_bytes(table(entries))


def entry(tensor: np.ndarray, offset: int) -> bytes:
    shape = b"".join(field(2, field(1, size)) for size in tensor.shape)
    places = field(4, offset) + field(5, tensor.nbytes)
    checksum = varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(tensor.tobytes())))
    return field(1, NUMBERS[tensor.dtype]) + field(2, shape) + places + checksum


def table(entries: dict[bytes, bytes]) -> bytes:
    out, index = b"", {}
    pairs = sorted(entries.items())
    for start in range(0, len(pairs), ENTRIES_PER_BLOCK):
        batch = pairs[start : start + ENTRIES_PER_BLOCK]
        place = len(out)
        out += block(dict(batch))
        index[batch[-1][0]] = varint(place) + varint(len(out) - place - 5)
    meta, place = len(out), len(out) + len(block({}))
    out += block({}) + block(index)
    handles = varint(meta) + varint(place - meta - 5) + varint(place) + varint(len(out) - place - 5)
    return out + handles.ljust(FOOTER_BYTES - 8, b"\0") + struct.pack("<Q", MAGIC)


def block(entries: dict[bytes, bytes]) -> bytes:
    out, before = b"", b""
    for key, value in entries.items():
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(key, before, strict=False))
        shared = len([*same])
        out += varint(shared) + varint(len(key) - shared) + varint(len(value))
        out += key[shared:] + value
        before = key
    out += struct.pack("<II", 0, 1) + b"\0"
    return out + struct.pack("<I", masked(crc32c(out)))


def masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def original_names(params: Params) -> dict[str, np.ndarray]:
    """Our parameters of a pre-training run as the original's variables (spec 1.8)."""
    generator, discriminator = params["generator"], params.get("discriminator")
    named = embeddings("electra", params["embeddings"])
    if discriminator:
        named |= encoder("electra", discriminator["encoder"])
        named |= linear("discriminator_predictions/dense", discriminator["head"]["dense"])
        named |= linear("discriminator_predictions/dense_1", discriminator["head"]["output"])
    if "embeddings" in generator:
        named |= embeddings("generator", generator["embeddings"])
    if "encoder" in generator:
        named |= encoder("generator" if discriminator else "electra", generator["encoder"])
    named |= linear("generator_predictions/dense", generator["head"]["dense"])
    named |= norm("generator_predictions/LayerNorm", generator["head"]["norm"])
    named["generator_predictions/output_bias"] = generator["head"]["bias"]
    return {name: np.ascontiguousarray(x) for name, x in named.items()}


def embeddings(scope: str, tree: Params) -> dict[str, np.ndarray]:
    named = norm(f"{scope}/embeddings/LayerNorm", tree["norm"])
    for name in ("word", "position", "token_type"):
        named[f"{scope}/embeddings/{name}_embeddings"] = tree[name]
    return named


def encoder(scope: str, tree: Params) -> dict[str, np.ndarray]:
    named = (
        linear(f"{scope}/embeddings_project", tree["projection"]) if "projection" in tree else {}
    )
    layers = tree["layers"]
    for i in range(len(layers["up"]["bias"])):
        place, layer = f"{scope}/encoder/layer_{i}", jax.tree.map(lambda x, i=i: x[i], layers)
        width = len(layer["attention"]["out"]["bias"])
        for part, name in enumerate(("query", "key", "value")):
            qkv = jax.tree.map(lambda x, part=part: x[..., part, :, :], layer["attention"]["qkv"])
            named[f"{place}/attention/self/{name}/kernel"] = qkv["kernel"].reshape(width, width)
            named[f"{place}/attention/self/{name}/bias"] = qkv["bias"].reshape(width)
        out = layer["attention"]["out"]
        out = {"kernel": out["kernel"].reshape(width, width), "bias": out["bias"]}
        named |= linear(f"{place}/attention/output/dense", out)
        named |= norm(f"{place}/attention/output/LayerNorm", layer["attention_norm"])
        named |= linear(f"{place}/intermediate/dense", layer["up"])
        named |= linear(f"{place}/output/dense", layer["down"])
        named |= norm(f"{place}/output/LayerNorm", layer["output_norm"])
    return named


def linear(name: str, tree: Params) -> dict[str, np.ndarray]:
    return {f"{name}/kernel": tree["kernel"], f"{name}/bias": tree["bias"]}


def norm(name: str, tree: Params) -> dict[str, np.ndarray]:
    return {f"{name}/gamma": tree["scale"], f"{name}/beta": tree["bias"]}
