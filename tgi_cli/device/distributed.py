"""A process's place among those that compute one model together (tensor parallelism).

After "Megatron-LM" (https://arxiv.org/abs/1909.08053): every process holds a share of each
weight matrix and all of them compute every step; their collective operations are the only
places where they meet. https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tgi_cli.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Shard:
    """Process ``rank`` of ``size``. Of one alone, every operation is free.

    Every process of the group has to call the collectives in the same order, with the same
    shapes. They raise RuntimeError where a process of the group is gone, or silent for longer
    than the group's timeout.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all processes' ``x``, in its place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, W] of each process to [N, size * W], in order of the ranks."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``, in its place."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.group)
        return x

    def smallest(self, value: int) -> int:
        """The least of all processes' values."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        if dist.get_backend(self.group) == "nccl":
            box = box.cuda()
        dist.all_reduce(box, dist.ReduceOp.MIN, group=self.group)
        return int(box)

    def share(self, count: int, units: int | None = None) -> slice:
        """This process's part of ``count`` outputs that consist of ``units`` (None: count).

        Units (attention heads) stay whole. Where there are fewer than processes, several
        processes hold the same one.

        Raises:
            UnsupportedModelError: they cannot be shared out evenly.
        """
        units = count if units is None else units
        width = count // units
        if units % self.size == 0:
            each = units // self.size
            return slice(self.rank * each * width, (self.rank + 1) * each * width)
        if units < self.size and self.size % units == 0:
            own = self.rank // (self.size // units)
            return slice(own * width, (own + 1) * width)
        raise UnsupportedModelError(
            f"{units} heads or columns cannot be shared out evenly to {self.size} shards",
            "choose --num-shard so that it divides them",
        )


ALONE = Shard()
"""The only process."""
