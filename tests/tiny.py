"""Tiny but complete objectives and batches, for tests that run real training steps in seconds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from electra_jax.modeling.electra import ElectraConfig
from electra_jax.modeling.encoders import ENCODERS
from electra_jax.modeling.encoders.base import EncoderConfig
from electra_jax.modeling.heads import CopyHead, MaskedLMHead
from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective
from electra_jax.objectives.adversarial import AdversarialTokenDetection
from electra_jax.objectives.electra import ReplacedTokenDetection
from electra_jax.objectives.masking import MaskingConfig
from electra_jax.objectives.mlm import MaskedLanguageModel
from electra_jax.objectives.reconstruction import AllTokensMLM, ReplaceMLM
from electra_jax.objectives.schedules import Ramp
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.optimizer import AdamState, OptimizerConfig
from electra_jax.training.program import Program, make_program
from electra_jax.training.step import TrainState

PAD, UNK, CLS, SEP, MASK = range(5)
VOCAB = 300  # not a multiple of a block: logits have padded columns
LENGTH = 32
STARTS_WORD = tuple(token <= MASK or token % 3 > 0 for token in range(VOCAB))

# Objectives and algorithms beyond ELECTRA's and BERT's, each in some combination: class, what it is
# given, and what the model is given beside its sizes.
VARIANTS = {
    "electra_15": (ReplacedTokenDetection, {"selected_only": True}, {}),
    "replace_mlm": (
        ReplaceMLM,
        {"discriminator_weight": Ramp(3.0, 1.0, 4), "temperature": Ramp(2.0, 1.0, 3)},
        {"discriminator_head": MaskedLMHead},
    ),
    "all_tokens_mlm": (
        AllTokensMLM,
        {
            "frequencies": tuple(1.0 + token % 2 for token in range(VOCAB)),
            "discriminator_weight": 1.0,
        },
        {"discriminator_head": CopyHead, "generator": None},
    ),
    "two_stage": (ReplacedTokenDetection, {"generator_steps": 2}, {}),
    "adversarial": (AdversarialTokenDetection, {"warmup_steps": 2}, {"baseline": True}),
}

Row = Sequence[Sequence[int]]  # the tokens of each piece, without [CLS] and [SEP]


def masking_config(**changes) -> MaskingConfig:
    default = MaskingConfig(
        rate=0.15,
        mask_token_share=0.85,
        random_token_share=0.0,
        mode="clean",
        vocab_size=VOCAB,
        mask_id=MASK,
        unmaskable_ids=(CLS, SEP, MASK),
        starts_word=STARTS_WORD,
    )
    return dataclasses.replace(default, **changes)


def objective(
    kind: str = "electra",
    sharing: str = "embeddings",
    mode: str = "clean",
    unit: str = "token",
    vocab_size: int = VOCAB,
    loss: dict | None = None,
    full_size: bool = False,
    **encoder,
) -> Objective:
    """Discriminator 32 wide with two heads, generator half of it, and a narrower embedding.

    Args:
      kind: electra, mlm or one of `VARIANTS`.
      loss: arguments of the objective's class.
      full_size: the generator is as large as the discriminator.
    """
    if kind == "two_stage":
        full_size, sharing = True, sharing if sharing == "none" else "gdes"
    discriminator = encoder_config(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_positions": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            **encoder,
        }
    )
    masking = masking_config(mode=mode, unit=unit, vocab_size=vocab_size)
    if kind == "mlm":
        return MaskedLanguageModel(ElectraConfig(None, discriminator), masking)
    made, arguments, head = VARIANTS.get(kind, (ReplacedTokenDetection, {}, {}))
    generator = discriminator
    if sharing != "all" and not full_size:
        width = discriminator.hidden_size // 2
        generator = dataclasses.replace(
            discriminator,
            embedding_size=width if sharing == "none" else discriminator.embedding_size,
            hidden_size=width,
            num_heads=1,
            intermediate_size=2 * width,
        )
    model = dataclasses.replace(ElectraConfig(discriminator, generator, sharing), **head)
    return made(model, masking, **{**arguments, **(loss or {})})


def encoder(**changes) -> EncoderConfig:
    """For fine-tuning: 16 wide, with dropout."""
    return encoder_config(**{"vocab_size": 50, "max_positions": 16, **changes})


def encoder_config(**changes) -> EncoderConfig:
    """16 wide with two heads and two layers."""
    usual = {
        "encoder": "bert",
        "embedding_size": 8,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 32,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "init_stddev": 0.02,
        "remat": "none",
        "scan_unroll": 1,
        "dtype": jnp.float32,
    }
    values = usual | changes
    return ENCODERS[values["encoder"]].Config(**values)


def encoder_of(params: Params) -> EncoderConfig:
    """What the encoder in `{"embeddings", "encoder"}` has been made with."""
    tables, layers = params["embeddings"], params["encoder"]["layers"]
    num_layers, hidden_size, _, num_heads, _ = layers["attention"]["qkv"]["kernel"].shape
    return encoder(
        vocab_size=len(tables["word"]),
        embedding_size=tables["word"].shape[1],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=layers["up"]["kernel"].shape[-1],
        max_positions=len(tables["position"]),
        token_types=len(tables["token_type"]),
    )


def optimizer(**changes) -> OptimizerConfig:
    return OptimizerConfig(
        **{"learning_rate": 1e-3, "warmup_steps": 2, "num_steps": 100, **changes}
    )


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    """Of the first devices."""
    sizes = ConfigDict({"data": data, "fsdp": fsdp, "tensor": tensor})
    return make_mesh(sizes, jax.devices()[: data * fsdp * tensor])


def program(objective: Objective, num_microbatches: int = 1, **changes) -> Program:
    """On one device."""
    return make_program(mesh(), objective, optimizer(**changes), 0, num_microbatches)


def moments(state: TrainState) -> AdamState:
    """The part of the optimizer's state that is as large as the parameters."""
    return next(part for part in state.opt_state if isinstance(part, AdamState))


