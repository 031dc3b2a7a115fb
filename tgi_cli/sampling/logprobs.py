"""Log-probabilities of the model's own distribution, before penalties, temperature, filters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.batch import TOP_LOGPROBS, SamplingBatch
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
    entries = batch.where(TOP_LOGPROBS)
    counts = np.minimum(batch.records["top_logprobs"][entries], logits.shape[1])
    if len(entries) < len(batch):
        (selected,) = upload(entries)
        logits, logprobs = logits[selected], logprobs[selected]
    ids = logits.topk(int(counts.max()), dim=-1).indices
    return chosen, TopLogprobs(entries, counts, ids, logprobs.gather(1, ids))
