"""Texts in, answers out: files, standard input and the formats of answers."""

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from electra_jax.errors import UserError
from electra_jax.files import parse_object, write_bytes
from electra_jax.inference.configuration import load_config
from electra_jax.inference.finetuned import FineTuned
from electra_jax.inference.pretrained import MODES
from electra_jax.inference.request import Answer, Model, Request, check
from electra_jax.reporting import gallery
from electra_jax.reporting.page import texts_page


def serve(request: Request) -> None:
    """Answers a file, or standard input line by line; UserError where the run cannot do that."""
    config = load_config(request.workdir)
    kind = model_of(config.task, request)
    by_mode = {f"--mode={mode}": other for mode, other in MODES.items()}
    check(request, kind, by_mode | {"fine-tuned runs": FineTuned})
    model = kind(config, request)
    if request.input == "-":
        answer_lines(model, sys.stdin.buffer)
    else:
        examples = model.read(request.input)
        answers = [] if examples == [] else model.respond(examples)
        write(answers, request.output, request.mode)
    if line := model.summary():
        print(line, file=sys.stderr if request.output == "-" else sys.stdout)


def model_of(task: str, request: Request) -> type[Model]:
    """The model by which a run of this `config.task` answers; UserError for a mode it lacks."""
    names = ", ".join(MODES)
    if task == "finetune":
        if request.mode:
            raise UserError(
                f"--mode is {request.mode!r}, but {request.workdir} is fine-tuned and does what it "
                f"was trained for; {names} are for pre-training runs"
            )
        return FineTuned
    if request.mode not in MODES:
        found = f"is {request.mode!r}" if request.mode else "is missing"
        raise UserError(
            f"--mode {found}; allowed for {request.workdir}, a pre-training run: {names}"
        )
    return MODES[request.mode]


def answer_lines(model: Model, lines: Iterable[bytes]) -> None:
    """Answer every line as soon as it is there."""
    for number, line in enumerate(lines):
        where = f"line {number + 1}"
        try:
            (answer,) = model.respond([model.example(number, parse_object(line, where), where)])
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def write(answers: Sequence[Answer], output: str, mode: str) -> None:
    """Write all answers, as a whole or not at all, in the format that the ending says."""
    if output == "-" and mode == "detect" and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        for answer in answers:
            print(gallery.as_terminal(answer["tokens"]))
        return
    match Path(output).suffix:
        case ".npy":
            buffer = io.BytesIO()
            np.save(buffer, np.array([answer["vector"] for answer in answers], np.float32))
            content = buffer.getvalue()
        case ".html":
            content = texts_page([answer["tokens"] for answer in answers]).encode()
        case ".json":
            content = (json.dumps(answers, indent=1) + "\n").encode()
        case _:
            content = "".join(json.dumps(answer) + "\n" for answer in answers).encode()
    if output == "-":
        sys.stdout.buffer.write(content)
    else:
        write_bytes(Path(output), content)
