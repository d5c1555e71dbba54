"""A part of a run, exported for Hugging Face."""

from pathlib import Path
from typing import Any

from electra_jax.data import tokenizers
from electra_jax.errors import UserError, located
from electra_jax.files import read_json
from electra_jax.finetune.config import make_task
from electra_jax.finetune.heads.base import Head
from electra_jax.inference.configuration import load_config
from electra_jax.interop import huggingface
from electra_jax.interop.directory import card, write
from electra_jax.interop.layouts import HuggingFaceLayout
from electra_jax.interop.source import encoder_config, parts_of
from electra_jax.modeling.encoders import encoder_class
from electra_jax.modeling.params import Params
from electra_jax.run.workdir import chosen_step, config_file
from electra_jax.training.checkpoint import restore_params


def export(
    workdir: Path,
    out: Path,
    part: str | None = None,
    step: int | None = None,
    dtype: str = "float32",
) -> None:
    """Write `part` of the run in `workdir` to the new directory `out`.

    Args:
      part: a key of `Naming.parts`; None for the discriminator, or for the only part there is.
      step: of the checkpoint; None for the newest, or the one that a fine-tuned run predicts with.
      dtype: of the weights that are written.

    Raises:
      UserError: the run has no such part, or Hugging Face has nothing like it; or `out` is not
        empty. Nothing has been written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out is {out}, which exists; allowed: a new or empty directory")
    run = read_json(config_file(workdir))
    step = chosen_step(workdir) if step is None else step
    step, params = restore_params(workdir / "checkpoints", step)
    tokenizer = tokenizers.load(workdir / "tokenizer")
    head = make_task(load_config(workdir), lambda line: None).head if "encoder" in params else None
    with located(workdir):
        part, network = chosen(params, head, part)
    config = encoder_config(workdir / "config.json", params, part)
    with located(workdir):
        if not (naming := encoder_class(config).naming):
            raise UserError(f"Hugging Face has no encoder like {config.encoder!r}")
        layout = HuggingFaceLayout(naming, part)
        if tokenizer.vocab_size != config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the word table has "
                f"{config.vocab_size:,} rows"
            )
        content = huggingface.to_config(config, part, tokenizer.pad_id) | {"dtype": dtype}
        if head and part != "encoder":
            content |= head_fields(head, network["head"], layout)
    write(out, layout, network, content, tokenizer, dtype, card(workdir, run, layout, step, dtype))


def chosen(params: Params, head: Head | None, part: str | None) -> tuple[str, Params]:
    """The part to export, and its parameters.

    Args:
      head: of a fine-tuned run.
    """
    networks = parts_of(params)
    first = next(iter(networks.values()))
    if head and head.huggingface:
        networks = {head.huggingface.part: params}
    elif head and not part:
        raise UserError("Hugging Face has no such head; allowed: --part=encoder")
    networks["encoder"] = {name: first[name] for name in ("embeddings", "encoder")}
    part = part or next(iter(networks))
    if part not in networks:
        raise UserError(f"--part is {part!r}; allowed: {', '.join(networks)}")
    return part, networks[part]


def head_fields(head: Head, params: Params, layout: HuggingFaceLayout) -> dict[str, Any]:
    """What `config.json` says about a fine-tuned head with these parameters.

    Raises:
      UserError: Hugging Face's class has other layers, or the labels are not as many as outputs.
    """
    part = layout.naming.parts[layout.part]
    expected = {name.removeprefix("head/") for name in part.head}
    if {*params} != expected:
        raise UserError(
            f"the head has the layers {', '.join(params)}, but Hugging Face's {part.architecture} "
            f"has {', '.join(sorted(expected))}, which computes something else; fine-tune with "
            "--config.head=huggingface to export it, or export --part=encoder"
        )
    problem = head.huggingface.problem_type
    fields = {"problem_type": problem} if problem else {}
    num_outputs = params["output"]["bias"].size
    if not head.labels:
        return fields | {"num_labels": num_outputs}
    if len(head.labels) != num_outputs:
        raise UserError(
            f"config.json: data.labels has {len(head.labels)} names, but the head has "
            f"{num_outputs} outputs"
        )
    return fields | {
        "id2label": {str(i): label for i, label in enumerate(head.labels)},
        "label2id": {label: i for i, label in enumerate(head.labels)},
    }
