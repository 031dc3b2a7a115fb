"""What a line of the table is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.benchmarks.compiled.gpus import Work


@dataclass(frozen=True)
class Case:
    """A call, and what a turn of the inner loop of its kernels does, where that is known.

    Attributes:
        group: for the option ``--only``.
        name: of the model or the shapes.
        run: calls what launches kernels, for a compute capability.
        work: by the kernel's name.
    """

    group: str
    name: str
    run: Callable[[int], object]
    work: Callable[[int], dict[str, Work]] = field(default=lambda capability: {})
