"""How a dense weight on a GPU is multiplied with few rows: by our kernel, or as with many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

MAX_CLASS = 6
"""The class of up to 64 rows, which are the most that our kernel takes."""


def rows_class(rows: int) -> int:
    """The exponent of the smallest power of 2 that is not below ``rows``, which is positive."""
    return (rows - 1).bit_length()


@dataclass(frozen=True, slots=True)
class FewRows:
    """The numbers of rows that our kernel multiplies.

    Attributes:
        dependent: by class of rows (:func:`rows_class`), for those that our kernel multiplies:
            whether it begins before the kernel before has ended.
    """

    dependent: Mapping[int, bool]

    def takes(self, rows: int) -> bool:
        """Whether our kernel multiplies so many rows."""
        return rows > 0 and rows_class(rows) in self.dependent

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], whose rows it takes, times weight [N, K], plus bias: [T, N]."""
        from tgi_cli.quantization.triton_dense import few_rows_product

        return few_rows_product(x, weight, bias, self.dependent[rows_class(len(x))])
