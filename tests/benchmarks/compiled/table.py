"""The lines of the table of compiled kernels: cases are compiled, and their machine code read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import chain
from multiprocessing import get_context
from typing import Any

from triton.runtime.jit import JITFunction

from tests.benchmarks.compiled.case import Case
from tests.benchmarks.compiled.cases import all_cases
from tests.benchmarks.compiled.gpus import GPUS, cycles, programs
from tests.tools.sass import code_of
from tests.tools.triton_compiler import compile_for, compile_only

Row = tuple[str, ...]
HEADER = (
    "kernel",
    "for",
    "GPU",
    "warps",
    "registers",
    "spills",
    "spills in loop",
    "shared KiB",
    "programs",
    "loop",
    "tensor",
    "bytes",
    "operations/byte",
    "issue / memory / matrix cycles",
    "bound by",
)


def rows(capabilities: list[int], groups: list[str], match: str, jobs: int) -> Iterator[Row]:
    """Compile in ``jobs`` processes, and give the table's rows in the order of the cases."""
    calls = [
        (number, capability)
        for number, case in enumerate(all_cases())
        if (not groups or case.group in groups) and match.lower() in case.name.lower()
        for capability in capabilities
    ]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from chain.from_iterable(pool.map(_rows_of, calls))


@cache
def _compiler() -> tuple[list[Case], list[tuple[str, Any]]]:
    """Cases, and a list of what is compiled, in place of any launch in this process."""
    kernels, JITFunction.run = compile_only()
    return all_cases(), kernels


def _rows_of(call: tuple[int, int]) -> list[Row]:
    """Of a case, by its number, and a compute capability."""
    (cases, kernels), (number, capability) = _compiler(), call
    case, gpu = cases[number], GPUS[capability]
    compile_for(capability)
    works = case.work(capability)
    kernels.clear()
    case.run(capability)
    once: dict[str, tuple[str, Any]] = {k.hash: (name, k) for name, k in kernels}
    found: list[Row] = []
    for name, kernel in once.values():
        code, work = code_of(kernel), works.get(name)
        limits = ("", "", "", "")
        if work is not None:
            taken = cycles(code, work, gpu)
            limits = (
                f"{work.bytes:,}",
                f"{work.operations / work.bytes:.0f}",
                f"{taken.issue:.0f} / {taken.memory:.0f} / {taken.matrix:.0f}",
                taken.bound,
            )
        row = (
            name.strip("_"),
            case.name,
            gpu.name,
            str(code.warps),
            str(code.registers),
            str(code.spills),
            str(code.loop_spills),
            f"{code.shared / 1024:.1f}",
            str(programs(code, gpu)),
            str(code.loop_length),
            str(code.matrix_instructions),
            *limits,
        )
        found.append(row)
    return found
