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

import dataclasses
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from electra_jax.errors import UserError
from electra_jax.workdir import RUN_FILES, load_config

# Imported where they are used: what is slow to import and not needed by every mode.

BATCH_SIZE = 32  # rows that the networks see at once
ENDINGS = {  # of --output, and what it is then
    "finetune": (".jsonl", ".json"),
    "detect": (".jsonl", ".json", ".html"),
    "fill": (".jsonl", ".json"),
    "embed": (".npy", ".jsonl"),
}
MODES = tuple(ENDINGS)[1:]
FLAGS = {"replace": ("detect",), "top_k": ("detect", "fill"), "pooling": ("embed",)}

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """What answers.

    Attributes:
      read: the examples of a file.
      example: (number, JSON object, where it is from) to an example.
      respond: answers to examples, in order.
      summary: a line about all answers, or "".
    """

    read: Callable[[str], list]
    example: Callable[[int, dict, str], Any]
    respond: Callable[[Sequence], list[Answer]]
    summary: Callable[[], str] = lambda: ""


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
    from electra_jax.finetune import answers

    task, respond = answers.load(workdir, values.step, batch_size)
    if values.sentences and task.head.kind != "tagging":
        raise UserError("--sentences is for runs that tag words only")
    return Model(
        lambda path: answers.read(task, path, values.sentences),
        functools.partial(answers.example, task),
        respond,
    )


def pretrained(workdir: Path, config: Any, mode: str, values: Any, batch_size: int) -> Model:
    """A pre-training run in one of its modes."""
    from electra_jax import proposing
    from electra_jax.finetune.sentences import text

    respond, summary = proposing.load(
        workdir, config, mode, values.step, batch_size, values.top_k, values.replace, values.pooling
    )
    return Model(
        read_texts if mode != "detect" else read_texts_or_store,
        lambda number, found, where: text(found, "text", where),
        respond,
        summary,
    )


def read_texts_or_store(path: str) -> Any:
    """As `read_texts`; or the token store at `path`."""
    if Path(path, "manifest.json").exists():
        from electra_jax.data.store import open_store

        return open_store(path)
    return read_texts(path)


def read_texts(path: str) -> list[str]:
    """The lines of a text file, or the column `text` of a table."""
    from electra_jax.finetune.files import read_lines
    from electra_jax.finetune.sentences import text
    from electra_jax.finetune.tables import is_table, read_table

    if not is_table(path):
        return read_lines(path)
    return [text(values, "text", f"{path}, line {line}") for line, values in read_table(path)]


def answer_lines(model: Model, lines: Iterator[bytes]) -> None:
    """Answer every line as soon as it is there."""
    for number, line in enumerate(lines):
        where = f"line {number + 1}"
        try:
            answer = model.respond([model.example(number, parsed(line, where), where)])[0]
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def parsed(line: bytes, where: str) -> dict:
    """The JSON object of a line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: not a JSON object but {type(found).__name__}")
    return found


def write(answers: Sequence[Answer], output: str, mode: str) -> None:
    """Write all answers, as a whole or not at all, in the format that the ending says."""
    from electra_jax import shading
    from electra_jax.files import write_bytes

    if output == "-" and mode == "detect" and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        for answer in answers:
            print(shading.as_terminal(answer["tokens"]))
        return
    match Path(output).suffix:
        case ".npy":
            buffer = io.BytesIO()
            np.save(buffer, np.array([answer["vector"] for answer in answers], np.float32))
            content = buffer.getvalue()
        case ".html":
            content = page(answers).encode()
        case ".json":
            content = (json.dumps(answers, indent=1) + "\n").encode()
        case _:
            content = "".join(json.dumps(answer) + "\n" for answer in answers).encode()
    if output == "-":
        sys.stdout.buffer.write(content)
    else:
        write_bytes(Path(output), content)


def page(answers: Sequence[Answer]) -> str:
    """Shaded texts as a page that needs nothing else."""
    from electra_jax import report, shading

    body = "".join(shading.as_html(answer["tokens"]) for answer in answers)
    note = "The darker a token, the more the discriminator takes it for a replacement."
    return report.page("Replaced token detection", [note], f"<section>{body}</section>")


if __name__ == "__main__":
    from electra_jax import cli

    cli.run(main)
