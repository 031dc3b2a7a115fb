"""Logits to tokens, batched, without waiting for the device.

Order: logit_bias, watermark, repetition, frequency and presence penalties, allowed tokens, bad
words and premature stop ids, grammar masks, temperature, top_k, top_p, min_p, typical_p, choice.
Greedy rows take the highest score before temperature. Stages that no row of a step needs are
skipped, by the rows' flags on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.kernels.sample import Draw, Tokens, can_sample, sample
from tgi_cli.layers import ops
from tgi_cli.sampling.constraints import TokenMasks, add_bias, apply_masks, forbid
from tgi_cli.sampling.filters import filter_weights
from tgi_cli.sampling.logprobs import TopLogprobs, logprobs_of, top_logprobs_of
from tgi_cli.sampling.multinomial import argmax, choose, uniforms, weights_of
from tgi_cli.sampling.penalties import penalize
from tgi_cli.sampling.table import (
    ADJUSTED,
    BIASED,
    FILTERED,
    FORBIDDEN,
    MIN_P,
    PENALIZED,
    SAMPLED,
    TOP_K,
    TOP_P,
    TYPICAL,
    WATERMARK,
    SamplingBatch,
)
from tgi_cli.sampling.upload import Upload
from tgi_cli.sampling.watermark import mark


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen tokens, int64 [N], and their log-probabilities, float32 [N], on the device.

    A log-probability of NaN marks a row whose logits or scores were not numbers, -inf a row whose
    constraints exclude every token; the token of either is a valid id without meaning.
    """

    token_ids: Tensor
    logprobs: Tensor
    top: TopLogprobs | None


class Sampler:
    """Chooses one token per row of logits.

    Milliseconds with V = 49152 on one busy 2025 server core, at N = 1 / 32, in C++ and, without
    the compiled library, with torch: greedy 0.02 / 0.4 and 0.03 / 1.1, temperature 0.05 / 1.2 and
    0.2 / 4.5, with top_p 0.08 / 3.9 (peaked) to 0.16 / 6.5 (flat) and 0.3 / 7.3 to 0.4 / 11, with
    top_k 0.05 / 2.0 and 0.35 / 8. With V = 151936 three to four times as much. In torch
    either way: repetition penalty (256 tokens) + 0.11 / 1, a bias or a bad word
    + 0.04 / 0.8, a grammar mask + 0.04 / 0.8, a watermark + 0.25 / 5, typical_p. Threads share
    rows and parts of rows. On CUDA one Triton kernel chooses tokens, which has not been measured;
    batches with typical_p take torch's operations.

    Args:
        upload: brings host arrays to the logits' device.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def __call__(
        self,
        logits: Tensor,
        batch: SamplingBatch,
        pool: Tensor,
        scores: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """Choose a token for each entry of ``batch``.

        Args:
            logits: float32 [N, V], the model's own, not changed; log-probabilities are theirs.
            batch: the N entries.
            pool: int32 [rows, width], the known tokens of every row.
            scores: float32 [N, V] to choose by instead of ``logits``, changed in place; +inf counts
                as the largest number.
            masks: tokens that some of the entries may choose.
        """
        constrained = scores is not None or masks is not None or batch.flags & FORBIDDEN
        peaks_given = None
        if scores is None:
            scores = logits.clone() if constrained or batch.flags & ADJUSTED else logits
        else:
            peaks_given = scores.clamp_(max=torch.finfo(torch.float32).max).amax(dim=-1)
        if batch.flags & ADJUSTED:
            self._adjust(scores, batch, pool)
        if masks is not None:
            apply_masks(scores, masks, self._upload)
        if _has_kernel(logits) and not batch.flags & TYPICAL:
            token_ids, logprobs, peaks, log_sums = self._sample_in_kernel(logits, scores, batch)
            top = top_logprobs_of(logits, peaks, log_sums, batch, self._upload)
        else:
            token_ids = self._choose(scores, batch)
            logprobs, top = logprobs_of(logits, token_ids, batch, self._upload)
        if constrained:
            # Report a masked token as such, whatever chose it.
            chosen = scores.gather(1, token_ids.unsqueeze(1)).squeeze(1)
            logprobs.masked_fill_(chosen == -math.inf, -math.inf)
        if peaks_given is not None:
            logprobs.masked_fill_(peaks_given.isnan(), math.nan)
        return Sampled(token_ids, logprobs, top)

    def only_reads(self, logits: Tensor, batch: SamplingBatch) -> bool:
        """Whether the entries are sampled from their logits without copies of them."""
        return _has_kernel(logits) and not batch.flags & (ADJUSTED | FORBIDDEN | TYPICAL)

    def _sample_in_kernel(self, logits: Tensor, scores: Tensor, batch: SamplingBatch) -> Tokens:
        if logits.is_cuda:
            from tgi_cli.sampling.triton_sampler import triton_sample

            return triton_sample(logits, scores, _draw(batch), self._upload)
        return sample(logits, scores, _draw(batch))

    def _adjust(self, scores: Tensor, batch: SamplingBatch, pool: Tensor) -> None:
        if batch.flags & BIASED:
            add_bias(scores, batch, self._upload)
        if batch.flags & WATERMARK:
            mark(scores, batch, pool, self._upload)
        if batch.flags & PENALIZED:
            penalize(scores, batch, pool, self._upload)
        if batch.flags & FORBIDDEN:
            forbid(scores, batch, pool, self._upload)

    def _choose(self, scores: Tensor, batch: SamplingBatch) -> Tensor:
        if not batch.flags & SAMPLED:
            return argmax(scores)
        entries = batch.where(SAMPLED)
        if len(entries) == len(batch):
            return self._sample(scores, batch)
        token_ids = argmax(scores)
        (selected,) = self._upload(entries)
        token_ids[selected] = self._sample(scores[selected], batch[entries])
        return token_ids

    def _sample(self, scores: Tensor, batch: SamplingBatch) -> Tensor:
        """Sample from each row; ``scores`` are not changed."""
        numbers = uniforms(batch.records["seed"], batch.positions)
        temperature, uniform = self._upload(batch.column("temperature"), numbers)
        if np.any(batch.records["temperature"] != 1.0):
            # The highest score goes to 0 first: a tiny temperature must not make infinities.
            scores = scores - scores.amax(dim=-1, keepdim=True)
            scores /= temperature.unsqueeze(1)
        weights = weights_of(scores)
        if batch.flags & FILTERED:
            filter_weights(weights, batch, self._upload)
        return choose(weights, uniform)


def _has_kernel(logits: Tensor) -> bool:
    """Whether one kernel chooses tokens: in C++ on a CPU, Triton's on CUDA."""
    if logits.is_cuda:
        return logits.stride(-1) == 1 and ops.triton_kernels() is not None
    return can_sample(logits)


