"""Collected by test_triton_launch.py: launches on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.tools.triton_compiler import AbsentGPU, compile_only
from tests.tools.triton_stub import StubGPU, stub_gpu
from tgi_cli.device.triton_launch import cached_launches


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table"])
def kernel(
    key: tl.tensor,
    table: tl.tensor,
    stride: int,
    count: int,
    scale: float,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr = False,
) -> None:
    pass


@pytest.fixture
def gpu() -> Iterator[StubGPU]:
    with stub_gpu(record=True) as stub:
        yield stub


def pointer_of(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def launched(gpu: StubGPU) -> tuple[Any, ...]:
    """Grid, stream and arguments of the last launch, pointers as integers."""
    assert gpu.launches is not None
    _, given = gpu.launches[-1]
    return (*given[:4], *map(pointer_of, given[9:]))


def test_the_second_launch_of_a_variant_does_not_ask_triton(gpu: StubGPU) -> None:
    cached = cached_launches(kernel)
    x, table = torch.zeros(32), torch.zeros(8, dtype=torch.int32)
    cached[(2, 3)](x, table, 7, 5, 0.5, SIZE=16, num_warps=8)
    first = launched(gpu)
    assert first[:4] == (2, 3, 1, 0)
    with patch.object(JITFunction, "run", side_effect=AssertionError):
        cached[(2, 3)](x, table, 7, 5, 0.5, SIZE=16, num_warps=8)
        assert launched(gpu) == first
        cached[(4,)](x, table, 9, 6, 0.25, 16, num_warps=8)
        assert launched(gpu) == (4, 1, 1, 0, *first[4:6], 9, 6, 0.25, 16, False)
        for change in ({"SIZE": 32}, {"num_warps": 4}, {"stride": 16}, {"stride": 1}):
            given = {"stride": 9, "SIZE": 16, "num_warps": 8, **change}
            with pytest.raises(AssertionError):
                cached[(4,)](x, table, count=5, scale=0.5, **given)
    assert len(gpu.variants) == 1


numbers = st.sampled_from([0, 1, 2, 15, 16, 17, 32, 48, 1000, -16, 2**31 - 1])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
calls = st.tuples(
    dtypes,
    st.integers(0, 5),
    dtypes,
    st.integers(0, 5),
    numbers,
    numbers,
    st.sampled_from([1, 16]),
    st.booleans(),
    st.sampled_from([None, 4, 8]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(calls, min_size=1, max_size=30))
def test_a_launch_is_of_the_variant_that_triton_chooses(made: list[tuple[Any, ...]]) -> None:
    memory = torch.zeros(64, dtype=torch.int64)
    asked: list[list[Any]] = []
    for launch, of_all in ((kernel, {"enable_fp_fusion": True}), (cached_launches(kernel), {})):
        with stub_gpu(record=True) as gpu:
            seen = []
            for dtype, at, other, other_at, stride, count, size, wide, warps in made:
                x, table = memory.view(dtype)[at:], memory.view(other)[other_at:]
                options = of_all if warps is None else {"num_warps": warps, **of_all}
                launch[(1,)](x, table, stride, count, 0.5, SIZE=size, WIDE=wide, **options)
                seen.append(launched(gpu))
            asked.append([*seen, *gpu.variants])
    assert asked[0] == asked[1]


def test_none_in_place_of_a_tensor_and_true_in_place_of_a_number_are_tritons(gpu: StubGPU) -> None:
    cached = cached_launches(kernel)
    x = torch.zeros(32)
    for _ in range(2):
        cached[(1,)](x, None, 7, 5, 0.5, SIZE=16)
        cached[(1,)](x, x, True, 5, 0.5, SIZE=16)
        cached[(1,)](x, x, 1, 5, 0.5, SIZE=16)
    with stub_gpu() as plain:
        for table, stride in ((None, 7), (x, True), (x, 1)):
            kernel[(1,)](x, table, stride, 5, 0.5, SIZE=16, enable_fp_fusion=True)
    assert [key for _, key in gpu.variants] == [key for _, key in plain.variants]


def test_a_parameter_of_an_unknown_kind_is_refused() -> None:
    @triton.jit
    def strange(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(TypeError, match="strange: x is annotated as"):
        cached_launches(strange)


@triton.jit
def add_product(x: tl.tensor, y: tl.tensor) -> None:
    at = tl.arange(0, 32)
    tl.store(y + at, tl.load(x + at) * tl.load(x + 32 + at) + tl.load(y + at))


def test_products_and_sums_are_fused_where_triton_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton 3.10 does not by default; earlier versions are made to do the same."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    monkeypatch.setattr(driver, "_active", AbsentGPU(90))
    for launch in (add_product, cached_launches(add_product)):
        launch[(1,)](torch.zeros(64), torch.zeros(32))
    plain, fused = (kernel.asm["ptx"] for _, kernel in kernels)
    assert "fma.rn.f32" not in plain
    assert "fma.rn.f32" in fused
