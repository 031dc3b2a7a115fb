"""The interface by which host arrays reach the device; the worker implements it."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor


class Upload(Protocol):
    """Brings arrays to the device in one transfer, without waiting for it."""

    def __call__(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Device tensors of the same shapes and dtypes, in order."""
        ...
