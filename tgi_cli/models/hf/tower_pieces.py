"""Work of image encoders in pieces of some milliseconds, between which a run can be interrupted.

A layer over a tile of 1024 patches takes 40 ms on two server cores, and a photo of thousands of
patches seconds: longer than streams of text should wait. So a caller with little time may interrupt
it between the operations of a layer, and within the longest, products and attention, which then
take a few rows at a time. Only our kernels do so, with which a row's result does not depend on the
rows beside it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers.linear import LinearBase
from tgi_cli.models.vision import PausePoints

PIECE_OPERATIONS = 1e9
"""Floating-point operations between two points: 2 to 3 ms on two server cores of 2023."""

LEAST_ROWS = 64
"""Least rows of a piece: each piece reads the weights again."""

_NAME = "pause_points"
NO_PAUSES = PausePoints()
"""Pause points of modules that are not in a tower: they never pause."""


def add_pauses(core: nn.Module, pauses: PausePoints) -> None:
    """Let the modules of a tower find its pause points, and its linear layers stop at them.

    To be called once the linear layers are ours.
    """
    for module in core.modules():
        module.__dict__[_NAME] = pauses
        if isinstance(module, LinearBase):
            module.__dict__["forward"] = _forward.__get__(module)


def pauses_of(module: nn.Module) -> PausePoints:
    """The pause points of a tower's module; those of other modules never pause."""
    found: PausePoints = getattr(module, _NAME, NO_PAUSES)
    return found


def pieces(rows: int, operations: float) -> Iterator[slice]:
    """``rows`` in pieces, where each row takes ``operations``."""
    size = max(LEAST_ROWS, int(PIECE_OPERATIONS / operations))
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))


def by_pieces(
    module: nn.Module, x: Tensor, operations: float, compute: Callable[[Tensor], Tensor]
) -> Tensor:
    """``compute`` of all rows, by pieces if the caller has little time.

    Args:
        module: module of a tower.
        x: [..., in].
        operations: operations of a row.
        compute: from [T, in] to [T, out]; a row's result depends on that row alone.
    """
    pauses = pauses_of(module)
    pauses()
    rows = x.reshape(-1, x.shape[-1])
    if pauses.check is None:
        found = compute(rows)
    else:
        parts = []
        for piece in pieces(len(rows), operations):
            parts.append(compute(rows[piece]))
            pauses()
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found.view(*x.shape[:-1], -1)


def _forward(self: Any, x: Tensor) -> Tensor:
    """The forward pass of a linear layer, in pieces."""
    whole = type(self).forward
    packed = getattr(self, "packed", None)
    if not isinstance(packed, PackedMatrix) or not x.numel():
        pauses_of(self)()
        output: Tensor = whole(self, x)
        return output
    operations = 2.0 * packed.inputs * packed.out
    return by_pieces(self, x, operations, lambda rows: whole(self, rows))
