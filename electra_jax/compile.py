"""Compile the training step of a recipe for TPUs that are not there: does it fit, what is sent?

    python -m electra_jax.compile --config=configs/large.py --topology=v5e:16x16
    python -m electra_jax.compile --config=configs/large.py --topology=v4:4x4x8 \\
        --config.parallel.fsdp=8 --config.model.remat=full

No TPU, no data and no token store are needed, only libtpu: pip install 'jax[tpu]'. What is compiled
is the very program that `electra_jax.main` runs there. Often used are

    --topology=v5p:4x4x4              chips: v3:XxY, v4:XxYxZ, v5e:XxY, v5p:XxYxZ, v6e:XxY
    --num_slices=2                    so many of them, joined by a slower network
    --json                            print one JSON object
    --config.FIELD=VALUE              as in training

Exit codes: 0 it fits; 2 a mistake in the configuration or the flags; 3 it does not fit.
"""

import json
import sys

from absl import flags

from electra_jax import cli
from electra_jax.jobs.compilation import examine
from electra_jax.training.ahead_of_time import GIB

DOES_NOT_FIT = 3


def main() -> None:
    """Compile the recipe, print what comes out, and exit."""
    values = cli.recipe_flags()
    flags.DEFINE_string("topology", None, "chips, such as v5e:16x16", flag_values=values)
    flags.DEFINE_integer("num_slices", 1, "such slices", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("json", False, "print one JSON object", flag_values=values)
    config, _ = cli.parse_with_recipe(values, __doc__)
    facts = examine(config, values.topology, values.num_slices)
    print(json.dumps(facts, indent=1) if values.json else describe(facts))
    sys.exit(0 if facts["fits"] else DOES_NOT_FIT)


def describe(facts: dict) -> str:
    """The lines that a person reads."""
    gib = lambda size: f"{size / GIB:,.2f} GiB"  # noqa: E731
    free = facts["bytes_available"] - facts["bytes_needed"]
    kinds = "".join(f"\n  {kind}: {gib(size)}" for kind, size in facts.get("bytes", {}).items())
    lines = [
        f"{facts['topology']} x {facts['num_slices']}: {facts['chips']} chips, "
        f"{facts['devices']} devices",
        "mesh: " + ", ".join(f"{axis} {size}" for axis, size in facts["mesh"].items()),
        f"parameters: {facts['parameters']:,}",
        f"a device needs {gib(facts['bytes_needed'])} of {gib(facts['bytes_available'])}{kinds}",
        f"fits, {gib(free)} free" if facts["fits"] else f"does not fit, {gib(-free)} too much",
        f"matrix products: {facts['flops_per_device'] / 1e12:,.3f} TFLOP a device and step",
    ]
    if "collectives" in facts:
        lines += [
            f"{kind}: {entry['count']} a step, {entry['bytes'] / 1e6:,.2f} MB"
            for kind, entry in facts["collectives"].items()
        ] or ["no collectives"]
        lines.append(
            f"bound, not a prediction: a step takes at least {facts['seconds_bound'] * 1e3:,.3f} "
            f"ms, MFU is at most {facts['mfu_bound']:.0%}"
        )
    lines.append(f"compiled in {facts['compile_seconds']:.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
