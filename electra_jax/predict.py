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

    --mode=detect               which tokens look replaced: in colours on a terminal, or to
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

import functools
import sys
from pathlib import Path
from typing import Any

from absl import flags

from electra_jax.errors import UserError
from electra_jax.inference.configuration import load_config
from electra_jax.inference.serving import (
    Model,
    answer_lines,
    read_texts,
    read_texts_or_store,
    write,
)
from electra_jax.run.workdir import RUN_FILES

BATCH_SIZE = 32  # rows that the networks see at once


ENDINGS = {  # of --output, and what it is then
    "finetune": (".jsonl", ".json"),
    "detect": (".jsonl", ".json", ".html"),
    "fill": (".jsonl", ".json"),
    "embed": (".npy", ".jsonl"),
}


MODES = tuple(ENDINGS)[1:]


FLAGS = {"replace": ("detect",), "top_k": ("detect", "fill"), "pooling": ("embed",)}


def main() -> None:
    """Answer a file, or standard input."""
    from electra_jax import cli

    values = cli.parse(predict_flags(), __doc__)
    if not values.workdir:
        raise UserError("--workdir is missing; give the directory of a run")
    workdir = Path(values.workdir)
    config = load_config(workdir)
    mode = check(values, config.task, str(workdir))
    is_stream = values.input == "-"
    if config.task == "finetune":
        model = finetuned(workdir, values, 1 if is_stream else BATCH_SIZE)
    else:
        model = pretrained(workdir, config, mode, values, 1 if is_stream else BATCH_SIZE)
    if is_stream:
        answer_lines(model, sys.stdin.buffer)
    else:
        write(model.respond(model.read(values.input)), values.output, mode)
    if line := model.summary():
        print(line, file=sys.stderr if values.output == "-" else sys.stdout)


def predict_flags() -> flags.FlagValues:
    """See the module's docstring."""
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
    return values


def check(values: flags.FlagValues, task: str, workdir: str) -> str:
    """The mode, if the flags fit it and each other.

    Raises:
      UserError: they do not.
    """
    if task == "finetune" and values.mode:
        raise UserError(
            f"--mode is {values.mode!r}, but {workdir} is fine-tuned and does what it was trained "
            f"for; {', '.join(MODES)} are for pre-training runs"
        )
    if task == "pretrain" and values.mode not in MODES:
        found = f"is {values.mode!r}" if values.mode else "is missing"
        raise UserError(
            f"--mode {found}; allowed for {workdir}, a pre-training run: {', '.join(MODES)}"
        )
    mode = values.mode or task
    for name, modes in FLAGS.items():
        if values[name].present and mode not in modes:
            raise UserError(f"--{name} is for --mode={' and --mode='.join(modes)} only")
    if values.sentences and mode != "finetune":
        raise UserError("--sentences is for runs that tag words only")
    if values.input == "-" and values.output != "-":
        raise UserError(
            "--output is given without --input; answers to standard input go to standard output"
        )
    if not values.input:
        raise UserError("--input is empty; give a file, or - for standard input")
    output = Path(values.output)
    kept = [Path(values.input), *(Path(workdir, name) for name in RUN_FILES)]
    if output.exists() and any(path.exists() and output.samefile(path) for path in kept):
        raise UserError(f"--output is {output}, which is the input or a file of the run itself")
    ending = output.suffix
    if values.output != "-" and ending not in ENDINGS[mode]:
        raise UserError(
            f"--output is {values.output}; allowed here are files that end in "
            f"{', '.join(ENDINGS[mode])}"
        )
    return mode


def finetuned(workdir: Path, values: flags.FlagValues, batch_size: int) -> Model:
    """A fine-tuned run."""
    from electra_jax.inference import finetuned

    task, respond = finetuned.load(workdir, values.step, batch_size)
    if values.sentences and task.head.kind != "tagging":
        raise UserError("--sentences is for runs that tag words only")
    return Model(
        lambda path: finetuned.read(task, path, values.sentences),
        functools.partial(finetuned.example, task),
        respond,
    )


def pretrained(workdir: Path, config: Any, mode: str, values: Any, batch_size: int) -> Model:
    """A pre-training run in one of its modes."""
    from electra_jax.finetune.sentences import text
    from electra_jax.inference import pretrained

    respond, summary = pretrained.load(
        workdir, config, mode, values.step, batch_size, values.top_k, values.replace, values.pooling
    )
    return Model(
        read_texts if mode != "detect" else read_texts_or_store,
        lambda number, found, where: text(found, "text", where),
        respond,
        summary,
    )


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
