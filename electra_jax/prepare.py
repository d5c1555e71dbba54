"""Build the tokenizer and the token store of a recipe, or find them already there.

    python -m electra_jax.prepare --config=configs/tiny.py
    python -m electra_jax.prepare --config=configs/large.py --config.data.source='text/*.txt'

Training does this by itself. As a command of its own it runs on a machine without accelerators, and
shows what a corpus holds before anything is trained on it. It uses all cores; interrupted, it goes
on where it stopped. Often used are

    --config.data.source='a.txt,b/*.jsonl.gz' files, data sets, buckets: see docs/data.md
    --config.data.dir=DIR                     where token stores are kept
    --config.data.vocab=FILE                  a given vocab.txt or SentencePiece .model
    --config.data.tokenizer=unigram           train one: wordpiece, unigram or bpe
    --config.data.vocab_size=32000            with so many pieces
    --config.data.held_out=0.01               share of the documents kept for evaluation
    --config.data.on_error=skip               count what cannot be read, and go on
    --verify                                  compare a store with its hashes
"""

from electra_jax.data.preparation import prepare
from electra_jax.data.store import verify


def main() -> None:
    """Prepare the data of the recipe."""
    # Imported here, because the processes that tokenize import this module, too.
    import os

    from absl import flags

    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators that are here stay free for others
    from electra_jax import cli
    from electra_jax.checks import validate

    values = cli.recipe_flags()
    verifies = flags.DEFINE_bool(
        "verify", False, "compare the store with its hashes", flag_values=values
    )
    config, _ = cli.parse_with_recipe(values, __doc__)
    mesh = config.parallel
    validate(config, num_devices=max(1, mesh.data) * mesh.fsdp * mesh.tensor)  # not those of here
    store = prepare(config.data)
    if verifies.value:
        print(f"verified: all {verify(store)} files are what was written")


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
