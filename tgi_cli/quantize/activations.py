"""Hidden states of all calibration samples, on disk: they outgrow memory, and survive Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


def _bytes(flat: Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    array: Any = flat.numpy()
    return memoryview(array)


class Activations:
    """Tensors [samples, tokens, width] in a file, read and written a few samples at a time.

    Args:
        path: of the file; made where it is not there.
        samples, tokens, width: the shape.
        dtype: of the elements.
    """

    def __init__(
        self, path: Path, samples: int, tokens: int, width: int, dtype: torch.dtype
    ) -> None:
        self.path = path
        self.samples = samples
        self._sample = (tokens, width)
        self._bytes = tokens * width * dtype.itemsize
        self._dtype = dtype
        self._file = path.open("r+b" if path.exists() else "w+b")

    def write(self, start: int, rows: Tensor) -> None:
        """Samples from ``start`` on, from any device."""
        self._file.seek(start * self._bytes)
        flat = rows.detach().to("cpu", self._dtype).contiguous().view(-1).view(torch.uint8)
        self._file.write(_bytes(flat))

    def read(self, start: int, stop: int) -> Tensor:
        """Samples up to, not including, ``stop``; on the CPU."""
        flat = torch.empty((stop - start) * self._bytes, dtype=torch.uint8)
        self._file.seek(start * self._bytes)
        if self._file.readinto(_bytes(flat)) != len(flat):
            raise OSError(f"{self.path} is shorter than it was written")
        return flat.view(self._dtype).view(stop - start, *self._sample)

    def flush(self) -> None:
        self._file.flush()

    def remove(self) -> None:
        """Close and delete the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Activations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
