"""What a compiled kernel takes and executes, read from its machine code by CUDA's binary tools.

https://docs.nvidia.com/cuda/cuda-binary-utilities/; Triton's wheel has them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = ("HMMA", "HGMMA", "IMMA", "QMMA", "QGMMA", "OMMA", "UTCHMMA", "UTCQMMA", "DMMA")
"""Instructions of tensor cores."""
GLOBAL = ("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UTMALDG")
"""Instructions that read or write global memory."""
FETCH, WAIT, SIGNAL = "CCTL", "ACQBULK", "PREEXIT"
"""Those that fetch a line into the second-level cache, wait for the kernel before, and let the next
one begin."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Code:
    """A kernel for one architecture.

    Attributes:
        warps: of a program.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        stack: bytes of a thread's stack, where registers are spilled to.
        spills: instructions that write or read it.
        loop: instructions of the innermost loop that computes most, by opcode; empty without one.
    """

    warps: int
    registers: int
    shared: int
    stack: int
    spills: int
    loop: Counter[str]

    @property
    def loop_length(self) -> int:
        return self.loop.total()

    @property
    def loop_spills(self) -> int:
        """Those of the spilling instructions that are in the loop."""
        return self.loop["STL"] + self.loop["LDL"]

    @property
    def matrix_instructions(self) -> int:
        return sum(self.loop[name] for name in MATRIX)


def registers_and_stack(kernel: Any) -> tuple[int, int]:
    """Of a thread: registers, and bytes of its stack, 0 if no register is spilled.

    In a tenth of the time that :func:`code_of` takes.
    """
    with _cubin_of(kernel) as path:
        return _registers_and_stack(path)


def code_of(kernel: Any) -> Code:
    """Read a compiled kernel of Triton's."""
    with _cubin_of(kernel) as path:
        registers, stack = _registers_and_stack(path)
        listing = _tool("nvdisasm", "-c", path)
    opcodes = Counter(opcode for opcode, _ in _instructions(listing.splitlines()))
    return Code(
        kernel.metadata.num_warps,
        registers,
        kernel.metadata.shared,
        stack,
        opcodes["STL"] + opcodes["LDL"],
        innermost_loop(listing),
    )


def opcodes_of(kernel: Any) -> list[str]:
    """The opcodes of a compiled kernel of Triton's, in the order of their addresses."""
    with _cubin_of(kernel) as path:
        listing = _tool("nvdisasm", "-c", path)
    return [opcode for opcode, _ in _instructions(listing.splitlines())]


def opcodes_before(kernel: Any, opcode: str) -> list[str]:
    """The opcodes before the first instruction of this kind, which every thread comes to.

    Raises:
        AssertionError: there is none, or a branch or an exit before it leads around it.
    """
    with _cubin_of(kernel) as path:
        lines = _tool("nvdisasm", "-c", path).splitlines()
    found = [
        i for i, line in enumerate(lines) for name, _ in _instructions([line]) if name == opcode
    ]
    assert found, f"there is no {opcode}"
    before = lines[: found[0]]
    labels = {label[1] for line in before if (label := _LABEL.match(line))}
    for name, line in _instructions(before):
        target = _TARGET.search(line)
        assert name != "EXIT", line
        assert target is None or target[1] in labels, line
    return [name for name, _ in _instructions(before)]


@contextmanager
def _cubin_of(kernel: Any) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        yield file.name


def _registers_and_stack(path: str) -> tuple[int, int]:
    usage = _tool("cuobjdump", "-res-usage", path)
    found = _USAGE.search(usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


def innermost_loop(listing: str) -> Counter[str]:
    """The opcodes of the loop without others in it that has the most tensor core instructions.

    Among equals, the longest. A loop is what lies between a label and a branch back to it.
    """
    lines = listing.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    loops = []
    for end, line in enumerate(lines):
        target = _TARGET.search(line)
        begin = None if target is None or "BRA" not in line else labels.get(target[1])
        # The last instruction of all is a branch to itself.
        if begin is not None and begin < end - 1:
            loops.append((begin, end))
    innermost = [
        (begin, end)
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]
    bodies = [
        Counter(opcode for opcode, _ in _instructions(lines[begin : end + 1]))
        for begin, end in innermost
    ]
    return max(
        bodies,
        key=lambda body: (sum(body[name] for name in MATRIX), body.total()),
        default=Counter(),
    )


def _instructions(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Opcodes without modifiers, and the lines."""
    for line in lines:
        found = _INSTRUCTION.match(line)
        if found is not None and found[1] != "NOP":
            yield found[1], line


def _tool(name: str, *arguments: str) -> str:
    path = TOOLS / name
    command = [str(path) if path.exists() else name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
