"""Train, evaluate and resume: one command for every recipe and every machine.

    python -m electra_jax.main --config=configs/tiny.py
    python -m electra_jax.main --config=configs/large.py --workdir=DIR --config.data.source='text/*'

Run the same command again and it goes on where it stopped.

Any field of a recipe can be set on the command line. Often used are

    --config.data.source='a.txt,b/*.jsonl.gz' text to train on: docs/data.md
    --config.data.sequence_length=512         tokens in a row
    --config.batch_size=256                   rows in an update, over all devices
    --config.num_train_steps=100000           updates
    --config.optimizer.learning_rate=2e-4     at its peak
    --config.model.hidden_size=512            width of the network, and
    --config.model.num_layers=12              its depth
    --config.objective=mlm --config.generator.width=1
                                              train BERT instead of ELECTRA
    --config.log_every_steps=10               a line and a point in the curves

electra_jax/config.py lists all of them with their defaults, and

    --print_config                            shows those of this recipe, and stops

The other commands; each of them knows --help:

    python -m electra_jax.prepare             vocabulary and token store, ahead of training
    python -m electra_jax.compile             will a recipe fit a TPU that is not there?
    python -m electra_jax.predict             use what a run has made
    python -m electra_jax.report              the report of a run, or a comparison of several
    python -m electra_jax.export              a directory for Hugging Face's libraries
    python -m electra_jax.tokenize            how text is cut into tokens
"""


def main() -> None:
    """Run the recipe."""
    # Imported here, because the processes that tokenize import this module, too.
    from pathlib import Path

    from absl import flags

    from electra_jax import cli
    from electra_jax.jobs.finetuning import finetune
    from electra_jax.jobs.pretraining import pretrain
    from electra_jax.run import processes

    values = cli.recipe_flags()
    workdir = "run directory; default: runs/NAME_OF_RECIPE"
    flags.DEFINE_string("workdir", None, workdir, flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "processes of this run", flag_values=values)
    flags.DEFINE_integer("process_id", None, "which one this is, from 0", flag_values=values)
    config, recipe = cli.parse_with_recipe(values, __doc__)
    processes.join(values.coordinator, values.num_processes, values.process_id)
    work = finetune if config.task == "finetune" else pretrain
    work(config, Path(values.workdir or f"runs/{recipe.stem}"))


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
