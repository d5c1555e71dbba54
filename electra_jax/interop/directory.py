"""A directory that Hugging Face's libraries read: weights, configuration, tokenizer, model card."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from safetensors.numpy import save_file

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import read_json, write_json, write_text
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.source import WEIGHTS
from electra_jax.interop.tokenizer_files import write_tokenizer
from electra_jax.modeling.params import Params
from electra_jax.monitoring.writer import read_whole_rows

DTYPES = ("float32", "bfloat16", "float16")


def write(
    out: Path,
    layout: HuggingFaceLayout,
    params: Params,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    dtype: str,
    readme: str,
) -> None:
    """Write all files beside `out`, then give the directory its name.

    Args:
      config: the content of `config.json`.
      dtype: of the weights, one of `DTYPES`.
    """
    unfinished = out.absolute().with_name(f"{out.absolute().name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        tensors = file_tensors(params, layout, dtype)
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        write_json(unfinished / "config.json", config)
        # The library that writes weights lets nobody else read them.
        (unfinished / WEIGHTS).chmod((unfinished / "config.json").stat().st_mode)
        write_tokenizer(tokenizer, unfinished, config["max_position_embeddings"])
        write_text(unfinished / "README.md", readme)
        unfinished.replace(out)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def file_tensors(
    params: Params, layout: HuggingFaceLayout, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The tensors of a file, as Hugging Face's class would save them.

    Raises:
      UserError: names a tensor with a number that `dtype` does not have.
    """
    tensors = layout.tensors(params)
    tensors |= {name: tensors[other] for name, other in layout.tied.items()}
    prefix = layout.naming.prefix if layout.part == "encoder" else ""  # which is saved without it
    converted = {}
    for name, tensor in tensors.items():
        with np.errstate(over="ignore"):
            tensor = np.ascontiguousarray(tensor.astype(jnp.dtype(dtype)))
        if not np.isfinite(tensor).all():
            raise UserError(f"{name} holds numbers that are not finite in {dtype}")
        converted[name.removeprefix(prefix)] = tensor
    return converted


def card(
    workdir: Path, run: Mapping[str, Any], layout: HuggingFaceLayout, step: int, dtype: str
) -> str:
    """The model card, in Markdown: what it is, how it is used, and where it comes from.

    Args:
      run: its configuration.
    """
    facts = workdir / "facts.json"
    evaluated = [
        row
        for row in read_whole_rows(workdir)[0]
        if row["step"] <= step and any(name.startswith("eval/") for name in row)
    ]
    environment = Environment(  # noqa: S701 - Markdown; what a run says is in fenced JSON
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda name: " ".join(name.replace("|", "\\|").split())
    environment.filters["json"] = lambda x: json.dumps(x, indent=1, ensure_ascii=False)
    return environment.get_template("card.md.jinja").render(
        part=layout.naming.parts[layout.part],
        scale=run.get("data", {}).get("value_range") if layout.part == "classifier" else None,
        step=step,
        dtype=dtype,
        measured=evaluated[-1] if evaluated else None,
        facts=read_json(facts) if facts.is_file() else {},
        config=run,
    )
