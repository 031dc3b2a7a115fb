"""Hessian of a linear layer's squared error, from its inputs."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

_BLOCK = 1024
"""Inputs per block of the matrix, of which only the upper triangle is computed."""

_ROWS = 2048
"""Outputs whose error is computed at a time."""


class Hessian:
    """2/n XᵀX of inputs X [n, K], accumulated; layers with the same inputs share one.

    Needs 4 K² bytes (8 K² in float64).

    Attributes:
        size: K.
        count: n, number of inputs so far.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.size = size
        self.count = 0
        self._sums = torch.zeros(size, size, dtype=dtype, device=device)

    @property
    def _blocks(self) -> list[slice]:
        return [slice(start, start + _BLOCK) for start in range(0, self.size, _BLOCK)]

    def add(self, x: Tensor) -> None:
        """Add inputs [..., K] of any floating dtype, on this Hessian's device."""
        x = x.reshape(-1, self.size).to(self._sums.dtype)
        self.count += len(x)
        for block in self._blocks:
            # The matrix is symmetric: half of the work is enough.
            self._sums[block, block.start :].addmm_(x[:, block].T, x[:, block.start :])

    def matrix(self) -> Tensor:
        """[K, K], symmetric; a new tensor. 0 without inputs."""
        whole = self._sums * (2 / max(1, self.count))
        for block in self._blocks:
            whole[block.stop :, block] = whole[block, block.stop :].T
        return whole

    def loss(self, weight: Tensor, other: Tensor) -> float:
        """Mean square of ``x @ (weight - other).T`` over that of ``x @ weight.T``, both [N, K].

        NaN without inputs, or if the outputs are all 0.
        """
        error = energy = 0.0
        for start in range(0, len(weight), _ROWS):
            rows = weight[start : start + _ROWS].to(self._sums.dtype)
            energy += self._energy(rows)
            error += self._energy(rows - other[start : start + _ROWS].to(self._sums.dtype))
        return error / energy if self.count and energy > 0 else nan

    def _energy(self, rows: Tensor) -> float:
        """Sum of (x @ rows.T)² over all inputs."""
        total = 0.0
        for block in self._blocks:
            product = rows[:, block] @ self._sums[block, block.start :]
            product[:, block.stop - block.start :] *= 2  # for the lower triangle
            total += float(product.mul_(rows[:, block.start :]).sum(dtype=torch.float64))
        return total
