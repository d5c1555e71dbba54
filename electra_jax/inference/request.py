"""What a finished run is asked for, and what it must be able to do."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_jax.config import get_config
from electra_jax.errors import UserError
from electra_jax.run.workdir import RUN_FILES
from electra_jax.sharding.mesh import everywhere, make_mesh
from electra_jax.training.checkpoint import restore_params

BATCH_SIZE = 32  # rows that the networks see at once, rounded up to a multiple of the devices

Answer = dict[str, Any]  # fit for JSON


@dataclasses.dataclass(frozen=True)
class Request:
    """The flags of `electra_jax.predict`, and the names of those that were given."""

    workdir: Path
    input: str
    output: str
    mode: str
    step: int | None
    sentences: bool
    replace: bool
    top_k: int
    pooling: str
    given: frozenset[str]


class Model(ABC):
    """A run that answers with its networks at a step; None: at the newest that was saved.

    Raises UserError where there is no such checkpoint, or it is damaged.

    Attributes:
      endings: of the files that answers can be written to.
      flags: those that only some models know, and this one does.
    """

    endings: tuple[str, ...] = (".jsonl", ".json")
    flags: tuple[str, ...] = ()

    def __init__(self, workdir: Path, step: int | None):
        _, params = restore_params(workdir / "checkpoints", step)
        self.mesh = make_mesh(get_config().parallel)  # the devices here, not those of the training
        self.params = everywhere(self.mesh, params)
        self.batch_size = -(BATCH_SIZE // -self.mesh.size) * self.mesh.size

    @abstractmethod
    def read(self, path: str) -> Any:
        """The examples of a file."""

    @abstractmethod
    def example(self, number: int, values: Mapping[str, Any], where: str) -> Any:
        """The example that a JSON object stands for; errors begin with `where`."""

    @abstractmethod
    def respond(self, examples: Any) -> Sequence[Answer]:
        """An answer to each example, in order."""

    def summary(self) -> str:
        """A line about all answers so far; "" where nothing is to be said."""
        return ""


def check(request: Request, model: type[Model], others: Mapping[str, type[Model]]) -> None:
    """Raises UserError where flags do not fit each other, or the model that is to answer.

    `others` are all models there are, by what messages call them.
    """
    for name in sorted({flag for other in others.values() for flag in other.flags}):
        if name in request.given and name not in model.flags:
            places = [place for place, other in others.items() if name in other.flags]
            raise UserError(f"--{name} is for {' and '.join(places)} only")
    if request.input == "-" and request.output != "-":
        raise UserError(
            "--output is given without --input; answers to standard input go to standard output"
        )
    if not request.input:
        raise UserError("--input is empty; give a file, or - for standard input")
    output = Path(request.output)
    kept = [Path(request.input), *(request.workdir / name for name in RUN_FILES)]
    if output.exists() and any(path.exists() and output.samefile(path) for path in kept):
        raise UserError(f"--output is {output}, which is the input or a file of the run itself")
    if request.output != "-" and output.suffix not in model.endings:
        raise UserError(
            f"--output is {request.output}; allowed here are files that end in "
            f"{', '.join(model.endings)}"
        )
