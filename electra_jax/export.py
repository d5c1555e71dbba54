"""Write what a run has trained as a directory that Hugging Face's libraries read.

    python -m electra_jax.export --workdir=runs/small --out=exported/small
    python -m electra_jax.export --workdir=runs/small --out=exported/generator --part=generator

    --workdir=DIR   the run directory
    --out=DIR       a new directory: model.safetensors, config.json, the tokenizer, a model card
    --part=PART     what of the run, and so for which class:
                      discriminator   ElectraForPreTraining, the default after pre-training
                      generator       ElectraForMaskedLM, which fills masks; the default after
                                      config.objective = mlm
                      encoder         ElectraModel, without a head
                      classifier      ElectraForSequenceClassification
                      qa              ElectraForQuestionAnswering
                      tagger          ElectraForTokenClassification
    --step=N        the checkpoint; the newest if not given
    --dtype=TYPE    float32 (as trained), bfloat16 or float16

Needs neither PyTorch nor an accelerator.
"""

from pathlib import Path

from electra_jax.errors import UserError
from electra_jax.interop.directory import DTYPES
from electra_jax.jobs.exporting import export


def main() -> None:
    """Export a part of a run."""
    from absl import flags

    from electra_jax import cli

    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "run directory", flag_values=values)
    flags.DEFINE_string("out", None, "new directory", flag_values=values)
    flags.DEFINE_string("part", None, "part of the run", flag_values=values)
    step_help = "checkpoint; default: the newest, or the one that a fine-tuned run predicts with"
    flags.DEFINE_integer("step", None, step_help, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", DTYPES, "of the weights", flag_values=values)
    cli.parse(values, __doc__)
    for name in ("workdir", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is missing; give a directory")
    export(Path(values.workdir), Path(values.out), values.part, values.step, values.dtype)
    print(f"written: {values.out}")


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
