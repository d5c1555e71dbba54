"""What a compiled program sends between devices, read from its HLO text."""

import math
import re
from collections import defaultdict

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

BEGINNING = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)")
SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.-]+)")


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Collectives by kind, with `count` and `bytes` of one device in one run of a program.

    What stands in a loop counts once for every turn: the turns are read from the condition of the
    loop, a counter from 0 that is compared with a constant. A collective that the compiler has
    taken apart, to go on beside other work, is one: its parts have one `chain_id`.
    Bytes are those of what goes in; of an all-gather, of what comes out.
    """
    sizes, constants, caller, found = {}, defaultdict(list), {}, {}
    computation = ""
    for line in re.sub(r"/\*.*?\*/|\{[^{}=]*\}(?= |,|\))", "", hlo).splitlines():
        if match := BEGINNING.match(line):
            computation = match[1]
        elif match := INSTRUCTION.match(line):
            name, shape, operation, operands, attributes = match.groups()
            sizes[name] = bytes_of(shape)
            if operation == "constant" and operands.isdecimal():
                constants[computation].append(int(operands))
            called = CALLED.findall(attributes)
            turns_of = called[0] if operation == "while" else None
            for callee in called:
                caller[callee] = computation, turns_of
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                given = sum(sizes[x.split("%")[-1]] for x in operands.split(", "))
                if kind == "all-gather":  # one that is only begun repeats its operands
                    given = sizes[name] - given * operation.endswith("-start")
                chain = re.search(r'chain_id="\d+"', attributes)
                found.setdefault(chain[0] if chain else name, (kind, given, computation))

    def times(computation: str) -> int:
        if computation not in caller:
            return 1
        outer, condition = caller[computation]
        turns = constants[condition][0] if condition and constants[condition] else 1
        return turns * times(outer)

    totals: dict[str, dict[str, int]] = {}
    for kind, size, computation in found.values():
        entry = totals.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += times(computation)
        entry["bytes"] += times(computation) * size
    return dict(sorted(totals.items()))


def bytes_of(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, written as in HLO: `bf16[2,3]`."""
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * max(8, int(bits or 8)) // 8
        for _, bits, sizes in SHAPE.findall(shape)
    )
