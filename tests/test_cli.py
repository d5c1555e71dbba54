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


def raising(error: BaseException):
    def raise_it():
        raise error

    return raise_it


def parse(monkeypatch, *flags: str) -> tuple[ConfigDict, Path]:
    monkeypatch.setattr(sys, "argv", ["command", *flags])
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # the recipe before this one
    return cli.parse_with_recipe(cli.recipe_flags(), "")


MISTAKES = {  # by flags, of which those without a recipe are given one; () are none at all
    (): "--config is missing",
    "--config=": "--config is empty; give a recipe",
    "--config=nowhere.py": "--config: there is no file nowhere.py",
    "--config.model.hiden_size=64": r"no field config\.model\.hiden_size; did you mean "
    r"model\.hidden_size\?",
    "--config.hidden_size=64": r"no field config\.hidden_size; did you mean model\.hidden_size\?",
    "--config.model=64": r"there is no field config\.model",
    "--config.seed=one": r"--config\.seed=one: invalid literal for int\(\).*'one'",
    "--config.batch_size=8.5": r"--config\.batch_size=8\.5: .*int",
    "--config.data.lower_case=2": r"lower_case=2: .*boolean",
    "--config.seed": r"[Mm]issing value for flag --config\.seed",
    "--config.data.layout=square": r"data\.layout is 'square'; allowed: one of 'packed', 'docum",
    "--config.task=dance": r"config\.task is 'dance'; allowed: ",
    "--config.data.held_out=0": r"config\.data\.held_out is 0\.0; allowed",
    "--config.batch_size=12": r"config\.batch_size is 12; allowed: a multiple of 8",
    "--config.parallel.fsdp=3": r"config\.parallel\.fsdp",
    "--config.data.source=nowhere.txt": r"data\.source: no file matches 'nowhere\.txt'",
    "--config.data.source=.": "is a directory",
    "--config.data.vocab=nowhere.txt": r"data\.vocab: cannot read nowhere\.txt",
    "--config.data.vocab=.": r"data\.vocab: cannot read \.",
    "--config.data.vocab=maskless.txt": r"maskless\.txt: the vocabulary lacks \[MASK\]",
    "--config.data.vocab=latin.txt": r"latin\.txt: the vocabulary is not UTF-8 at byte 4",
    "--config.data.vocab_size=100": r"data\.vocab_size: 100 is too small",
    "--wrkdir=run": r"there is no flag --wrkdir; did you mean workdir\?",
    "--work=run": "there is no flag --work",
    "run": "unexpected argument 'run'",
    "--workdir=corpus.txt": "--workdir is corpus.txt",
    "--workdir=corpus.txt/a": "corpus.txt is not a directory",
}


