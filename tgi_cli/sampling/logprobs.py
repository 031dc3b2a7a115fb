"""Log-probabilities of the model's own distribution, before penalties, temperature, filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.table import TOP_LOGPROBS, SamplingBatch
from tgi_cli.sampling.upload import Upload

_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens of the entries that request them.

    Attributes:
        entries: int64 [M], on the host.
        counts: int64 [M], tokens that each requests, on the host.
        ids: int64 [M, K], likeliest first, on the device; K is the largest count.
        logprobs: float32 [M, K], of ``ids``, on the device.
    """

    entries: NDArray[np.int64]
    counts: NDArray[np.int64]
    ids: Tensor
    logprobs: Tensor


def logprobs_of(
    logits: Tensor, token_ids: Tensor, batch: SamplingBatch, upload: Upload
) -> tuple[Tensor, TopLogprobs | None]:
    """Log-probabilities of the chosen tokens, and of the likeliest ones where requested.

    A log-probability that is not finite means that the row's logits were not: NaN and inf anywhere
    in a row reach its normalizer.

    Args:
        logits: float32 [N, V], the model's own.
        token_ids: int64 [N], the chosen ones.

    Returns:
        float32 [N], and the top tokens or None if no entry requests any.
    """
    # On a CPU the fused log_softmax takes half the time of logsumexp, which would suffice.
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    if not batch.flags & TOP_LOGPROBS:
        return chosen, None
    entries, counts, selected = _requested(batch, logits.shape[1], upload)
    if selected is not None:
        logits, logprobs = logits[selected], logprobs[selected]
    ids = likeliest(logits, int(counts.max()))
    return chosen, TopLogprobs(entries, counts, ids, logprobs.gather(1, ids))


def top_logprobs_of(
    logits: Tensor, peaks: Tensor, log_sums: Tensor, batch: SamplingBatch, upload: Upload
) -> TopLogprobs | None:
    """The likeliest tokens where requested, from normalizers that are known already.

    Args:
        logits: float32 [N, V], the model's own.
        peaks: float32 [N], the highest of each row.
        log_sums: float32 [N], the logarithm of the sum of e^(logit - peak).
    """
    if not batch.flags & TOP_LOGPROBS:
        return None
    entries, counts, selected = _requested(batch, logits.shape[1], upload)
    if selected is not None:
        logits, peaks, log_sums = logits[selected], peaks[selected], log_sums[selected]
    ids = likeliest(logits, int(counts.max()))
    logprobs = logits.gather(1, ids) - peaks.unsqueeze(1) - log_sums.unsqueeze(1)
    return TopLogprobs(entries, counts, ids, logprobs)


def _requested(
    batch: SamplingBatch, vocab_size: int, upload: Upload
) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor | None]:
    """The entries with top log-probabilities, their counts, and their indices or None for all."""
    entries = batch.where(TOP_LOGPROBS)
    counts = np.minimum(batch.records["top_logprobs"][entries], vocab_size)
    selected = upload(entries)[0] if len(entries) < len(batch) else None
    return entries, counts, selected


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids of the highest logits, highest first; of equal ones the lowest ids, in their order.

    Independent of the rest of the batch: ``torch.topk`` leaves the order of equal values open, and
    which of them it returns depends on the number of rows; logits of 16 bits are often equal. Takes
    0.05 ms a row on a CPU beyond the 0.1 to 0.3 ms of ``torch.topk``.

    Args:
        logits: float32 [N, V].
        count: K, V at most; 0 for most prompts.

    Returns:
        int64 [N, K].
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    if logits.device.type != "cpu":  # reading values there would wait for the device
        return likeliest_by_keys(logits, count)
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=-1)
    last = values[:, count - 1]
    for row in (last == values[:, -1]).nonzero().squeeze(1).tolist():
        _take_lowest(logits[row], ids[row, :count], values[row, :count] == last[row])
    by_id = ids[:, :count].sort(dim=-1).values
    ranks = logits.gather(1, by_id).argsort(dim=-1, descending=True, stable=True)
    return by_id.gather(1, ranks)


def _take_lowest(logits: Tensor, ids: Tensor, at_end: Tensor) -> None:
    """Replace the ids ``at_end``, whose logits are equal, by the lowest ids of that logit."""
    value = logits[ids[-1]].item()
    same = np.flatnonzero(logits.numpy() == np.float32(value))
    ids[at_end] = torch.from_numpy(same[: int(at_end.sum())])


def likeliest_by_keys(logits: Tensor, count: int) -> Tensor:
    """Sort by distinct integers: the logit's bits, made monotonic, then the id."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    grows = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    top = ((grows << 32) | (_LOW - ids)).topk(count, dim=-1).values
    return _LOW - (top & _LOW)
