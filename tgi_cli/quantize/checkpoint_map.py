"""Which part of a model's parameter each tensor of the checkpoint becomes.

A mixture of experts has one parameter for all experts; the checkpoint has a tensor for each of
their layers. transformers' rules put them together; a rehearsal with tiny tensors shows how.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tgi_cli.models.checkpoint import StoredTensor
from tgi_cli.models.weight_map import Source

Place = tuple[int | slice, ...]
"""An index into a parameter."""

_ROWS, _COLUMNS = 2, 3
"""Of the tensors of a rehearsal: unlike, so that a transposed one shows."""


def locate(
    source: Source, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]
) -> list[tuple[str, Place]] | None:
    """The stored tensors with their places in a parameter of that shape.

    None: they do not stand in it side by side, each as it is stored.
    """
    if source.join is None and source.rows is None and not source.transposed:
        return [(source.names[0], ())]
    sizes = [stored[name].shape for name in source.names]
    if any(len(size) != 2 for size in sizes):
        return None
    step = _ROWS * _COLUMNS
    tiny = [
        torch.arange(index * step, (index + 1) * step).view(_ROWS, _COLUMNS)
        for index in range(len(sizes))
    ]
    try:
        made = source.view(*tiny)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError):  # rules for real sizes
        return None
    if made.ndim not in (2, 3) or made.shape[-1] != _COLUMNS or made.numel() != step * len(sizes):
        return None
    experts = made if made.ndim == 3 else made[None]
    found: list[tuple[str, Place]] = []
    for number, expert in enumerate(experts):
        start = 0
        for part in expert.split(_ROWS):
            index = int(part[0, 0]) // step
            if not torch.equal(part, tiny[index]):
                return None
            end = start + sizes[index][0]
            rows = slice(start, end)
            found.append((source.names[index], (number, rows) if made.ndim == 3 else (rows,)))
            start = end
        if start != shape[-2]:
            return None
    if any(size[1] != shape[-1] for size in sizes) or (made.ndim == 3 and len(made) != shape[0]):
        return None
    return found
