"""Elementwise functions of gates, which round alike wherever a token is in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.layers.gates import by_rows


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", [F.silu, torch.exp, torch.sigmoid, F.softplus])
def test_neither_rows_nor_threads_change_a_bit(
    function: Callable[[Tensor], Tensor], threads: int
) -> None:
    x = torch.randn(1500, 200)
    whole = by_rows(function, x)
    assert whole.dtype == torch.float32
    parts = [by_rows(function, x[start : start + 7]) for start in range(0, len(x), 7)]
    assert torch.equal(whole, torch.cat(parts))
