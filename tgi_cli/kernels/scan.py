"""The selective scan of Mamba in C++, for the CPU; see :mod:`tgi_cli.kernels.recurrence`."""

from __future__ import annotations

from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from tgi_cli.kernels.library import cpp_library, threads
from tgi_cli.kernels.recurrence import StepSlots


class ScanArgs(Structure):
    """``Scan`` of ``cpp/scan.h``."""

    _fields_ = (
        ("x", c_void_p),
        ("steps", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("output", c_void_p),
        ("states", c_void_p),
        ("channels", c_int64),
        ("size", c_int64),
    )


def selective_scan(
    x: Tensor, steps: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, slots: StepSlots
) -> Tensor:
    """Mamba's state space model over the tokens of each sequence, one after the other.

    Per channel a state S [n], and per token ``S = exp(step * a) S + step * x * b; y = S c``.

    Args:
        x, steps: [T, channels].
        a: [channels, n].
        b, c: [T, n].
        states: [slots, channels, n].
        slots: slots of the step.

    All tensors are float32 and contiguous.

    Returns:
        [T, channels]
    """
    given = (x, steps, a, b, c, states)
    assert all(each.is_contiguous() and each.dtype == torch.float32 for each in given)
    library = cpp_library()
    assert library is not None
    output = torch.empty_like(x)
    call = ScanArgs(*(each.data_ptr() for each in (x, steps, a, b, c, output, states)), *a.shape)
    library.tgi_scan(byref(call), byref(slots.args), threads())
    return output
