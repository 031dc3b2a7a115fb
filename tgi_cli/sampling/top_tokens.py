"""The likeliest tokens, the same ones in the same order whatever shares the batch.

``torch.topk`` leaves the order of equal values open, and which of them it finds where not all have
a place: that depends on the number of rows. Logits of 16 bits are often equal.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LOW = (1 << 32) - 1


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids of the highest logits, highest first; of equal ones the lowest ids, in their order.

    On a CPU 0.05 ms a row more than ``torch.topk``, which takes 0.1 to 0.3 ms.

    Args:
        logits: float32 [N, V].
        count: K, V at most; prompts ask for 0.

    Returns:
        int64 [N, K].
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    if logits.device.type != "cpu":  # there a look at the values would wait for the device
        return _by_keys(logits, count)
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=-1)
    last = values[:, count - 1]
    for row in (last == values[:, -1]).nonzero().squeeze(1).tolist():
        _take_lowest(logits[row], ids[row, :count], values[row, :count] == last[row])
    by_id = ids[:, :count].sort(dim=-1).values
    ranks = logits.gather(1, by_id).argsort(dim=-1, descending=True, stable=True)
    return by_id.gather(1, ranks)


def _take_lowest(logits: Tensor, ids: Tensor, at_end: Tensor) -> None:
    """Replace the ids that are ``at_end``, whose logits are equal, by the lowest that there are."""
    value = logits[ids[-1]].item()
    same = np.flatnonzero(logits.numpy() == np.float32(value))
    ids[at_end] = torch.from_numpy(same[: int(at_end.sum())])


def _by_keys(logits: Tensor, count: int) -> Tensor:
    """By integers that no two tokens share: the logit's bits, made to grow with it, and the id."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    grows = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    top = ((grows << 32) | (_LOW - ids)).topk(count, dim=-1).values
    return _LOW - (top & _LOW)
