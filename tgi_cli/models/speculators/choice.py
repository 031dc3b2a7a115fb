"""What a head's logits become: the likeliest token and its probability."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_cli.errors import CheckpointError
from tgi_cli.layers import Loadable, WeightSlot
from tgi_cli.layers.base import empty_parameter


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the largest of float32 [N, V], int64 [N], and its probability, float32 [N]."""
    largest, index = logits.max(dim=-1)
    return index, (largest - logits.logsumexp(dim=-1)).exp()


class DraftVocabulary(Loadable):
    """Which tokens of the target a head's are.

    Checkpoints have the difference (``d2t``): the head's token i is the target's i + d2t[i].
    """

    def __init__(self, size: int, target_size: int) -> None:
        super().__init__()
        self.size = size
        self.target_size = target_size
        self.token_ids = empty_parameter(size, dtype=torch.int64)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield WeightSlot("d2t", (self.size,), self._fill, integers=True)

    def _fill(self, differences: Tensor) -> None:
        ids = torch.arange(self.size) + differences.long()
        outside = ids[(ids < 0) | (ids >= self.target_size)]
        if len(outside):
            raise CheckpointError(
                f"'d2t' names token {int(outside[0])} of a vocabulary of {self.target_size}",
                "use a head for this model, or download it again",
            )
        self.token_ids.copy_(ids)

    def forward(self, ids: Tensor) -> Tensor:
        """The head's ids, int64 [N], to the target's."""
        return self.token_ids.index_select(0, ids)
