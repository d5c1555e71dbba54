"""Strict start-up and fixtures for all tests.

Eight fake devices, no silent rank promotion, and the annotations of `electra_jax` checked at run
time: a function that is given or returns an array of the wrong shape or dtype fails.
"""

import contextlib
import io
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jaxtyping
import pytest
from beartype import beartype
from stdlib_text import stdlib_documents

# A shell that starts the tests in the background has them, and all their children, ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

stdlib_documents()  # kept from here on: what tests import later adds to the standard library

# Tests compile much and compute little: they ask XLA for few optimizations. `make test-slow` runs
# the arithmetic once more with all of them.
if "ELECTRA_TEST_OPTIMIZED" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11):  # later versions do not know the flag
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


def check_function(function: Callable) -> Callable:
    """Check the types of every function but constructors.

    JAX puts all sorts of leaves (shapes, shardings) in copies of our dataclasses.
    """
    return function if function.__name__ == "__init__" else beartype(function)


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
compiled = tempfile.TemporaryDirectory()  # programs that several tests need are compiled once
jax.config.update("jax_compilation_cache_dir", compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jaxtyping.install_import_hook("electra_jax", "conftest.check_function")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real corpora, vocabularies and reference outputs, too big for the repository."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get("ELECTRA_SHARED_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; ELECTRA_SHARED_DATA can name another place")
    return path


@pytest.fixture(scope="session")
def encoder_run(tmp_path_factory) -> Path:
    """A tiny pre-training run on eight devices, to fine-tune from."""
    import tiny_run

    from electra_jax.jobs import pretraining

    place = tmp_path_factory.mktemp("encoder")
    tiny_run.make(place)
    with contextlib.chdir(place):
        config = runpy.run_path("recipe.py")["get_config"]()
        config.num_train_steps = 7
        pretraining.pretrain(config, Path("run"))
    return place / "run"


@pytest.fixture
def command(monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: its exit code, standard output and error."""
    from electra_jax import cli

    def call(main: Callable[[], None], *flags: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, flags)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as exit:
            cli.run(main)
        return exit.value.code, *capfd.readouterr()

    return call
