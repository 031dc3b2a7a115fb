"""Rows of logits to tokens and log-probabilities in one Triton kernel, on CUDA.

One program computes a row, so that the result does not depend on the rest of the batch. It reads
the row once for its normalizer and its likeliest token; a row that draws is read twice more, one
with top_k or top_p three times. Nothing is sorted: a filter is a threshold
(:mod:`tgi_cli.sampling.filters`), and thresholds are found by bisection over the bits of the
weights, among the few that can matter.

Weights are the integers of :mod:`tgi_cli.sampling.multinomial`, whose sums are exact. So the choice
equals that of the reference and of the C++ kernel for the same uniform number, except where the
rounding of an exponential moves a token's weight across the number.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.kernels.sample import Draw, Tokens
from tgi_cli.sampling.multinomial import SCALE
from tgi_cli.sampling.upload import Upload

BLOCK = 4096
"""Logits that a program reads at a time. Sums depend on it, so it is the same for all shapes."""

_ROW = tl.constexpr(64)
"""Of a block, which is taken in rows where running sums are made: within rows no warp waits for
another one, and fewer registers are taken than by a running sum of a whole block."""

_SCALE = tl.constexpr(SCALE)
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load(row: tl.tensor, columns: tl.tensor, VOCABULARY: tl.constexpr) -> tl.tensor:
    return tl.load(row + columns, mask=columns < VOCABULARY, other=_LOWEST).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _places(BLOCK: tl.constexpr) -> tl.tensor:
    """0 .. BLOCK - 1 in rows."""
    rows = tl.arange(0, BLOCK // _ROW) * _ROW
    return rows[:, None] + tl.arange(0, _ROW)[None, :]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _summarize(
    row: tl.tensor, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The highest number, its first column, and the sum of e^(number - highest).

    NaN and +inf make the sum NaN.
    """
    lanes = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), _LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    first = lanes
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + lanes
        x = _load(row, columns, VOCABULARY)
        higher = tl.maximum(high, x)
        base = tl.where(higher == _LOWEST, 0.0, higher)  # -inf less -inf is NaN
        sums = sums * tl.exp(high - base) + tl.exp(x - base)
        first = tl.where(x > high, columns, first)
        high = higher
    peak = tl.max(high, 0)
    base = tl.where(peak == _LOWEST, 0.0, peak)
    total = tl.sum(sums * tl.exp(high - base), 0)
    return peak, tl.min(tl.where(high == peak, first, VOCABULARY - 1), 0), total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weigh(x: tl.tensor, peak: tl.tensor, colder: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Integer weights, as float32."""
    return tl.floor(tl.exp((x - peak) * colder) * scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _reached(
    head: tl.tensor,
    candidates: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many of ``count`` candidates are at least ``bound``, or with MASS their sum: float64.

    ``head`` holds the first BLOCK of them, in registers; most rows have no more.
    """
    lanes = tl.arange(0, BLOCK)
    worth = head.to(tl.float64) if MASS else tl.full((BLOCK,), 1.0, tl.float64)
    total = tl.sum(tl.where(head >= bound, worth, 0.0), 0)
    for start in range(BLOCK, count, BLOCK):
        more = tl.load(candidates + start + lanes, mask=start + lanes < count, other=-1.0)
        worth = more.to(tl.float64) if MASS else tl.full((BLOCK,), 1.0, tl.float64)
        total += tl.sum(tl.where(more >= bound, worth, 0.0), 0)
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _highest_bound(
    head: tl.tensor,
    candidates: tl.tensor,
    count: tl.tensor,
    needed: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The highest float32 in [low, high] that candidates worth ``needed`` reach; low does.

    The bits of numbers that are not negative are in the order of the numbers.
    """
    lower = low.to(tl.int32, bitcast=True)
    upper = high.to(tl.int32, bitcast=True)
    while lower < upper:
        middle = lower + (upper - lower + 1) // 2
        bound = middle.to(tl.float32, bitcast=True)
        enough = _reached(head, candidates, count, bound, MASS, BLOCK) >= needed
        lower = tl.where(enough, middle, lower)
        upper = tl.where(enough, upper, middle - 1)
    return lower.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _threshold(
    row: tl.tensor,
    candidates: tl.tensor,
    high: tl.tensor,  # [BLOCK]: the highest score of every BLOCK-th column
    peak: tl.tensor,
    colder: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The lowest weight that top_k and top_p keep."""
    lanes = tl.arange(0, BLOCK)
    largest = tl.floor(scale)
    none = tl.program_id(0) * 0
    # At least k weights reach what the highest of k lanes do. Likewise weights of less than
    # (total - needed) / V hold less than total - needed together; total is SCALE but for rounding.
    spare = _SCALE * (1.0 - 2.0**-16) * (1.0 - top_p) - 1.0
    bound = tl.maximum(spare * ((1.0 - 2.0**-16) / VOCABULARY), 0.0).to(tl.float32)
    if top_k > 0:
        bound = largest * 0.0
        if top_k <= BLOCK:
            summits = _weigh(high, peak, colder, scale)
            bound = _highest_bound(
                summits, candidates, none, top_k.to(tl.float64), bound, largest, False, BLOCK
            )
    count = none
    everything = (largest * 0.0).to(tl.float64)
    places = _places(BLOCK)
    for start in range(0, VOCABULARY, BLOCK):
        w = _weigh(_load(row, start + places, VOCABULARY), peak, colder, scale)
        everything += tl.sum(tl.sum(w.to(tl.float64), 1), 0)
        kept = (w >= bound) & (w > 0.0)
        number = kept.to(tl.int32)
        in_rows = tl.sum(number, 1)
        before = count + tl.cumsum(in_rows, 0) - in_rows
        place = before[:, None] + tl.cumsum(number, 1) - number
        tl.store(candidates + place, w, mask=kept)
        count += tl.sum(in_rows, 0)
    tl.debug_barrier()  # other threads read them
    head = tl.load(candidates + lanes, mask=lanes < count, other=-1.0)
    threshold = largest * 0.0
    if top_k > 0:
        threshold = _highest_bound(
            head, candidates, count, top_k.to(tl.float64), bound, largest, False, BLOCK
        )
        everything = _reached(head, candidates, count, threshold, True, BLOCK)
    if top_p < 1.0:
        needed = tl.maximum(tl.ceil(everything * top_p), 1.0)
        low = tl.maximum(threshold, bound)
        threshold = _highest_bound(head, candidates, count, needed, low, largest, True, BLOCK)
    return threshold


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _first_beyond(
    sums: tl.tensor, target: tl.tensor, SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first of [SIZE] sums with which their running sum exceeds ``target``, and what is left of
    this before it."""
    number = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    return number, target - tl.sum(tl.where(tl.arange(0, SIZE) < number, sums, 0.0), 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _draw(
    row: tl.tensor,
    candidates: tl.tensor,
    peak: tl.tensor,
    uniform: tl.tensor,
    colder: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,  # a power of 2 that is not below the number of blocks
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The first token, in vocabulary order, at which the running sum exceeds its share."""
    lanes = tl.arange(0, BLOCK)
    shares = tl.zeros((BLOCK,), tl.float32)
    high = tl.full((BLOCK,), _LOWEST, tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        x = _load(row, start + lanes, VOCABULARY)
        shares += tl.exp((x - peak) * colder)
        if FILTERED:
            high = tl.maximum(high, x)
    scale = _SCALE / tl.sum(shares, 0)
    threshold = scale * 0.0
    if FILTERED:
        if (top_k > 0) | (top_p < 1.0):
            threshold = _threshold(
                row, candidates, high, peak, colder, scale, top_k, top_p, VOCABULARY, BLOCK
            )
        # Relative to the likeliest token, which all earlier filters keep.
        threshold = tl.maximum(threshold, tl.ceil(tl.floor(scale) * min_p))
    tiles = tl.arange(0, TILES)
    sums = tl.zeros((TILES,), tl.float64)
    for start in range(0, VOCABULARY, BLOCK):
        w = _weigh(_load(row, start + lanes, VOCABULARY), peak, colder, scale)
        mass = tl.sum(tl.where(w >= threshold, w, 0.0).to(tl.float64), 0)
        sums = tl.where(tiles == start // BLOCK, mass, sums)
    # Below the total even for the largest uniform number.
    target = tl.floor(uniform * tl.sum(sums, 0))
    tile, target = _first_beyond(sums, target, TILES)
    w = _weigh(_load(row, tile * BLOCK + _places(BLOCK), VOCABULARY), peak, colder, scale)
    sums_of_rows = tl.sum(tl.where(w >= threshold, w, 0.0).to(tl.float64), 1)
    number, target = _first_beyond(sums_of_rows, target, BLOCK // _ROW)
    first = tile * BLOCK + number * _ROW
    w = _weigh(_load(row, first + tl.arange(0, _ROW), VOCABULARY), peak, colder, scale)
    kept = tl.where(w >= threshold, w, 0.0).to(tl.float64)
    offset, _ = _first_beyond(kept, target, _ROW)
    return tl.minimum(first + offset, VOCABULARY - 1)


_UNALIGNED = [
    *("uniforms", "temperatures", "top_ks", "top_ps", "min_ps"),
    *("token_ids", "logprobs", "peaks", "log_sums"),
]
"""Parts of larger buffers: where they begin differs from step to step, and must not make another
variant of the kernel, which takes seconds to compile."""


@cached_launches
@triton.jit(do_not_specialize=_UNALIGNED)  # type: ignore[untyped-decorator, unused-ignore]
def _sample_kernel(
    logits: tl.tensor,  # [N, VOCABULARY]
    scores: tl.tensor,
    uniforms: tl.tensor,  # float64 [N]; 0: the likeliest token
    temperatures: tl.tensor,  # float32 [N]
    top_ks: tl.tensor,  # int64 [N]; 0: all tokens
    top_ps: tl.tensor,  # float64 [N]
    min_ps: tl.tensor,  # float32 [N]
    candidates: tl.tensor,  # float32 [N, VOCABULARY]
    token_ids: tl.tensor,  # int64 [N]
    logprobs: tl.tensor,  # float32 [N]
    peaks: tl.tensor,
    log_sums: tl.tensor,
    LOGITS_STRIDE: tl.constexpr,
    SCORES_STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    SAME: tl.constexpr,  # scores are the logits
    DRAWS: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * LOGITS_STRIDE
    scores += row * SCORES_STRIDE
    model_peak, token, total = _summarize(logits, VOCABULARY, BLOCK)
    peak = model_peak
    if not SAME:
        peak, token, _ = _summarize(scores, VOCABULARY, BLOCK)
    if DRAWS:
        uniform = tl.load(uniforms + row)
        if (uniform > 0.0) & (peak > _LOWEST):
            colder = 1.0 / tl.load(temperatures + row)
            if FILTERED:
                top_k = tl.load(top_ks + row)
                top_k = tl.where(top_k < VOCABULARY, top_k, 0)
                top_p = tl.load(top_ps + row)
                min_p = tl.load(min_ps + row)
                own = candidates + row * VOCABULARY
                token = _draw(
                    scores,
                    own,
                    peak,
                    uniform,
                    colder,
                    top_k,
                    top_p,
                    min_p,
                    VOCABULARY,
                    TILES,
                    True,
                    BLOCK,
                )
            else:
                token = _draw(
                    scores,
                    candidates,
                    peak,
                    uniform,
                    colder,
                    0,
                    1.0,
                    0.0,
                    VOCABULARY,
                    TILES,
                    False,
                    BLOCK,
                )
    log_sum = tl.log(total)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(logits + token).to(tl.float32) - model_peak - log_sum)
    tl.store(peaks + row, model_peak)
    tl.store(log_sums + row, log_sum)


def triton_sample(
    logits: Tensor, scores: Tensor, draw: Draw | None = None, upload: Upload | None = None
) -> Tokens:
    """As :func:`tgi_cli.kernels.sample.sample`, on the logits' device and without waiting for it.

    Without ``draw`` nothing comes from the host: a CUDA graph can hold the launch.

    Args:
        logits: float32, float16 or bfloat16 [N, V], V > 0, contiguous in the last dimension.
        scores: likewise, from which tokens are chosen; may be the logits.
        draw: parameters of random draws; None if all rows are greedy.
        upload: brings ``draw`` to the device.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, peaks, log_sums = torch.empty(3, rows, device=device).unbind()
    tokens = Tokens(token_ids, logprobs, peaks, log_sums)
    if not rows:
        return tokens
    uniforms = temperature = top_k = top_p = min_p = candidates = logprobs
    filtered = False
    if draw is not None:
        assert upload is not None
        filtered = any(each is not None for each in draw[2:])
        if filtered:
            arrays = (
                np.zeros(rows, np.int64) if draw.top_k is None else draw.top_k,
                np.ones(rows) if draw.top_p is None else draw.top_p,
                np.zeros(rows, np.float32) if draw.min_p is None else draw.min_p,
            )
            uniforms, temperature, top_k, top_p, min_p = upload(
                draw.uniforms, draw.temperature, *arrays
            )
            candidates = torch.empty(rows, vocabulary, device=device)
        else:
            uniforms, temperature = upload(draw.uniforms, draw.temperature)
    same = scores.data_ptr() == logits.data_ptr() and scores.stride() == logits.stride()
    _sample_kernel[(rows,)](
        logits,
        scores,
        uniforms,
        temperature,
        top_k,
        top_p,
        min_p,
        candidates,
        token_ids,
        logprobs,
        peaks,
        log_sums,
        LOGITS_STRIDE=logits.stride(0),
        SCORES_STRIDE=scores.stride(0),
        VOCABULARY=vocabulary,
        TILES=max(2, triton.next_power_of_2(triton.cdiv(vocabulary, BLOCK))),
        SAME=same,
        DRAWS=draw is not None,
        FILTERED=filtered,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return tokens
