"""The original program's checkpoints, renamed to Hugging Face's names (spec 1.8, 1.9).

A checkpoint holds both networks. The embeddings lie under `electra/` even where the generator alone
reads them, and so does a tower that plays both roles, or the only one.
"""

import re
from collections.abc import Iterable

ENCODER = "bert"  # its key in `ENCODERS`

# Everything that is no weight, and why it is not used.
NO_WEIGHTS = (
    (r"/adam_[mv]$", "the optimizer's moments; training starts with fresh ones"),
    (r"^global_step$", "the step; training starts at 0"),
    (r"^temperature$", "left in published checkpoints, read by nothing"),
    (r"^task_specific/", "a fine-tuned head"),
)
HEADS = {
    "discriminator": "discriminator_predictions/",
    "generator": "generator_predictions/",
}


def no_weight(name: str) -> str | None:
    """Why the variable `name` is not used, where it is known to be none of a network's."""
    return next((why for pattern, why in NO_WEIGHTS if re.search(pattern, name)), None)


def networks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each network, its tensors by Hugging Face's names, with the original's.

    Keys are `discriminator` and `generator`, as far as there is a head; else `encoder`. What none
    of them reads is in none.
    """
    names = [name for name in names if not no_weight(name)]
    has = lambda start: any(name.startswith(start) for name in names)  # noqa: E731
    parts = [part for part, head in HEADS.items() if has(head)] or ["encoder"]
    found = {}
    for part in parts:
        scope = "generator/" if part == "generator" and has("generator/encoder/") else "electra/"
        own = part == "generator" and has("generator/embeddings/")
        starts = (
            "generator/embeddings/" if own else "electra/embeddings/",
            f"{scope}embeddings_project/",
            f"{scope}encoder/",
            *([HEADS[part]] if part in HEADS else []),
        )
        found[part] = {_renamed(name): name for name in names if name.startswith(starts)}
    return found


def _renamed(name: str) -> str:
    """`electra.encoder.layer.0.output.dense.weight` of `generator/encoder/layer_0/output/...`."""
    for pattern, replacement in (
        (r"^(electra|generator)/", "electra/"),
        (r"^generator_predictions/output_bias$", "generator_lm_head/bias"),
        (r"^discriminator_predictions/dense_1/", "discriminator_predictions/dense_prediction/"),
        (r"/layer_(\d+)/", r"/layer/\1/"),
        (r"_embeddings$", "_embeddings/weight"),
        (r"/(kernel|gamma)$", "/weight"),
        (r"/beta$", "/bias"),
    ):
        name = re.sub(pattern, replacement, name)
    return name.replace("/", ".")
