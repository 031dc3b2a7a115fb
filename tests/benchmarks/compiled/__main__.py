"""Compile every Triton kernel for GPUs that are not present, and print what their code takes.

    python -m tests.benchmarks.compiled [--for 80 90 100] [--only attention ops] [--match LLAMA]
        [--summary | --widest] [--jobs N]

Needs Triton, whose wheel has the assembler, and tens of minutes of CPU time, which a process per
core shares, or N processes. Nothing is run: the figures are of the machine code. With
TRITON_CACHE_DIR, a later call finds what is compiled. One line per kernel and GPU:

registers   of a thread, and instructions that spill them to memory: all, and in the inner loop
shared      KiB of shared memory of a program
programs    that a processor holds at once
loop        instructions of a warp in the inner loop, and those of tensor cores among them
bytes       read in one turn of it, by a program; operations per byte of these, where an H100 needs
            295 to compute as fast as it reads
cycles      of a processor that this turn takes at least, if there were nothing else: to issue the
            instructions / to read from memory / to multiply, and which of them is the longest

Keys that several tiles of queries read come from the second-level cache: where they do, as in
prefills, "memory" is no limit.

With ``--summary``, a line per kernel and model, with a cell for each GPU; kernels without tensor
cores are in a line each, of the case that takes most registers. With ``--widest``, every kernel is.
A cell has registers, spills (those in the loop), shared KiB, programs, loop, and for loops on
tensor cores operations per byte and cycles.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import chain

from tests.benchmarks.compiled.table import HEADER, Row, rows


def summary(table: Iterable[Row], widest: bool) -> Iterator[Row]:
    """One row per kernel and model with a cell per GPU, and before them the header.

    Args:
        table: rows.
        widest: whether there is one row per kernel, of the case that takes most registers.
    """
    cells: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    gpus = dict[str, None]()
    for row in table:
        of = dict(zip(HEADER, row, strict=True))
        key, variant = (of["kernel"], of["for"]), 1
        while of["GPU"] in cells.get(key, ()):
            variant += 1
            key = (f"{of['kernel']}, variant {variant}", of["for"])
        gpus[of["GPU"]] = None
        cells.setdefault(key, {})[of["GPU"]] = of
    yield ("kernel", "for", *gpus)
    most: dict[str, tuple[int, tuple[str, str]]] = {}
    for key, found in cells.items():
        if not widest and any(int(of["tensor"]) for of in found.values()):
            continue
        kernel = key[0].partition(",")[0]
        taken = max(int(of["registers"]) + 1000 * int(of["spills"]) for of in found.values())
        most[kernel] = max(most.get(kernel, (0, key)), (taken, key))
    others = {key for _, key in most.values()}
    for key, found in cells.items():
        tensor = any(int(of["tensor"]) for of in found.values())
        if key in others or (tensor and not widest):
            yield (*key, *(_cell(found[gpu]) if gpu in found else "" for gpu in gpus))


def _cell(of: dict[str, str]) -> str:
    spills = of["spills"]
    if int(spills):
        spills += f" ({of['spills in loop']})"
    parts = [of["registers"], spills, of["shared KiB"], of["programs"], of["loop"]]
    limits = of["issue / memory / matrix cycles"].replace(" ", "")
    ratio = of["operations/byte"]
    return " · ".join([*parts, *([ratio, limits] if limits else [])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--for",
        dest="capabilities",
        type=int,
        nargs="+",
        default=[80, 90, 100],
        metavar="CAPABILITY",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP")
    parser.add_argument(
        "--match", default="", metavar="NAME", help="only cases with it in their name"
    )
    parser.add_argument("--summary", action="store_true", help="a line per kernel and model")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes that compile"
    )
    parser.add_argument("--widest", action="store_true", help="a line per kernel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        table = rows(arguments.capabilities, arguments.only, arguments.match, arguments.jobs)
        lines: Iterator[Row] = chain([HEADER], table)
        if arguments.summary or arguments.widest:
            lines = summary(table, arguments.widest)
        print(f"Triton {version('triton')}\n")
        for number, row in enumerate(lines):
            print("| " + " | ".join(row) + " |", flush=True)
            if not number:
                print("|" + " --- |" * len(row))


if __name__ == "__main__":
    main()
