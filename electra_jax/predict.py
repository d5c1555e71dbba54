"""Use what a run has made: a prediction for every text, in a file or one after the other.

    python -m electra_jax.predict --workdir=RUN --input=FILE --output=FILE

RUN is all that is needed: neither the data it was trained on nor a configuration.

A fine-tuned run gives labels and probabilities, answers, or tags:

    --input=new.csv             a table with the columns of text (.csv, .tsv, .jsonl, .parquet)
    --input=questions.json      questions in SQuAD's format
    --input=words.txt           tagging: words in columns, an empty line after a sentence; with
    --sentences                 a sentence a line in their place
    --output=answers.jsonl      a JSON object a line; answers.json: a list of them

A pre-training run knows three --mode:

    --mode=detect               which tokens look replaced: in colors on a terminal, or to
    --output=page.html          a page to look at; .jsonl or .json: probabilities
    --replace                   first replace 15 % of the tokens (config.masking.rate) by what the
                                generator proposes, as in training, and print the AUC
    --mode=fill                 what the generator proposes for every [MASK], with probabilities
    --mode=embed                a vector for each text; --output=vectors.npy: float32 [texts, H]
    --pooling=mean              over all tokens; cls: the state of [CLS]

Their input is a text a line, or a table with a column `text`; for `detect` it may also be a token
store (data/NAME), whose held-out rows are judged: with --replace exactly as in the evaluation.

    --step=1000                 of the checkpoint; default: the newest, or the best that was kept
    --top_k=5                   proposals for each [MASK], or for each replaced token

Without --input, or with --input=-, JSON objects are read from standard input, one a line, and each
is answered at once by a line on standard output:

    {"text": "It rains."}                                   detect, fill, embed; tagging
    {"question": "What does it do?", "context": "It rains."}    question answering
    {"title": "Rain", "body": "It rains."}                  the columns of a table

A line that cannot be answered gives {"error": ...}, and the next one is read.
"""

from pathlib import Path

from absl import flags

from electra_jax.errors import UserError


def main() -> None:
    """Answer a file, or standard input."""
    from electra_jax import cli
    from electra_jax.inference.request import Request
    from electra_jax.inference.serving import serve

    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of a run", flag_values=values)
    flags.DEFINE_string("input", "-", "file, or - for standard input", flag_values=values)
    flags.DEFINE_string("output", "-", "file, or - for standard output", flag_values=values)
    flags.DEFINE_string("mode", "", "of a pre-training run", flag_values=values)
    flags.DEFINE_integer("step", None, "of the checkpoint", flag_values=values)
    flags.DEFINE_bool("sentences", False, "a sentence a line, to tag", flag_values=values)
    flags.DEFINE_bool("replace", False, "replace tokens first", flag_values=values)
    flags.DEFINE_integer("top_k", 5, "proposals", lower_bound=1, flag_values=values)
    flags.DEFINE_enum("pooling", "mean", ["mean", "cls"], "of states", flag_values=values)
    cli.parse(values, __doc__)
    if not values.workdir:
        raise UserError("--workdir is missing; give the directory of a run")
    given = frozenset(name for name in values if values[name].present)
    options = values.flag_values_dict() | {"workdir": Path(values.workdir), "given": given}
    serve(Request(**options))


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