def _draw(batch: SamplingBatch) -> Draw | None:
    """The kernels' parameters of the sampled entries, or None if all are greedy."""
    if not batch.flags & SAMPLED:
        return None
    numbers = uniforms(batch.records["seed"], batch.positions)
    greedy = batch.records["flags"] & SAMPLED == 0
    numbers[greedy] = 0.0
    return Draw(
        numbers,
        batch.column("temperature"),
        batch.column("top_k") if batch.flags & TOP_K else None,
        batch.column("top_p") if batch.flags & TOP_P else None,
        batch.column("min_p") if batch.flags & MIN_P else None,
    )


def greedy(logits: Tensor) -> Sampled:
    """The likeliest token of each row of logits, float32 [N, V], and its log-probability.

    As a :class:`Sampler` chooses for requests that ask for nothing else. What is launched depends
    on the shape alone, and nothing comes from the host: a CUDA graph can hold it.
    """
    return Sampler(_no_upload)(logits, _GREEDY, logits)


def summarize(logits: Tensor) -> Tokens:
    """As :func:`greedy`, with each row's highest logit and normalizer.

    Args:
        logits: float32 [N, V], V > 0. Of a row of nothing but -inf the normalizer is -inf.
    """
    if logits.is_cuda and _has_kernel(logits):
        return Sampler(_no_upload)._sample_in_kernel(logits, logits, _GREEDY)
    token_ids = argmax(logits)
    peaks = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    base = peaks.masked_fill(peaks == -math.inf, 0.0)  # -inf less -inf is NaN
    log_sums = (logits - base.unsqueeze(1)).exp_().sum(dim=-1).log_()
    return Tokens(token_ids, peaks - base - log_sums, peaks, log_sums)


def _no_upload(*arrays: NDArray[Any]) -> list[Tensor]:
    raise ValueError("a greedy choice takes nothing from the host")


_GREEDY = SamplingBatch(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), 0, [])
"""No flag is set, so that nothing else is read."""
