"""Sums over the shards of a machine by one kernel, in which each reads what all have to add.

torch's one-shot all-reduce over symmetric memory
(https://docs.pytorch.org/docs/stable/symmetric_memory.html): a GPU copies its summand to where the
others can read it, waits until they have done the same, and adds up all of them. NCCL exchanges
parts in rounds, which takes longer for a few kilobytes and less for megabytes, as each GPU reads
every summand here. Not measured on a GPU.

The kernel waits for the other shards without a time limit: if one of them is gone, only the end of
the process ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DTYPES = (torch.bfloat16, torch.float32)
"""dtypes that torch's kernel adds up."""

_ALIGNMENT = 16
"""Bytes that a summand begins and ends at: the kernel's loads are as wide."""


class OneShotSums:
    """One shard's part of the sums. All shards compute the same ones, in the same order.

    Args:
        group: the shards, registered with torch under its name.
        buffer: symmetric memory for the largest summand, in its dtype, contiguous.

    Attributes:
        sizes: classes of sizes (:func:`size_class`) that are summed up like this.
    """

    def __init__(self, group: ProcessGroup, buffer: Tensor) -> None:
        self._group = group
        """torch's registry does not keep it alive."""
        self._name = group.group_name
        self._buffer = buffer
        self.sizes: frozenset[int] = frozenset()

    @classmethod
    def allocate(
        cls, group: ProcessGroup, nbytes: int, dtype: torch.dtype, device: torch.device
    ) -> OneShotSums:
        """Take symmetric memory for summands of at most ``nbytes``. Call :meth:`connect` next.

        Raises:
            Exception: this build of torch or the device has none.
        """
        from torch.distributed import _symmetric_memory

        count = nbytes // dtype.itemsize
        return cls(group, _symmetric_memory.empty(count, dtype=dtype, device=device))

    def connect(self) -> None:
        """Exchange addresses with the other shards, which call it too.

        Raises:
            Exception: their memory cannot be read.
        """
        from torch.distributed import _symmetric_memory

        _symmetric_memory.rendezvous(self._buffer, self._name)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of all shards' ``x``, for which :meth:`fits`."""
        summand = self._buffer[: x.numel()].view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(summand, x, "sum", self._name)
        return total

    def fits(self, x: Tensor) -> bool:
        """Whether the kernel takes it."""
        return (
            x.dtype == self._buffer.dtype
            and 0 < x.nbytes <= self._buffer.nbytes
            and not (x.nbytes | x.data_ptr()) % _ALIGNMENT
            and x.is_contiguous()
        )

    def chosen(self, x: Tensor) -> bool:
        """Whether it is to be summed up like this."""
        return size_class(x.nbytes) in self.sizes and self.fits(x)


def size_class(nbytes: int) -> int:
    """The exponent of the smallest power of 2 that is not below ``nbytes``, which is positive."""
    return (nbytes - 1).bit_length()
