"""Rows of scores to tokens and log-probabilities in C++, on the CPU.

A row's result is the same to the last bit whatever rows are beside it and however many threads
compute. For a greedy row, only the token is written.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads

_ALONE = 1 << 15
"""Numbers up to which one thread is faster than several."""


class _Sample(ctypes.Structure):
    """``Sample`` of cpp/sample.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("scores", c_void_p),
        ("scores_stride", c_int64),
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("uniforms", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("peaks", c_void_p),
        ("log_sums", c_void_p),
    )


class Draw(NamedTuple):
    """Parameters of the rows of a batch that draw their tokens; contiguous arrays [N].

    Attributes:
        uniforms: float64 in (0, 1), or 0 for rows that take their likeliest token.
        temperature: float32, not 0.
        top_k: int64, 0 for all tokens; None if no row uses it, as for the next two.
        top_p: float64, 1 for all tokens.
        min_p: float32, 0 for all tokens.
    """

    uniforms: NDArray[Any]
    temperature: NDArray[Any]
    top_k: NDArray[Any] | None = None
    top_p: NDArray[Any] | None = None
    min_p: NDArray[Any] | None = None


class Tokens(NamedTuple):
    """The chosen tokens of N rows: int64 ids, and float32 numbers about them.

    Attributes:
        logprobs: NaN where the logits hold NaN or +inf, or nothing but -inf.
        peaks: the highest logit.
        log_sums: the logarithm of the sum of e^(logit - peak), from which log-probabilities of
            other tokens follow.
    """

    token_ids: Tensor
    logprobs: Tensor
    peaks: Tensor
    log_sums: Tensor


def can_sample(logits: Tensor) -> bool:
    """Whether :func:`sample` takes these."""
    return logits.device.type == "cpu" and logits.stride(-1) == 1 and cpp_library() is not None


def sample(logits: Tensor, scores: Tensor, draw: Draw | None = None) -> Tokens:
    """The likeliest token of each row, the lowest id among equals, or one that is drawn.

    Equal to :mod:`tgi_cli.sampling.multinomial` and :mod:`tgi_cli.sampling.filters`, up to the
    rounding of exponentials.

    Args:
        logits: float32 [N, V], V > 0: log-probabilities are theirs.
        scores: float32 [N, V], from which tokens are chosen; may be the logits.
        draw: parameters of random draws; None if all rows are greedy.
    """
    library = cpp_library()
    assert library is not None
    rows, vocabulary = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64)
    logprobs, peaks, log_sums = torch.empty(3, rows).unbind()
    call = _Sample(
        logits=logits.data_ptr(),
        logits_stride=logits.stride(0),
        scores=scores.data_ptr(),
        scores_stride=scores.stride(0),
        rows=rows,
        vocabulary=vocabulary,
        token_ids=token_ids.data_ptr(),
        logprobs=logprobs.data_ptr(),
        peaks=peaks.data_ptr(),
        log_sums=log_sums.data_ptr(),
    )
    if draw is not None:
        for name, array in draw._asdict().items():
            if array is not None:
                setattr(call, name, array.ctypes.data)
    workers = threads() if rows * vocabulary > _ALONE else 1
    library.tgi_sample(workers, byref(call))
    return Tokens(token_ids, logprobs, peaks, log_sums)