@pytest.mark.parametrize("flag, message", MISTAKES.items(), ids=map(str, MISTAKES))
def test_mistake_is_one_line_and_leaves_nothing_behind(flag, message, place, command):
    (place / "maskless.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    (place / "latin.txt").write_bytes("ccafé".encode("latin-1"))
    flags = [flag] if flag else []
    if flag and not flag.startswith("--config="):
        flags = ["--config=recipe.py", flag]
    before = tiny_run.snapshot(place)
    code, _, error = command(main.main, *flags)
    assert code == 2
    assert re.match(rf"error: .*{message}.*\n\Z", error), error
    assert tiny_run.snapshot(place) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_directory_without_permission(place, command):
    (place / "closed").mkdir(mode=0o500)
    code, _, error = command(main.main, "--config=recipe.py", "--workdir=closed/run")
    assert code == 2 and "closed is not a directory to write to" in error


CHANGED = """from electra_jax.config import get_config as default
def get_config(size='1'):
    config = default()
    config.{}
    return config
"""
RECIPES = {
    "def get_config(:\n": r"SyntaxError: .*line 1",
    "config = 3\n": r"AttributeError: .*get_config",
    CHANGED.format("bach_size = 3"): r"line 4: AttributeError: .*batch_size",
    CHANGED.format("batch_size = 'many'"): r"line 4: TypeError: .*batch_size",
    "def get_config():\n    open('nowhere')\n": "line 2: FileNotFoundError: .*nowhere",
}


@pytest.mark.parametrize("content, message", RECIPES.items(), ids=RECIPES.values())
def test_bad_recipe_is_named_with_its_line(content, message, place, monkeypatch):
    (place / "bad.py").write_text(content)
    with pytest.raises(UserError, match=r"\Abad\.py") as error:
        parse(monkeypatch, "--config=bad.py")
    assert re.search(message, " ".join(str(error.value).split()))


@pytest.mark.parametrize(
    "flags, layers", [(["--config=sized.py"], 1), (["--config=sized.py:7"], 7)]
)
def test_recipe_takes_an_argument(flags, layers, place, monkeypatch):
    (place / "sized.py").write_text(CHANGED.format("model.num_layers = int(size)"))
    for given in (flags, flags[0].split("=")):
        config, recipe = parse(monkeypatch, *given)
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


NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EISDIR)
ENDS = [
    (KeyboardInterrupt(), 130, "error: interrupted; run the same command again to go on\n"),
    (Stopped("stopped at step 3, saved"), 42, "stopped at step 3, saved\n"),
    *(
        (
            OSError(number, os.strerror(number), "run/a.tmp"),
            2,
            f"error: run/a.tmp: {os.strerror(number)}; once mended, the same command goes on\n",
        )
        for number in NUMBERS
    ),
]


@pytest.mark.parametrize("error, code, line", ENDS)
def test_what_ends_a_command_is_one_line(error, code, line, command):
    assert command(raising(error)) == (code, "", line)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "a"), BrokenPipeError()]
)
def test_faults_of_ours_keep_their_traceback(error):
    """A broken pipe, too, unless it is that of standard output."""
    with pytest.raises(type(error)):
        cli.run(raising(error))


@pytest.mark.parametrize("name", ["directory", "file/below", "x" * 300])
def test_a_path_that_no_file_can_have_is_one_line_and_leaves_nothing(command, tmp_path, name):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    code, _, error = command(lambda: write_text(tmp_path / name, "lost"))
    assert code == 2
    assert error.startswith(f"error: {tmp_path / name}: ") and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_output_that_nobody_reads_is_no_fault():
    """As with `| head -1`."""
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


@pytest.mark.parametrize("module", [main, prepare], ids=["main", "prepare"])
def test_help_shows_commands_and_fields(module, command):
    code, text, _ = command(module.main, "--help")
    assert code == 0
    assert f"python -m {module.__name__} --config=configs/tiny.py" in text
    fields = re.findall(r"--config\.([a-z_.]+)=", text)
    assert len(fields) > 4
    assert set(fields) <= flatten(get_config()).keys()


def test_print_config_has_every_field_as_a_flag_and_says_what_is_changed(place, command):
    before = tiny_run.snapshot(place)
    flags = ["--config=recipe.py", "--config.seed=3", "--print_config"]
    code, out, _ = command(main.main, *flags)
    assert code == 0
    lines = out.splitlines()
    (seed,) = [line for line in lines if line.startswith("--config.seed=3  # ")]
    assert seed.endswith("; default: 0")
    (objective,) = [line for line in lines if line.startswith("--config.objective='electra'  # ")]
    assert "default" not in objective
    assert len(lines) == len(flatten(get_config()))
    assert tiny_run.snapshot(place) == before


def test_prepare_makes_a_store_for_devices_that_are_elsewhere(place, command):
    flags = ["--config=recipe.py", "--config.parallel.fsdp=3", "--config.batch_size=6"]
    code, out, _ = command(prepare.main, *flags)
    assert code == 0 and "tokens per word" in out
    assert [path.name for path in (place / "data").glob("*/manifest.json")] == ["manifest.json"]


def test_prepare_refuses_a_bad_value_before_it_reads(place, command):
    code, _, error = command(prepare.main, "--config=recipe.py", "--config.data.held_out=1.5")
    assert code == 2 and error.startswith("error: config.data.held_out is 1.5")
    assert not (place / "data").exists()
