"""Log-probabilities of the model's own distribution, before penalties, temperature, filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.table import TOP_LOGPROBS, SamplingBatch
from tgi_cli.sampling.top_tokens import likeliest
from tgi_cli.sampling.upload import Upload


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens of the entries that asked for them.

    Attributes:
        entries: int64 [M], which of the batch asked, on the host.
        counts: int64 [M], how many each asked for, on the host.
        ids: int64 [M, K] and
        logprobs: float32 [M, K], likeliest first, on the device; K is the largest count.
    """

    entries: NDArray[np.int64]
    counts: NDArray[np.int64]
    ids: Tensor
    logprobs: Tensor


def logprobs_of(
    logits: Tensor, token_ids: Tensor, batch: SamplingBatch, upload: Upload
) -> tuple[Tensor, TopLogprobs | None]:
    """Log-probabilities of the chosen tokens, and of the likeliest where entries ask.

    One that is not finite means that the row's logits were not: NaN and inf anywhere in a row
    reach its normalizer.

    Args:
        logits: float32 [N, V], the model's own.
        token_ids: int64 [N], the chosen ones.

    Returns:
        float32 [N], and the top tokens unless nobody asked.
    """
    # On a CPU the fused log_softmax takes half the time of logsumexp, which is all we need.
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    if not batch.flags & TOP_LOGPROBS:
        return chosen, None
    asked, counts, selected = _asked(batch, logits.shape[1], upload)
    if selected is not None:
        logits, logprobs = logits[selected], logprobs[selected]
    ids = likeliest(logits, int(counts.max()))
    return chosen, TopLogprobs(asked, counts, ids, logprobs.gather(1, ids))


def top_logprobs_of(
    logits: Tensor, peaks: Tensor, log_sums: Tensor, batch: SamplingBatch, upload: Upload
) -> TopLogprobs | None:
    """The likeliest tokens of the entries that ask, where the normalizers are known already.

    Args:
        logits: float32 [N, V], the model's own.
        peaks: float32 [N], the highest of each row, and
        log_sums: float32 [N], the logarithm of the sum of e^(logit - peak).
    """
    if not batch.flags & TOP_LOGPROBS:
        return None
    asked, counts, selected = _asked(batch, logits.shape[1], upload)
    if selected is not None:
        logits, peaks, log_sums = logits[selected], peaks[selected], log_sums[selected]
    ids = likeliest(logits, int(counts.max()))
    logprobs = logits.gather(1, ids) - peaks.unsqueeze(1) - log_sums.unsqueeze(1)
    return TopLogprobs(asked, counts, ids, logprobs)


def _asked(
    batch: SamplingBatch, vocab_size: int, upload: Upload
) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor | None]:
    """Which entries ask, for how many, and where they stand; None: they are all there are."""
    entries = batch.where(TOP_LOGPROBS)
    counts = np.minimum(batch.records["top_logprobs"][entries], vocab_size)
    selected = upload(entries)[0] if len(entries) < len(batch) else None
    return entries, counts, selected
