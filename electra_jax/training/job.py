"""What the loop is to do: a run, from the point of view of whatever is trained."""

import dataclasses
import importlib.metadata
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from electra_jax.data.tokenizers.base import Tokenizer
from electra_jax.modeling.flops import peak_flops
from electra_jax.modeling.params import Params
from electra_jax.objectives import Objective
from electra_jax.objectives.metrics import Metric, sign_of
from electra_jax.reporting.gallery import Token
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.program import Program

Facts = dict[str, dict[str, str]]
IsStopped = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained on."""

    tokenizer: Tokenizer  # that made it
    hash: str  # a checkpoint that was trained on data with another hash is refused
    # (first step, (i, n)) to the batches from then on, the i-th of n parts of each
    batches: Callable[[int, tuple[int, int]], Iterator[dict[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """How the networks are judged while they train.

    Attributes:
      run: (parameters, whether to stop early) to metrics whose names start with `eval/`, or None
        when it has stopped early.
      patience: evaluations without a better `keep_best`, after which training ends; 0: none.
      show: parameters to held-out texts with what the networks make of them, see `gallery`.
    """

    run: Callable[[Params, IsStopped], dict[str, float] | None]
    metrics: Mapping[str, Metric]  # without the prefix `train/` or `eval/`
    keep_best: str = ""  # metric whose best checkpoint stays, such as `eval/rtd_auc`
    patience: int = 0
    show: Callable[[Params], list[list[Token]]] = lambda params: []

    def __post_init__(self):
        if self.keep_best:
            sign_of(self.metrics, self.keep_best)  # or else it is refused here

    def score(self, results: Mapping[str, float | int]) -> float:
        """How good these results are: higher is better. The least where `keep_best` is missing."""
        if self.keep_best not in results:
            return -math.inf
        return sign_of(self.metrics, self.keep_best) * results[self.keep_best]

    def is_enough(self, scores: list[float]) -> bool:
        """Whether the evaluations with these scores end the training."""
        best = scores.index(max(scores)) if scores else 0
        return 0 < self.patience <= len(scores) - 1 - best


@dataclasses.dataclass(frozen=True)
class Job:
    """What the loop is to do."""

    objective: Objective
    program: Program
    num_steps: int
    data: Data
    evaluator: Evaluator
    initial: dict[str, np.ndarray]  # parameters to start with, by path, in place of random ones
    facts: Facts  # for the log and the report, beside those of the machine
    flops_per_token: float
    check: Callable[[ConfigDict, Path], list[str]]  # refuses other directories, `workdir.check`
    learned_from: int = 0  # step from which on the networks should have learned something

    @property
    def peak_tokens_per_second(self) -> float | None:
        """What all devices could do at most, or None where the kind of device is not known."""
        peak = peak_flops(jax.devices()[0])
        return peak * jax.device_count() / self.flops_per_token if peak else None


def describe(config: ConfigDict, job: Job, params: Params) -> Facts:
    """Facts about machine, network and versions, and those of the job."""
    mesh, tokenizer = make_mesh(config.parallel), job.data.tokenizer

    def count(tree: Params) -> str:
        return f"{sum(x.size for x in jax.tree.leaves(tree)):,}"

    return {
        "devices": {
            "kind": jax.devices()[0].device_kind,
            "number": str(jax.device_count()),
            "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            "processes": str(jax.process_count()),
            "compute": str(np.dtype(job.objective.dtype)),
        },
        "tokenizer": {
            "family": tokenizer.family,
            "tokens": f"{tokenizer.vocab_size:,}",
            "hash": tokenizer.hash[:12],
            **{name: str(value) for name, value in tokenizer.settings.items()},
        },
        "parameters": {"total": count(params)} | {part: count(params[part]) for part in params},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
    } | job.facts


def describe_step(num_tokens: int, flops_per_token: float) -> dict[str, str]:
    """Facts about a step of the training, padding included."""
    return {
        "tokens": f"{num_tokens:,}",
        "GFLOP": f"{flops_per_token * num_tokens / 1e9:.4g}",
        "GFLOP per token": f"{flops_per_token / 1e9:.4g}",
    }