def batch(rows: Sequence[Row], length: int = LENGTH) -> dict[str, np.ndarray]:
    """Rows as the loader makes them: `[CLS] piece [SEP]` one after the other, then padding."""
    fields = {
        name: np.zeros((len(rows), length), np.int32)
        for name in ("input_ids", "segment_ids", "position_ids", "token_type_ids")
    }
    for index, pieces in enumerate(rows):
        end = 0
        for number, piece in enumerate(pieces, 1):
            tokens = [CLS, *piece, SEP]
            place = index, slice(end, end + len(tokens))
            fields["input_ids"][place] = tokens
            fields["segment_ids"][place] = number
            fields["position_ids"][place] = np.arange(len(tokens))
            end += len(tokens)
    return {**fields, "row": np.arange(len(rows), dtype=np.int32)}


def packed(
    num_rows: int, length: int = LENGTH, vocab_size: int = VOCAB, seed: int = 0
) -> dict[str, np.ndarray]:
    """Rows of one to three pieces of random tokens and mixed lengths, with a little padding."""
    rng = np.random.default_rng(seed)

    def row() -> Row:
        free = length - rng.integers(0, length // 4)
        sizes = []
        for _ in range(3):
            if free > 3:
                sizes.append(rng.integers(1, free - 1))
                free -= sizes[-1] + 2
        return [rng.integers(MASK + 1, vocab_size, size) for size in sizes]

    return batch([row() for _ in range(num_rows)], length)


def widen(batch: dict[str, np.ndarray], columns: int) -> dict[str, np.ndarray]:
    """The same rows with `columns` more tokens of padding."""
    return {
        name: x if name == "row" else np.pad(x, ((0, 0), (0, columns))) for name, x in batch.items()
    }


def flat(tree) -> dict[str, np.ndarray]:
    """Arrays of a tree by path, on the host."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def count(tree) -> int:
    """How many numbers a tree holds, or its shapes say."""
    return sum(x.size for x in jax.tree.leaves(tree))


def value_files(checkpoint: Path) -> list[Path]:
    """Where the arrays of a checkpoint are. Which of them lie in which file is left to chance."""
    return list(checkpoint.glob("state/ocdbt.process_*/d/*"))
