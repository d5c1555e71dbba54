import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from ml_collections import ConfigDict

from electra_jax import cli, main, prepare
from electra_jax.config import get_config
from electra_jax.errors import UserError
from electra_jax.files import write_text
from electra_jax.run.interruption import Stopped
from electra_jax.settings import flatten

pytestmark = pytest.mark.process

ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """The working directory: holds a recipe and a corpus."""
    tiny_run.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exit_code(monkeypatch, command, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["command", *flags])
    with pytest.raises(SystemExit) as exit:
        cli.run(command)
    return exit.value.code


def parse(monkeypatch, *flags: str) -> tuple[ConfigDict, Path]:
    monkeypatch.setattr(sys, "argv", ["command", *flags])
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # the recipe before this one
    return cli.parse_with_recipe(cli.recipe_flags(), "")


MISTAKES = {
    "no recipe": ([], "--config is missing"),
    "empty recipe": (["--config="], "--config is empty; give a recipe"),
    "missing recipe": (["--config=nowhere.py"], "--config: there is no file nowhere.py"),
    "misspelt field": (
        ["--config.model.hiden_size=64"],
        r"there is no field config\.model\.hiden_size; did you mean model\.hidden_size\?",
    ),
    "field of another section": (
        ["--config.hidden_size=64"],
        r"there is no field config\.hidden_size; did you mean model\.hidden_size\?",
    ),
    "section": (["--config.model=64"], r"there is no field config\.model"),
    "text for a whole number": (
        ["--config.seed=one"],
        r"--config\.seed=one: invalid literal for int\(\).*'one'",
    ),
    "fraction for a whole number": (
        ["--config.batch_size=8.5"],
        r"--config\.batch_size=8\.5: .*int",
    ),
    "number for a switch": (["--config.data.lower_case=2"], r"lower_case=2: .*boolean"),
    "field without a value": (["--config.seed"], r"[Mm]issing value for flag --config\.seed"),
    "bad value": (
        ["--config.data.layout=square"],
        r"config\.data\.layout is 'square'; allowed: one of 'packed', 'document'",
    ),
    "task": (["--config.task=dance"], r"config\.task is 'dance'; allowed: "),
    "nothing held out": (["--config.data.held_out=0"], r"config\.data\.held_out is 0\.0; allowed"),
    "batch that 8 devices do not divide": (
        ["--config.batch_size=12"],
        r"config\.batch_size is 12; allowed: a multiple of 8",
    ),
    "mesh of other devices": (["--config.parallel.fsdp=3"], r"config\.parallel\.fsdp"),
    "missing source": (
        ["--config.data.source=nowhere.txt"],
        r"data\.source: no file matches 'nowhere\.txt'",
    ),
    "source that is a directory": (["--config.data.source=."], "is a directory"),
    "missing vocabulary": (
        ["--config.data.vocab=nowhere.txt"],
        r"data\.vocab: cannot read nowhere\.txt",
    ),
    "vocabulary that is a directory": (["--config.data.vocab=."], r"data\.vocab: cannot read \."),
    "vocabulary without [MASK]": (
        ["--config.data.vocab=maskless.txt"],
        r"maskless\.txt: the vocabulary lacks \[MASK\]",
    ),
    "vocabulary in another encoding": (
        ["--config.data.vocab=latin.txt"],
        r"latin\.txt: the vocabulary is not UTF-8 at byte 4",
    ),
    "vocabulary too small for the characters": (
        ["--config.data.vocab_size=100"],
        r"data\.vocab_size: 100 is too small",
    ),
    "unknown flag": (["--wrkdir=run"], r"there is no flag --wrkdir; did you mean workdir\?"),
    "shortened flag": (["--work=run"], "there is no flag --work"),
    "stray argument": (["run"], "unexpected argument 'run'"),
    "run directory that is a file": (["--workdir=corpus.txt"], "--workdir is corpus.txt"),
    "run directory below a file": (["--workdir=corpus.txt/a"], "corpus.txt is not a directory"),
}


