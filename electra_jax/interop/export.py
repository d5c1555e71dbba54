"""A directory that Hugging Face's libraries read: weights, configuration, tokenizer, model card."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import read_json
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.source import WEIGHTS
from electra_jax.interop.tokenizer_files import write_tokenizer
from electra_jax.modeling.params import Params
from electra_jax.monitoring.writer import read_whole_rows

DTYPES = ("float32", "bfloat16", "float16")


# For each part, the class that loads it, and what the model card says of it.
USES = {
    "encoder": (
        "AutoModel",
        "An ELECTRA encoder: hidden states for every token, to be fine-tuned.",
    ),
    "discriminator": (
        "AutoModelForPreTraining",
        "An ELECTRA discriminator: a positive logit says that a token was replaced. It is the part "
        "to fine-tune. It does not fill masks; the generator does.",
    ),
    "generator": (
        "AutoModelForMaskedLM",
        "An ELECTRA generator, a masked language model: it fills masks. To fine-tune, use the "
        "discriminator where there is one.",
    ),
    "classifier": (
        "AutoModelForSequenceClassification",
        "An ELECTRA encoder fine-tuned to classify or rate texts.",
    ),
    "qa": (
        "AutoModelForQuestionAnswering",
        "An ELECTRA encoder fine-tuned to find answers in a text.",
    ),
    "tagger": (
        "AutoModelForTokenClassification",
        "An ELECTRA encoder fine-tuned to label words.",
    ),
}


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
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (unfinished / "config.json").write_text(text, encoding="utf-8")
        # The library that writes weights lets nobody else read them.
        (unfinished / WEIGHTS).chmod((unfinished / "config.json").stat().st_mode)
        write_tokenizer(tokenizer, unfinished, config["max_position_embeddings"])
        (unfinished / "README.md").write_text(readme, encoding="utf-8")
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
    if layout.part == "encoder":  # saved by itself, it has no prefix
        tensors = {name.removeprefix(layout.naming.prefix): x for name, x in tensors.items()}
    converted = {}
    for name, tensor in tensors.items():
        with np.errstate(over="ignore"):
            converted[name] = np.ascontiguousarray(tensor.astype(jnp.dtype(dtype)))
        if not np.isfinite(converted[name]).all():
            raise UserError(f"{name} holds numbers that are not finite in {dtype}")
    return converted


def card(
    workdir: Path, run: Mapping[str, Any], layout: HuggingFaceLayout, step: int, dtype: str
) -> str:
    """The model card: what it is, how it is used, and where it comes from.

    Args:
      run: its configuration.
    """
    auto_class, about = USES[layout.part]
    architecture = layout.naming.parts[layout.part].architecture
    facts_path = workdir / "facts.json"
    facts = read_json(facts_path) if facts_path.is_file() else {}
    as_json = lambda x: json.dumps(x, indent=1, ensure_ascii=False)  # noqa: E731
    evaluated = [
        row
        for row in read_whole_rows(workdir)[0]
        if row["step"] <= step and any(name.startswith("eval/") for name in row)
    ]
    metrics = "The run measured nothing on held-out data up to this step."
    if evaluated:
        last = evaluated[-1]
        rows = [f"| {name} | {value:.4f} |" for name, value in last.items() if name != "step"]
        head = [f"On held-out data, at step {last['step']:,}:", "", "| metric | value |"]
        metrics = "\n".join([*head, "| --- | --- |", *rows])
    unit = run.get("data", {}).get("value_range") if layout.part == "classifier" else None
    scaled = f" It gives a number: 0 stands for {unit[0]}, 1 for {unit[1]}." if unit else ""
    return f"""---
library_name: transformers
tags:
- electra
---

# {architecture}

{about}{scaled}

    from transformers import {auto_class}, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
    model = {auto_class}.from_pretrained("DIRECTORY")

## Provenance

Trained with electra_jax; exported from step {step:,} as {dtype}.

{metrics}

What the run counted:

```json
{as_json(facts)}
```

Its configuration:

```json
{as_json(run)}
```
"""
