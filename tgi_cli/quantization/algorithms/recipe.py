"""What is asked of a quantization, and what comes out for one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are to be quantized; :func:`tgi_cli.quantization.algorithms.checks.check` says
    whether it can be.

    Attributes:
        method: ``gptq``, ``awq``, ``rtn``, ``fp8`` or ``int8``.
        bits: 2, 3, 4 or 8.
        group_size: inputs that share a scale; -1: all of a row. fp8 and int8 have a scale per
            row (-1), or fp8 one for the whole weight (0).
        sym: whether zero is in the middle of the codes.
        desc_act: GPTQ goes through inputs in order of falling Hessian diagonal (act-order).
        static_groups: groups' scales are found before any column is changed, so that with
            ``desc_act`` groups stay whole in memory.
        group_aware: group-aware reordering: within and among whole groups only, which costs
            nothing when the weights are served. Not with ``desc_act``.
        mse: scales are searched for the least squared error instead of covering the extremes.
        percdamp: share of the Hessian's mean diagonal that is added to it.
        format: ``gptq``, ``gptq_v2``, ``awq`` or ``compressed-tensors``.
        scale_dtype: what scales are stored in. They are rounded to it before codes are chosen.
            gptq and awq have float16; compressed-tensors has the model's dtype.
    """

    method: str
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    static_groups: bool = False
    group_aware: bool = True
    mse: bool = False
    percdamp: float = 0.01
    format: str = "gptq"
    scale_dtype: torch.dtype = torch.float16


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A linear layer's weights [N, K] as codes on a grid: ``(codes - zeros[g]) * scales[g]``.

    Attributes:
        codes: [N, K] uint8, from 0 to 2^bits - 1; fp8: [N, K] float8_e4m3fn instead.
        scales: [G, N] float32; G groups in the order of ``groups``.
        zeros: [G, N] int32; None where there is none (fp8, int8 per row: symmetric, signed codes
            are kept with 2^(bits-1) added).
        groups: [K] int32, the group of each input (``g_idx``).
        loss: mean squared error of the outputs on the calibration inputs, over their mean
            square; NaN where there were none.
        note: what was done otherwise than asked, and why, in a few words; mostly empty.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor
    loss: float
    note: str = ""