@pytest.mark.parametrize("flags, message", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_line_and_leaves_nothing_behind(flags, message, place, monkeypatch, capfd):
    (place / "maskless.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    (place / "latin.txt").write_bytes("café".replace("c", "cc").encode("latin-1"))
    if flags and not flags[0].startswith("--config="):
        flags = ["--config=recipe.py", *flags]
    before = tiny_run.snapshot(place)
    assert exit_code(monkeypatch, main.main, *flags) == 2
    error = capfd.readouterr().err
    assert re.match(rf"error: .*{message}.*\n\Z", error), error
    assert tiny_run.snapshot(place) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_directory_without_permission(place, monkeypatch, capfd):
    (place / "closed").mkdir(mode=0o500)
    flags = ["--config=recipe.py", "--workdir=closed/run"]
    assert exit_code(monkeypatch, main.main, *flags) == 2
    assert "closed is not a directory to write to" in capfd.readouterr().err


RECIPES = {
    "not Python": ("def get_config(:\n", r"SyntaxError: .*line 1"),
    "no get_config": ("config = 3\n", "AttributeError: .*get_config"),
    "misspelt field": (
        "from electra_jax.config import get_config as default\n"
        "def get_config():\n"
        "    config = default()\n"
        "    config.bach_size = 3\n",
        r"line 4: AttributeError: .*batch_size",
    ),
    "wrong type": (
        "from electra_jax.config import get_config as default\n"
        "def get_config():\n"
        "    config = default()\n"
        "    config.batch_size = 'many'\n",
        r"line 4: TypeError: .*batch_size",
    ),
    "file that it cannot find": (
        "def get_config():\n    open('nowhere')\n",
        "line 2: FileNotFoundError: .*nowhere",
    ),
}


@pytest.mark.parametrize("content, message", RECIPES.values(), ids=RECIPES)
def test_bad_recipe_is_named_with_its_line(content, message, place, monkeypatch):
    (place / "bad.py").write_text(content)
    with pytest.raises(UserError, match=r"\Abad\.py") as error:
        parse(monkeypatch, "--config=bad.py")
    assert re.search(message, " ".join(str(error.value).split()))


def test_recipe_takes_an_argument(place, monkeypatch):
    (place / "sized.py").write_text(
        "from electra_jax.config import get_config as default\n"
        "def get_config(size='1'):\n"
        "    config = default()\n"
        "    config.model.num_layers = int(size)\n"
        "    return config\n"
    )
    for flags, layers in (
        (["--config=sized.py"], 1),
        (["--config=sized.py:7"], 7),
        (["--config", "sized.py:7"], 7),
    ):
        config, recipe = parse(monkeypatch, *flags)
        assert (config.model.num_layers, recipe.stem) == (layers, "sized")


def test_overrides_keep_the_types_of_the_fields(monkeypatch):
    config, _ = parse(
        monkeypatch,
        "--config=recipe.py",
        "--config.seed=1_000",
        "--config.optimizer.learning_rate=2e-4",
        "--noconfig.data.strip_accents",
        "--config.data.lower_case=false",
        "--config.data.source=a=b.txt, c d.txt",
        "--config.model.num_heads=3",
    )
    assert config.seed == 1000
    assert config.optimizer.learning_rate == 2e-4
    assert config.data.lower_case is config.data.strip_accents is False
    assert config.data.source == "a=b.txt, c d.txt"
    assert config.model.num_heads == 3


def test_interruption_is_one_line(monkeypatch, capfd):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_code(monkeypatch, interrupted) == 130
    assert capfd.readouterr().err == "error: interrupted; run the same command again to go on\n"


def test_stopped_run_is_one_line(monkeypatch, capfd):
    def stopped():
        raise Stopped("stopped by SIGTERM at step 3, saved; run the same command again to go on")

    assert exit_code(monkeypatch, stopped) == 42
    assert capfd.readouterr().err == (
        "stopped by SIGTERM at step 3, saved; run the same command again to go on\n"
    )


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EISDIR]
)
def test_nothing_can_be_written_is_one_line(monkeypatch, capfd, number):
    def full():
        raise OSError(number, os.strerror(number), "run/config.json.tmp")

    assert exit_code(monkeypatch, full) == 2
    assert capfd.readouterr().err == (
        f"error: run/config.json.tmp: {os.strerror(number)}; once mended, the same command goes "
        "on\n"
    )


