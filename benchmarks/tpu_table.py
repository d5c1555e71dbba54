"""Do the recipes fit TPUs? Compiles the rows of the table in docs/scale.md and prints it.

    python benchmarks/tpu_table.py

Needs libtpu but no TPU; a row takes a minute or more on two cores.
"""

import importlib.metadata
import json
import subprocess
import sys

from electra_jax.compile import DOES_NOT_FIT, GIB

ROWS = (  # recipe, topology, what differs from the recipe
    ("small", "v5e:1x1", ""),
    ("base", "v5e:4x4", ""),
    ("large", "v5e:8x8", "num_microbatches=4"),
    ("large", "v5e:16x16", ""),
    ("large", "v5e:16x16", "parallel.shard_optimizer=true"),
    ("large", "v5e:16x16", "parallel.fsdp=8"),
    ("large", "v4:4x4x8", ""),
    ("large", "v5p:4x4x4", ""),
    ("large", "v6e:8x8", ""),
)
HEADER = (
    "recipe",
    "topology",
    "chips",
    "fields",
    "arguments, GiB",
    "temporaries, GiB",
    "in all, GiB",
    "fits",
    "collectives of a step",
    "bound, ms",
    "compiled in",
)


def cells(recipe: str, topology: str, fields: str) -> list[str]:
    """A row of the table."""
    command = [sys.executable, "-m", "electra_jax.compile", "--json"]
    command += [f"--config=configs/{recipe}.py", f"--topology={topology}"]
    command += [f"--config.{field}" for field in fields.split()]
    done = subprocess.run(command, stdout=subprocess.PIPE)
    if done.returncode not in (0, DOES_NOT_FIT):
        sys.exit(done.returncode)  # it has said why
    facts = json.loads(done.stdout)
    sizes = facts.get("bytes", {})
    collectives = [
        f"{entry['count']} {kind} ({entry['bytes'] / 1e6:,.1f} MB)"
        for kind, entry in facts.get("collectives", {}).items()
    ]
    in_all = f"{facts['bytes_needed'] / GIB:.2f} of {facts['bytes_available'] / GIB:.2f}"
    return [
        recipe,
        topology,
        str(facts["chips"]),
        fields.replace(" ", ", ") or "-",
        *(f"{sizes[kind] / GIB:.2f}" if sizes else "-" for kind in ("arguments", "temporaries")),
        in_all,
        "yes" if facts["fits"] else "no",
        ", ".join(collectives) or "-",
        f"{facts['seconds_bound'] * 1e3:.1f}" if "seconds_bound" in facts else "-",
        f"{facts['compile_seconds']:.0f} s",
    ]


def main() -> None:
    """Print the table, a row as soon as it is compiled."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu")]
    print(", ".join(versions), end="\n\n")
    for row in (HEADER, ["---"] * len(HEADER)):
        print("|", " | ".join(row), "|")
    for row in ROWS:
        print("|", " | ".join(cells(*row)), "|", flush=True)


if __name__ == "__main__":
    main()
