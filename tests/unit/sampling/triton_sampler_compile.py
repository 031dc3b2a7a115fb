"""Compiles every variant of the sampler's kernel, for GPUs that are not present.

Not collected by itself: see test_triton_sampler.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.tools.sass import registers_and_stack
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.kernels.sample import Draw
from tgi_cli.sampling.triton_sampler import triton_sample


def upload(*arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize(
    ("capability", "dtype", "same", "draws", "filtered"),
    [
        (80, torch.bfloat16, True, False, False),
        (80, torch.float32, False, True, True),
        (100, torch.float32, True, True, True),
        (90, torch.float32, True, True, False),
        (90, torch.float32, True, True, True),
        (90, torch.float32, False, False, False),
    ],
)
def test_it_compiles(
    capability: int,
    dtype: torch.dtype,
    same: bool,
    draws: bool,
    filtered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    compile_for(capability)
    logits, scores = torch.empty(2, 2, 128_256, dtype=dtype)
    draw = Draw(np.ones(2), np.ones(2, np.float32), top_p=np.ones(2) if filtered else None)
    triton_sample(logits, logits if same else scores, draw if draws else None, upload)
    ((_, kernel),) = kernels
    assert kernel.asm["cubin"]
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert registers_and_stack(kernel)[1] == 0, "it spills"
