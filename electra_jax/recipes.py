"""For recipes that have several rows of a table in one file, and a tiny size of each.

--config=configs/paper/objectives.py:replace_mlm         a row
--config=configs/paper/objectives.py:replace_mlm,tiny    the same, small enough for two cores
--config=configs/paper/objectives.py:tiny                the first row
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from electra_jax.errors import UserError


def read_argument(argument: str, rows: Sequence[str]) -> tuple[str, bool]:
    """The row that stands behind a recipe's colon, and whether it is wanted tiny."""
    row, _, size = argument.rpartition(",") if argument.endswith("tiny") else (argument, "", "")
    if row not in ("", *rows) or size not in ("", "tiny"):
        raise UserError(
            f"there is no row {argument!r} in this recipe; allowed: {', '.join(rows)}, alone or "
            "followed by ',tiny'"
        )
    return row or rows[0], size == "tiny"


def shrink(config: ConfigDict) -> None:
    """Sizes, data and rates of `configs/tiny.py`; what a recipe is about stays as it is.

    That is the objective, its generator and weights, and how both are trained. Steps that are
    numbered keep their share of the run.
    """
    steps = 2400
    generator = config.generator
    generator.mle_steps = generator.mle_steps * steps // config.num_train_steps
    config.ramp_steps = config.ramp_steps * steps // config.num_train_steps
    config.num_train_steps = steps
    config.batch_size = 64
    config.data.update(source="docstrings", vocab_size=8192, held_out=0.02, sequence_length=32)
    config.model.update(
        hidden_size=128,
        embedding_size=128,
        num_layers=2,
        max_positions=32,
        dropout=0.0,
        attention_dropout=0.0,
        init_stddev=0.08,
        remat="none",
        scan_unroll=2,
    )
    config.optimizer.update(learning_rate=1.5e-3, warmup_steps=300, b2=0.98)
    config.eval_every_steps = 400
    config.checkpoint.every_steps = 400
