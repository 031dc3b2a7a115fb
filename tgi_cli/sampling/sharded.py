"""The likeliest tokens of a vocabulary that is divided among shards, without gathering logits.

Each shard finds the likeliest of its own tokens, and all of them exchange three numbers for each
row: that token, its logit and the sum of its shard's exponentials. After "Megatron-LM"
(https://arxiv.org/abs/1909.08053), which computes its loss from such numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tgi_cli.device.distributed import Shard
from tgi_cli.kernels.sample import Tokens
from tgi_cli.sampling.sampler import Sampled, summarize


class ShardedGreedy:
    """Chooses for each row the token that :func:`~tgi_cli.sampling.sampler.greedy` would choose.

    All shards choose the same tokens: they compute them from the same numbers. Log-probabilities
    may differ from those of whole rows in their last bits, since sums are in another order. What is
    launched depends on the shape alone, and nothing comes from the host: a CUDA graph can hold it.

    Args:
        shard: of several, whose parts of the vocabulary follow each other and are not empty.
        first: the first token of this shard's part.
        find: the likeliest token of each row and its normalizer.
    """

    def __init__(
        self, shard: Shard, first: int, find: Callable[[Tensor], Tokens] = summarize
    ) -> None:
        self._shard = shard
        self._first = first
        self._find = find

    def __call__(self, logits: Tensor) -> Sampled:
        """Choose from float32 [N, W], the logits of this shard's part of the vocabulary."""
        own = self._find(logits)
        ids = (own.token_ids + self._first).int()
        numbers = (ids, own.peaks.view(torch.int32), own.log_sums.view(torch.int32))
        gathered = self._shard.all_gather(torch.stack(numbers, dim=1)).view(len(ids), -1, 3)
        ids, peaks, log_sums = gathered.unbind(2)  # [N, shards] each
        peaks, log_sums = peaks.view(torch.float32), log_sums.view(torch.float32)
        winner = peaks.argmax(dim=1, keepdim=True)  # of equal ones the first: the lowest ids
        peak = peaks.gather(1, winner)
        logprobs = (peaks - peak + log_sums).exp_().sum(dim=1).log_().neg_()
        return Sampled(ids.gather(1, winner).squeeze(1).long(), logprobs, None)
