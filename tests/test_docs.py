"""What README and docs say is there: files, sections, flags and commands.

Quick commands are executed as they are written, in a directory with the files that they name, save
that training is cut short. Recipes that take long or need other machines are parsed, by
`--print_config`. Targets of make are in the Makefile.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from stdlib_text import stdlib_documents

from electra_jax import cli
from electra_jax.config import get_config
from electra_jax.finetune import config as finetuning
from electra_jax.settings import flatten

pytestmark = pytest.mark.process

ROOT = Path(cli.__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
PYTHON = re.compile(r"python -m (electra_jax[\w.]*)")
RECIPES = ("electra_jax.main", "electra_jax.prepare", "electra_jax.compile")
OWN_TESTS = ("electra_jax.submit",)  # needs all tasks of GLUE
# Executed by tests/test_launch.py, or with what the tests do not have.
ELSEWHERE = ("tensorboard ", "sbatch ", "kubectl ", "python launch/local.py")
STORIES = ("README.md", "docs/running.md")  # pages whose recipes are run, where they come to an end

SHORT = {  # of a recipe in a story
    "tiny.py": "--config.num_train_steps=4 --config.optimizer.warmup_steps=2 --config.batch_size=8 "
    "--config.eval_every_steps=4 --config.log_every_steps=2 --config.data.vocab_size=400 "
    "--config.data.held_out=0.1",
    "classify.py": "--config.num_train_epochs=1.0 --config.batch_size=8",
}


@functools.cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def commands(page: Path) -> list[str]:
    """The commands in the indented blocks of a page, each on one line."""
    lines = text(page).replace("\\\n", " ").split("\n")
    blocks = (line[4:].strip().removeprefix("$ ") for line in lines if line.startswith("    "))
    starts = (*ELSEWHERE, "make ", "python ", "echo ", "TFDS_DATA_DIR=")
    return [
        re.sub(r" {3,}#.*|\s+", " ", line).strip() for line in blocks if line.startswith(starts)
    ]


ALL = [(str(page.relative_to(ROOT)), command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", text(page))
    for link in links:
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)", text(target), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_and_modules_exist(page):
    fields = flatten(get_config()) | flatten(finetuning.get_config())
    for name in re.findall(r"--config\.([a-z_0-9.]+)=", text(page)):
        assert name == "key" or name in fields, f"{page.name}: {name}"
    for name in PYTHON.findall(text(page)):
        assert importlib.util.find_spec(name), f"{page.name}: {name}"


def test_every_command_is_known():
    targets = re.findall(r"^([\w-]+):", text(ROOT / "Makefile"), re.MULTILINE)
    for page, command in ALL:
        if command.startswith("make "):
            assert command.split("#")[0].split()[1] in targets, f"{page}: {command}"
        else:
            assert command.startswith(ELSEWHERE) or PYTHON.search(command), f"{page}: {command}"
    assert len([command for _, command in ALL if PYTHON.search(command)]) > 20


def call(module: str, arguments: list[str], stdin: str = "") -> tuple[int, str]:
    """Exit code and output of a command, in this process."""
    before, out = (sys.argv, sys.stdin), io.StringIO()
    sys.argv, sys.stdin = [module, *arguments], io.TextIOWrapper(io.BytesIO(stdin.encode()))
    out.buffer = io.BytesIO()
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
            cli.run(importlib.import_module(module).main)
    finally:
        sys.argv, sys.stdin = before
    return exit.value.code or 0, out.getvalue() + out.buffer.getvalue().decode()


def split(command: str) -> tuple[str, list[str], str]:
    """Module, arguments and standard input of a command."""
    piped = re.fullmatch(r"echo (.*) \| (.*)", command)
    stdin = "".join(shlex.split(piped[1])) + "\n" if piped else ""
    words = shlex.split(piped[2] if piped else command)
    place = words.index("-m")
    return words[place + 1], words[place + 2 :], stdin


def module_of(command: str) -> str | None:
    found = PYTHON.search(command)
    return found and found[1]


@pytest.mark.parametrize("page, command", [pair for pair in ALL if module_of(pair[1]) in RECIPES])
def test_recipes_are_understood(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    module, arguments, _ = split(command)
    code, out = call(module, [*arguments, "--print_config"])
    assert (code, "--config.task=" in out) == (0, True)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where the story is told: files by the names that the pages give them."""
    path = tmp_path_factory.mktemp("docs")
    (path / "configs").symlink_to(ROOT / "configs")
    (path / "mine").mkdir()
    documents = stdlib_documents()
    (path / "mine" / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in documents))
    (path / "mine" / "new.txt").write_text("It rains.\nThe file is read.\n")
    (path / "texts.txt").write_text("It rains.\nThe file is read.\n")
    (path / "masks.txt").write_text("the [MASK] is read\n")
    rows = [(lines[0].replace('"', ""), i % 2) for i, lines in enumerate(documents[:40])]
    table = "".join(f'"{line}",{label}\n' for line, label in rows)
    for name in ("train.csv", "dev.csv"):
        (path / name).write_text(f"text,label\n{table}")
    (path / "new.csv").write_text("text\nIt rains.\n")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it"]))
    question = {"id": "1", "question": "?", "answers": [{"text": "rain", "answer_start": 0}]}
    other = {"id": "2", "question": "?", "answers": [], "is_impossible": True}
    article = {"paragraphs": [{"context": "rain", "qas": [question, other]}]}
    (path / "dev-v2.0.json").write_text(json.dumps({"data": [article]}))
    (path / "predictions.json").write_text('{"1": "rain", "2": ""}')
    (path / "null_odds.json").write_text('{"1": -1.0, "2": 1.0}')
    return path


def is_quick(page: str, command: str) -> bool:
    """Whether it is executed here."""
    module = module_of(command)
    if module in (None, *OWN_TESTS) or "--print_config" in command:
        return False
    return module not in RECIPES or (page in STORIES and any(name in command for name in SHORT))


def test_quick_commands_do_what_they_say(place, monkeypatch):
    """In the order of the pages, README first: runs/mine and runs/topics are used by others."""
    monkeypatch.chdir(place)
    quick = [(page, command) for page, command in ALL if is_quick(page, command)]
    quick.sort(key=lambda pair: pair[0] != "README.md")
    done = set()
    for page, command in quick:
        module, arguments, stdin = split(command)
        recipe = next((name for name in SHORT if name in command), None)
        extra = shlex.split(SHORT[recipe]) if recipe else []
        code, out = call(module, [*arguments, *extra], stdin)
        assert code == 0, f"{page}: {command}\n{out}"
        assert "error" not in out, f"{page}: {command}\n{out}"
        done.add(module.removeprefix("electra_jax."))
        if "workdir=runs/mine" in command and recipe:
            for name in ("tiny", "other"):  # pages other than README call it so
                (place / "runs" / name).symlink_to("mine")
    assert {"main", "predict", "report", "export", "tokenize"} <= done
    for name in ("vectors.npy", "answers.jsonl", "page.html", "comparison.html"):
        assert (place / name).stat().st_size, name
