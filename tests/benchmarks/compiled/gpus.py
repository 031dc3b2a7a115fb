"""What GPUs can do, by their data sheets, and what that makes of a kernel's inner loop."""

from __future__ import annotations

from dataclasses import dataclass

from tests.tools.sass import Code


@dataclass(frozen=True)
class GPU:
    """A part. Rates are per second: bytes of memory, dense operations in bfloat16."""

    name: str
    capability: int
    processors: int
    clock: float
    bandwidth: float
    operations: float
    shared: int
    """Bytes of shared memory of a processor."""


GPUS = {
    gpu.capability: gpu
    for gpu in (
        # https://www.nvidia.com/en-us/data-center/a100/
        GPU("A100 SXM", 80, 108, 1.41e9, 2.04e12, 312e12, 164 << 10),
        # https://www.nvidia.com/en-us/data-center/h100/
        GPU("H100 SXM", 90, 132, 1.83e9, 3.35e12, 989e12, 228 << 10),
        # https://www.nvidia.com/en-us/data-center/hgx/
        GPU("B200", 100, 148, 1.85e9, 8.0e12, 2250e12, 228 << 10),
    )
}
SCHEDULERS = 4
"""Of a processor; each issues an instruction of a warp per cycle."""


@dataclass(frozen=True)
class Work:
    """What one turn of a program's inner loop does."""

    bytes: int
    operations: int


@dataclass(frozen=True)
class Cycles:
    """Cycles of a processor per turn of a program's inner loop, by what takes them."""

    issue: float
    memory: float
    matrix: float

    @property
    def bound(self) -> str:
        """What takes most."""
        return max(("issue", "memory", "matrix"), key=lambda name: getattr(self, name))


def programs(code: Code, gpu: GPU) -> int:
    """How many programs a processor holds at once: by registers, shared memory and warps."""
    registers = -(-code.registers // 8) * 8 * 32 * code.warps
    return max(
        0,
        min(
            (1 << 16) // max(registers, 1),
            gpu.shared // (code.shared + 1024),
            64 // code.warps,
            32,
        ),
    )


def cycles(code: Code, work: Work, gpu: GPU) -> Cycles:
    """Limits of one processor: none of them overlaps with itself."""
    share = gpu.processors * gpu.clock
    return Cycles(
        code.loop_length * code.warps / SCHEDULERS,
        work.bytes / (gpu.bandwidth / share),
        work.operations / (gpu.operations / share),
    )