@pytest.mark.parametrize("name", ["directory", "file/below", "x" * 300])
def test_a_path_that_no_file_can_have_is_one_line_and_leaves_nothing(
    monkeypatch, capfd, tmp_path, name
):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    assert exit_code(monkeypatch, lambda: write_text(tmp_path / name, "lost")) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {tmp_path / name}: ") and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_output_that_nobody_reads_is_no_fault():
    """As with `| head -1`; and a broken pipe of another kind is not taken for that."""
    unread, written = os.pipe()
    os.close(unread)
    found = subprocess.run(
        [sys.executable, "-m", "electra_jax.predict", "--help"],
        stdout=written,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    os.close(written)
    assert (found.returncode, found.stderr) == (141, b"")

    def broken():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        cli.run(broken)


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch):
    with pytest.raises(FileNotFoundError):
        cli.run(Path("nowhere").read_text)


def test_fault_of_ours_keeps_its_traceback(monkeypatch):
    def faulty():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run(faulty)


@pytest.mark.parametrize("command", [main, prepare], ids=["main", "prepare"])
def test_help_shows_commands_and_fields(command, place, monkeypatch, capfd):
    assert exit_code(monkeypatch, command.main, "--help") == 0
    text = capfd.readouterr().out
    assert f"python -m {command.__name__} --config=configs/tiny.py" in text
    fields = re.findall(r"--config\.([a-z_.]+)=", text)
    assert len(fields) > 4
    assert set(fields) <= flatten(get_config()).keys()


def test_print_config_has_every_field_as_a_flag_and_says_what_is_changed(place, monkeypatch, capfd):
    before = tiny_run.snapshot(place)
    flags = ["--config=recipe.py", "--config.seed=3", "--print_config"]
    assert exit_code(monkeypatch, main.main, *flags) == 0
    lines = capfd.readouterr().out.splitlines()
    (seed,) = [line for line in lines if line.startswith("--config.seed=3  # ")]
    assert seed.endswith("; default: 0")
    (objective,) = [line for line in lines if line.startswith("--config.objective='electra'  # ")]
    assert "default" not in objective
    assert len(lines) == len(flatten(get_config()))
    assert tiny_run.snapshot(place) == before


def test_prepare_makes_a_store_for_devices_that_are_elsewhere(place, monkeypatch, capfd):
    flags = ["--config=recipe.py", "--config.parallel.fsdp=3", "--config.batch_size=6"]
    assert exit_code(monkeypatch, prepare.main, *flags) == 0
    assert "tokens per word" in capfd.readouterr().out
    assert [path.name for path in (place / "data").glob("*/manifest.json")] == ["manifest.json"]


def test_prepare_refuses_a_bad_value_before_it_reads(place, monkeypatch, capfd):
    flags = ["--config=recipe.py", "--config.data.held_out=1.5"]
    assert exit_code(monkeypatch, prepare.main, *flags) == 2
    assert capfd.readouterr().err.startswith("error: config.data.held_out is 1.5")
    assert not (place / "data").exists()


def test_the_command_itself(place):
    before = tiny_run.snapshot(place)
    found = subprocess.run(
        [sys.executable, "-m", "electra_jax.main", "--config=recipe.py", "--config.sede=3"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: there is no field config.sede; did you mean seed?\n"
    assert tiny_run.snapshot(place) == before
