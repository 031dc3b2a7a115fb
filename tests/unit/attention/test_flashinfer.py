"""The backend of FlashInfer, which needs a GPU: here a module in its place attends by its plans."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import CPU, make_metadata
from tests.unit.attention.workload import BLOCK, Batch, plain
from tgi_cli.attention import KVSpec, PagedAttention, create_attention
from tgi_cli.errors import ConfigError

pytest.importorskip("triton", reason="Triton is for Linux")

DIM = 64
MIXED = [(1, 5), (1, 70), (1, 33), (17, 17), (9, 60), (3, 80)]


class Wrapper:
    """Attends, one sequence at a time, over the pages that it was planned with."""

    plans = 0

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        self.tensor_cores = use_tensor_cores

    def keep(
        self, query_starts: Tensor, starts: Tensor, pages: Tensor, last_lens: Tensor, *sizes: int
    ) -> None:
        Wrapper.plans += 1
        for tensor in (query_starts, starts, pages, last_lens):
            assert tensor.dtype == torch.int32
        self.lens = query_starts.diff().tolist()
        self.pages = [
            pages[begin:end].tolist()
            for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False)
        ]
        self.last_lens = last_lens.tolist()
        self.sizes = sizes

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        heads, kv_heads, head_dim, page_size = self.sizes
        assert query.is_contiguous()
        assert query.shape[1:] == (heads, head_dim)
        assert caches[0].shape[1:] == (page_size, kv_heads, head_dim)
        left = self.options["window_left"]
        assert self.options["kv_data_type"] == caches[0].dtype
        assert self.options["q_data_type"] == query.dtype
        start = 0
        for length, pages, last in zip(self.lens, self.pages, self.last_lens, strict=True):
            keys, values = (
                cache.float()[pages].flatten(0, 1)[: (len(pages) - 1) * page_size + last]
                for cache in caches
            )
            out[start : start + length] = plain(
                query[start : start + length],
                keys,
                values,
                self.options["sm_scale"],
                KVSpec(kv_heads, head_dim, None if left == -1 else left + 1),
                self.options["logits_soft_cap"] or None,
            )
            start += length
        assert start == len(query)
        return out


class Decode(Wrapper):
    def plan(self, starts: Tensor, pages: Tensor, last_lens: Tensor, *sizes: int, **options: Any):
        self.options = options
        ones = torch.arange(len(last_lens) + 1, dtype=torch.int32)
        self.keep(ones, starts, pages, last_lens, *sizes)


class Prefill(Wrapper):
    def plan(
        self,
        query_starts: Tensor,
        starts: Tensor,
        pages: Tensor,
        last_lens: Tensor,
        *sizes: int,
        causal: bool,
        **options: Any,
    ):
        assert causal
        self.options = options
        self.keep(query_starts, starts, pages, last_lens, *sizes)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    from tgi_cli.attention.triton import TritonAttention

    monkeypatch.setattr(TritonAttention, "write", PagedAttention.write)  # Triton's needs a GPU
    monkeypatch.setattr(Wrapper, "plans", 0)


def make(specs: list[KVSpec], cache_dtype: torch.dtype | None = None) -> PagedAttention:
    attention = create_attention("flashinfer", specs, BLOCK, torch.bfloat16, CPU, cache_dtype)
    attention.allocate(200)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    return attention


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.usefixtures("flashinfer")
def test_plans_cover_windows_and_softcaps(window: int | None, softcap: float | None) -> None:
    attention = make([KVSpec(2, DIM, window)])
    Batch(MIXED, 6, 2, torch.bfloat16, dim=DIM, softcap=softcap).check(attention, 0, 0.02)
    for lens in (MIXED[:3], MIXED[3:]):
        Batch(lens, 6, 2, torch.bfloat16, dim=DIM, softcap=softcap).check(attention, 0, 0.02)


@pytest.mark.usefixtures("flashinfer")
def test_an_8_bit_cache_is_attended_to() -> None:
    attention = make([KVSpec(2, DIM)], torch.float8_e4m3fn)

    def kept(numbers: Tensor) -> Tensor:
        return numbers.to(torch.float8_e4m3fn).to(numbers.dtype)

    Batch(MIXED, 6, 2, torch.bfloat16, dim=DIM).check(attention, 0, 0.02, kept)


@pytest.mark.usefixtures("flashinfer")
def test_layers_of_a_kind_share_a_plan() -> None:
    attention = make([KVSpec(2, DIM), KVSpec(2, DIM, 20), KVSpec(2, DIM)])
    metadata = make_metadata([[3], [4]], [1, 5], [9, 5], BLOCK)
    query, key = torch.zeros(6, 4, DIM).bfloat16(), torch.zeros(6, 2, DIM).bfloat16()
    for step in (1, 2):
        attention.plan(metadata)
        for layer in range(3):
            attention(layer, query, key, key, 1.0)
        assert Wrapper.plans == step * 4  # of decodes and of prompts, of two kinds


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="needs the package") as error:
        make([KVSpec(2, DIM)])
    assert "pip install flashinfer-python" in error.value.remedy


@pytest.mark.usefixtures("flashinfer")
def test_unsupported_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads of 80 dimensions"):
        make([KVSpec(2, 80)])
    with pytest.raises(ConfigError, match="attention for float32"):
        create_attention("flashinfer", [KVSpec(2, DIM)], BLOCK, torch.float32, CPU)
    with pytest.raises(ConfigError, match="keys of 128 and values of 64"):
        make([KVSpec(2, 128, value_dim=64)])
    with pytest.raises(ConfigError, match="keys of 128 and values of 128"):
        make([KVSpec(1, 128, values_in_keys=True)])
    with pytest.raises(ConfigError, match="chunks of positions"):
        make([KVSpec(2, DIM, chunk=64)])
    attention = make([KVSpec(2, DIM)])
    attention.plan(make_metadata([[3]], [1], [1], BLOCK))
    ones = torch.ones(1, 2, DIM).bfloat16()
    with pytest.raises(ConfigError, match="sinks"):
        attention(0, ones, ones, ones, 1.0, sinks=torch.ones(2))
    with pytest.raises(ConfigError, match="bias by distance"):
        attention(0, ones, ones, ones, 1.0, bias=torch.zeros(2, 2))
