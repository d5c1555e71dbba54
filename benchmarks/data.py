"""How fast text becomes batches, and in how much memory.

    python benchmarks/data.py                      all of it
    python benchmarks/data.py --part=prepare       a corpus to a token store, and the library alone
    python benchmarks/data.py --part=memory        a large corpus (--gigabytes) in little memory
    python benchmarks/data.py --part=loader        batches, and the step that consumes them

The text is what every machine has, the docstrings of Python and its packages, or --text=FILE, a
text file; it is repeated where more is needed.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict
from tokenizers import BertWordPieceTokenizer

from electra_jax import cli
from electra_jax.config import get_config
from electra_jax.data import layout, loader, reader, sources
from electra_jax.data.preparation import prepare
from electra_jax.data.workers import num_cores
from electra_jax.objectives import make_objective
from electra_jax.sharding.mesh import make_mesh
from electra_jax.training.optimizer import OptimizerConfig
from electra_jax.training.program import make_program

PARTS = ("prepare", "memory", "loader")
FLAGS = flags.FlagValues()
PART = flags.DEFINE_enum("part", None, PARTS, "what to measure; default: all", flag_values=FLAGS)
TEXT = flags.DEFINE_string("text", "docstrings", "source of the text", flag_values=FLAGS)
ROUNDS = flags.DEFINE_integer("rounds", 3, "timed repetitions", flag_values=FLAGS)
GIGABYTES = flags.DEFINE_float("gigabytes", 1.0, "size of the large corpus", flag_values=FLAGS)


def documents(source: str) -> Iterator[list[str]]:
    """The documents of a source, read in this process."""
    for group in reader.groups(sources.parse(source)):
        yield from (document for _, document in reader.take_apart(group, "raise").documents)


def write_corpus(directory: Path) -> Path:
    """The text as a plain file, read anew by everything that is measured."""
    path = directory / "corpus.txt"
    path.write_text("\n\n".join("\n".join(document) for document in documents(TEXT.value)))
    return path


def recipe(directory: Path, corpus: Path, vocab: Path | None = None) -> ConfigDict:
    """ELECTRA-Small on a corpus; with a new directory for stores each time."""
    config = get_config()
    config.data.source = str(corpus)
    config.data.dir = tempfile.mkdtemp(dir=directory)
    config.data.vocab = str(vocab or "")
    return config


def measure_prepare(directory: Path, corpus: Path) -> None:
    """All of `prepare` with a given vocabulary, against the library's encoding in memory."""
    config = recipe(directory, corpus)
    vocab = prepare(config.data, lambda _: None).directory / "tokenizer" / "vocab.txt"
    # Fast: without offsets. The Python class around it only has the slower method.
    encode = BertWordPieceTokenizer(str(vocab))._tokenizer.encode_batch_fast
    lines = [line for lines in documents(str(corpus)) for line in lines]

    def ours() -> None:
        prepare(recipe(directory, corpus, vocab).data, lambda _: None)

    def library() -> None:
        for start in range(0, len(lines), 10_000):
            encode(lines[start : start + 10_000])

    seconds = {"prepare": [], "tokenizers": []}
    for _ in range(ROUNDS.value):  # alternating, so that what else the machine does hits both
        for name, work in {"prepare": ours, "tokenizers": library}.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    megabytes = corpus.stat().st_size / 1e6
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{megabytes:.1f} MB of text, {num_cores()} cores, a given vocabulary")
    for name, times in seconds.items():
        spread = f"{min(times):.1f} to {max(times):.1f} s"
        print(f"{name:12} {megabytes / medians[name]:8.2f} MB/s  ({spread})")
    print(f"{'ratio':12} {medians['prepare'] / medians['tokenizers']:8.2f}")


MEMORY_PROGRAM = """
import resource, sys
from types import SimpleNamespace
from electra_jax.prepare import prepare

if __name__ == "__main__":
    source, directory = sys.argv[1:]
    prepare(SimpleNamespace(
        source=source, dir=directory, on_error="raise", vocab="", tokenizer="wordpiece",
        vocab_size=30522, special_tokens=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        lower_case=True, strip_accents=True, max_word_chars=200, held_out=0.005,
    ))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print("KiB", own, worker)
"""


def measure_memory(directory: Path, corpus: Path) -> None:
    """Vocabulary and store of a large corpus; the largest memory of all processes together."""
    size = int(GIGABYTES.value * 1e9)
    large, program = directory / "large.txt", directory / "program.py"
    text = corpus.read_bytes() + b"\n\n"
    with open(large, "wb") as file:
        for _ in range(-(size // -len(text))):
            file.write(text)
    program.write_text(MEMORY_PROGRAM)
    command = [sys.executable, program, large, directory / "large"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("KiB"):
            own, worker = (int(number) / 2**20 for number in line.split()[1:])
        else:
            print(f"  {line.rstrip()}", flush=True)
    if process.wait():
        raise RuntimeError("the measured program failed")
    total = own + num_cores() * worker
    print(f"{large.stat().st_size / 1e9:.2f} GB of text, vocabulary trained, {num_cores()} cores")
    print(f"memory {total:.2f} GiB at most ({own:.2f}, and {worker:.2f} for each worker)")


def measure_loader(directory: Path, corpus: Path) -> None:
    """Tokens a second of the loader alone, and of ELECTRA-Small's training step."""
    config = recipe(directory, corpus)
    config.model.remat, config.model.scan_unroll = "none", config.model.num_layers
    store = prepare(config.data, lambda _: None)
    rows = layout.rows(store, "train", config.data.sequence_length, config.data.layout)
    tokens = config.batch_size * config.data.sequence_length

    def batches(number: int):
        return loader.train_batches(rows, 0, number, batch_size=config.batch_size, seed=0)

    number = 500
    started = time.perf_counter()
    for _ in batches(number):
        pass
    loaded = number * tokens / (time.perf_counter() - started)

    objective = make_objective(config, store.tokenizer)
    optimizer = OptimizerConfig(num_steps=config.num_train_steps, **config.optimizer)
    mesh = make_mesh(config.parallel)
    program = make_program(mesh, objective, optimizer, config.seed)
    state = program.init()
    seconds = []
    for batch in batches(ROUNDS.value + 1):
        started = time.perf_counter()
        state, _ = program.train_step(state, program.place(batch))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - started)
    consumed = tokens / statistics.median(seconds[1:])
    print(f"ELECTRA-Small, {config.batch_size} rows of {config.data.sequence_length} tokens")
    print(f"{'loader':12} {loaded:12,.0f} tokens/s")
    print(f"{'step':12} {consumed:12,.0f} tokens/s")
    print(f"{'ratio':12} {loaded / consumed:12,.0f}")


def main() -> None:
    """Measure, print."""
    cli.parse(FLAGS, __doc__)
    measures = {"prepare": measure_prepare, "memory": measure_memory, "loader": measure_loader}
    with tempfile.TemporaryDirectory() as name:
        corpus = write_corpus(Path(name))
        for part in [PART.value] if PART.value else PARTS:
            measures[part](Path(name), corpus)


if __name__ == "__main__":
    cli.run(main)
