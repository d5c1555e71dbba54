"""A part of a run as a directory that Hugging Face's libraries read."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from electra_jax.data import tokenizers
from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.errors import UserError
from electra_jax.files import read_json
from electra_jax.interop import huggingface
from electra_jax.interop.huggingface import PARTS
from electra_jax.interop.source import WEIGHTS, config_of, parts_of, rates_of
from electra_jax.interop.tokenizer_files import write_tokenizer
from electra_jax.modeling.params import Params
from electra_jax.monitoring.writer import read_whole_rows
from electra_jax.run.workdir import chosen_step, config_file
from electra_jax.training.checkpoint import restore_params

DTYPES = ("float32", "bfloat16", "float16")


# Kinds of fine-tuned heads, the part that they are, and what Hugging Face calls the problem.
KINDS = {
    "classification": ("classifier", "single_label_classification"),
    "multilabel": ("classifier", "multi_label_classification"),
    "regression": ("classifier", "regression"),
    "tagging": ("tagger", None),
    "qa": ("qa", None),
}


FINE_TUNED = {part for part, _ in KINDS.values()}


def export(
    workdir: Path,
    out: Path,
    part: str | None = None,
    step: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write `part` of the run in `workdir` to the new directory `out`.

    Args:
      part: a key of `PARTS`; None for the discriminator, or for the only part there is.
      step: of the checkpoint; None for the newest, or the one that a fine-tuned run predicts with.
      dtype: of the weights that are written.

    Raises:
      UserError: the run has no such part, or its head no counterpart; or `out` is not empty.
        Nothing has been written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out is {out}, which exists; allowed: a new or empty directory")
    run = read_json(config_file(workdir))
    step = chosen_step(workdir) if step is None else step
    step, params = restore_params(workdir / "checkpoints", step)
    tokenizer = tokenizers.load(workdir / "tokenizer")
    part, tower, problem = chosen(workdir, run, params, part)
    config = config_of(tower, rates_of(run))
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"{workdir}: the tokenizer has {tokenizer.vocab_size:,} tokens, but the word table has "
            f"{config.vocab_size:,} rows"
        )
    content = huggingface.to_config(config, part, tokenizer.pad_id) | {"dtype": dtype}
    if part in FINE_TUNED:
        content |= label_fields(workdir, run, tower, problem)
    write(out, part, tower, content, tokenizer, dtype, card(workdir, run, part, step, dtype))


def chosen(
    workdir: Path, run: Mapping[str, Any], params: Params, part: str | None
) -> tuple[str, Params, str | None]:
    """The part to export, its parameters, and what Hugging Face calls the problem it solves."""
    towers = parts_of(params)
    if "encoder" not in params:
        allowed = (*towers, "encoder")
        part = part or allowed[0]
        if part == "encoder":
            tower = next(iter(towers.values()))
            towers["encoder"] = {name: tower[name] for name in ("embeddings", "encoder")}
        problem = None
    else:
        own, problem = KINDS[head_kind(workdir, run)]
        allowed, part = (own, "encoder"), part or own
        if part == own:
            check_head(params["head"], part)
            towers[part] = params
    if part not in allowed:
        raise UserError(f"--part is {part!r}, but {workdir} holds {' and '.join(allowed)}")
    return part, towers[part], problem


def head_kind(workdir: Path, run: Mapping[str, Any]) -> str:
    """What the fine-tuned head of a run is for: a key of `KINDS`."""
    data = run.get("data", {})
    kinds = {
        "glue": "classification" if data.get("labels") else "regression",
        "table": data.get("target"),
        "squad": "qa",
        "tagging": "tagging",
    }
    kind = kinds.get(data.get("kind"))
    if kind not in KINDS:
        raise UserError(f"{workdir / 'config.json'}: data.kind is {data.get('kind')!r}, not known")
    return kind


def check_head(head: Params, part: str) -> None:
    """Raises UserError where Hugging Face's class for `part` has another head than ours."""
    expected = {name.removeprefix("head/") for name in PARTS[part].head}
    if {*head} != expected:
        raise UserError(
            f"the head has the layers {', '.join(head)}, but Hugging Face's "
            f"{PARTS[part].architecture} has {', '.join(sorted(expected))}, which computes "
            "something else; fine-tune with --config.head=huggingface to export it, or "
            "export --part=encoder"
        )


def label_fields(
    workdir: Path, run: Mapping[str, Any], tower: Params, problem: str | None
) -> dict[str, Any]:
    """What `config.json` says about the outputs of a fine-tuned head."""
    labels = run["data"].get("labels") or []
    fields = {"problem_type": problem} if problem else {}
    num_outputs = tower["head"]["output"]["bias"].size
    if not labels:
        return fields | {"num_labels": num_outputs}
    if len(labels) != num_outputs:
        raise UserError(
            f"{workdir / 'config.json'}: data.labels has {len(labels)} names, but the head has "
            f"{num_outputs} outputs"
        )
    return fields | {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def write(
    out: Path,
    part: str,
    params: Params,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    dtype: str,
    readme: str,
) -> None:
    """Write all files beside `out`, then give the directory its name."""
    unfinished = out.absolute().with_name(f"{out.absolute().name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        tensors = file_tensors(params, part, dtype)
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


def file_tensors(params: Params, part: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The tensors of a file, as Hugging Face's class would save them.

    Raises:
      UserError: names a tensor with a number that `dtype` does not have.
    """
    tensors = huggingface.to_huggingface(params, part)
    if part == "generator":
        tensors[huggingface.TIED_OUTPUT] = tensors[huggingface.WORD_TABLE]
    if part == "encoder":  # saved by itself, it has no prefix
        tensors = {name.removeprefix("electra."): x for name, x in tensors.items()}
    converted = {}
    for name, tensor in tensors.items():
        with np.errstate(over="ignore"):
            converted[name] = np.ascontiguousarray(tensor.astype(jnp.dtype(dtype)))
        if not np.isfinite(converted[name]).all():
            raise UserError(f"{name} holds numbers that are not finite in {dtype}")
    return converted


USAGE = {
    "encoder": "AutoModel",
    "discriminator": "AutoModelForPreTraining",
    "generator": "AutoModelForMaskedLM",
    "classifier": "AutoModelForSequenceClassification",
    "qa": "AutoModelForQuestionAnswering",
    "tagger": "AutoModelForTokenClassification",
}


ABOUT = {
    "encoder": "An ELECTRA encoder: hidden states for every token, to be fine-tuned.",
    "discriminator": (
        "An ELECTRA discriminator: a positive logit says that a token was replaced. It is the part "
        "to fine-tune. It does not fill masks; the generator does."
    ),
    "generator": (
        "An ELECTRA generator, a masked language model: it fills masks. To fine-tune, use the "
        "discriminator where there is one."
    ),
    "classifier": "An ELECTRA encoder fine-tuned to classify or rate texts.",
    "qa": "An ELECTRA encoder fine-tuned to find answers in a text.",
    "tagger": "An ELECTRA encoder fine-tuned to label words.",
}


def card(workdir: Path, run: Mapping[str, Any], part: str, step: int, dtype: str) -> str:
    """The model card: what it is, how it is used, and where it comes from."""
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
    unit = run.get("data", {}).get("value_range") if part == "classifier" else None
    scaled = f" It gives a number: 0 stands for {unit[0]}, 1 for {unit[1]}." if unit else ""
    return f"""---
library_name: transformers
tags:
- electra
---

# {PARTS[part].architecture}

{ABOUT[part]}{scaled}

    from transformers import {USAGE[part]}, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
    model = {USAGE[part]}.from_pretrained("DIRECTORY")

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
