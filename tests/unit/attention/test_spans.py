"""Tokens that attend to each other, and what is behind them, against attention written out."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import CPU, kernels_add_up_rows_alike, make_metadata
from tests.unit.attention.workload import BLOCK, Batch, make
from tests.unit.kernels.conftest import compiled  # noqa: F401
from tgi_cli.attention import KVSpec, PagedAttention, Spans, create_attention
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.kernels import library

LENS = [(1, 5), (40, 40), (70, 203), (9, 9), (150, 150), (30, 400)]
SPANS = [[], [(3, 18)], [(140, 60)], [(2, 1), (3, 6)], [(10, 60), (70, 70)], [(360, 35)]]
"""Within a chunk, across tiles of queries and blocks, to a chunk's end, one beside the other, and
one that begins in an earlier chunk."""
PREFIXES = [[], [(0, 30)], [(0, 190)], [(0, 9)], [(0, 149)], [(0, 400)]]
"""As prompts: a prefix of the sequence, of which the step may have the rest."""

CASES: dict[str, tuple[KVSpec, list[list[tuple[int, int]]]]] = {
    "everything": (KVSpec(2, 32, spans="window"), SPANS),
    "a window shorter than spans": (KVSpec(2, 32, 16, spans="window"), SPANS),
    "a window": (KVSpec(2, 32, 50, spans="window"), SPANS),
    "a long window": (KVSpec(2, 32, 260, spans="window"), SPANS),
    "layers that have no spans": (KVSpec(2, 32, 50), SPANS),
    "whole prompts": (KVSpec(2, 32, spans="whole"), PREFIXES),
    "whole prompts in a window": (KVSpec(2, 32, 20, spans="whole"), PREFIXES),
    "narrow values": (KVSpec(2, 32, value_dim=16, spans="window"), SPANS),
}


@pytest.fixture
def native(
    compiled: dict[str, ctypes.CDLL],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        pytest.skip("there are no kernels for this processor")
    best = next(iter(compiled.values()))
    monkeypatch.setattr(library, "_load", lambda: best)


def batch_of(name: str, dtype: torch.dtype, **options: Tensor | float) -> tuple[KVSpec, Batch]:
    spec, spans = CASES[name]
    return spec, Batch(LENS, 6, 2, dtype, dim=32, value_dim=spec.value_dim, spans=spans, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_of_a_span_see_each_other(backend: str, name: str) -> None:
    spec, batch = batch_of(name, torch.float32)
    attention = make(backend, [KVSpec(1, 16), spec])
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    batch.check(attention, 1, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_caps_sinks_and_biases_hold_within_spans(backend: str) -> None:
    sinks = torch.tensor([0.5, -2.0, 3.0, 1.0, 0.0, 6.0])
    bias = torch.randn(6, 37, generator=torch.Generator().manual_seed(3))
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"bias": bias}):
        spec, batch = batch_of("a window", torch.float32, **options)  # type: ignore[arg-type]
        batch.check(make(backend, [spec]), 0, 1e-5)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_let_tokens_of_a_span_see_each_other(
    name: str, cache_dtype: torch.dtype | None
) -> None:
    def kept(numbers: Tensor) -> Tensor:
        return numbers if cache_dtype is None else numbers.to(cache_dtype).to(numbers.dtype)

    spec, batch = batch_of(name, torch.bfloat16)
    attention = CppAttention([KVSpec(1, 16), spec], BLOCK, torch.bfloat16, CPU, cache_dtype)
    attention.allocate(200)
    batch.check(attention, 1, 0.02, kept)


@pytest.mark.usefixtures("native")
def test_a_step_without_spans_follows_one_with_them() -> None:
    spec, batch = batch_of("everything", torch.bfloat16)
    attention = CppAttention([spec], BLOCK, torch.bfloat16, CPU)
    attention.allocate(200)
    batch.check(attention, 0, 0.02)
    Batch([(40, 40), (70, 203)], 6, 2, torch.bfloat16, dim=32).check(attention, 0, 0.02)


@pytest.mark.parametrize("spans", ["window", "whole"])
@pytest.mark.parametrize("window", [None, 20, 260])
def test_cuts_and_neighbours_change_no_bit_of_torch_s(window: int | None, spans: Spans) -> None:
    if not kernels_add_up_rows_alike(torch.float32):
        pytest.skip("this processor's kernels add up rows of a step in different ways")
    spec = KVSpec(2, 32, window, spans=spans)
    check_bits(lambda: make("cpu", [spec]), torch.float32, 0 if spans == "whole" else 30)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("spans", ["window", "whole"])
@pytest.mark.parametrize("window", [None, 20, 260])
def test_cuts_and_neighbours_change_no_bit_of_the_kernels(window: int | None, spans: Spans) -> None:
    def backend() -> PagedAttention:
        attention = CppAttention([KVSpec(2, 32, window, spans=spans)], BLOCK, torch.bfloat16, CPU)
        attention.allocate(200)
        return attention

    check_bits(backend, torch.bfloat16, 0 if spans == "whole" else 30)


def check_bits(backend, dtype: torch.dtype, first: int) -> None:  # type: ignore[no-untyped-def]
    """A sequence at once beside another one, and alone in chunks around its span."""
    count, length = 100, 640
    until = [first + count - 1 if first <= p < first + count else -1 for p in range(length)]
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(length + 33, heads, 32, generator=generator).to(dtype) for heads in (6, 2, 2)
    )
    table, other = list(range(40)), [50, 51, 52]
    attention = backend()
    metadata = make_metadata([table, other], [length, 33], [length, 33], BLOCK)
    metadata.visible_until = torch.tensor(until + [-1] * 33, dtype=torch.int32)
    attention.plan(metadata)
    whole = attention(0, query, key, value, 0.2)[:length]
    cuts = sorted({0, first, first + count, 200, 201, 500, length})
    attention, parts = backend(), []
    for begin, end in pairwise(cuts):
        metadata = make_metadata([table], [end - begin], [end], BLOCK)
        if max(until[begin:end]) >= 0:
            metadata.visible_until = torch.tensor(until[begin:end], dtype=torch.int32)
        attention.plan(metadata)
        step = slice(begin, end)
        parts.append(attention(0, query[step], key[step], value[step], 0.2))
    assert torch.equal(torch.cat(parts), whole)


def test_a_query_sees_its_window_and_its_span() -> None:
    windowed, whole = KVSpec(1, 16, 4, spans="window"), KVSpec(1, 16, 4, spans="whole")
    assert windowed.visible(9) == range(6, 10)
    assert windowed.visible(9, 12) == range(6, 13)
    assert windowed.visible(12, 12) == range(9, 13)
    assert whole.visible(9, 12) == range(13)
    assert whole.visible(12, 12) == range(13)
    assert whole.visible(13) == range(10, 14)
    assert KVSpec(1, 16, 4).visible(9, 12) == range(6, 10)


def test_blocks_behind_a_window_are_kept_where_whole_spans_reach_them() -> None:
    attention = create_attention(
        "torch", [KVSpec(1, 16, 4, spans="whole"), KVSpec(1, 16, 4)], BLOCK, torch.float32, CPU
    )
    assert attention.first_block(0, 100) == 0
    assert attention.first_block(1, 100) == 97 // BLOCK
