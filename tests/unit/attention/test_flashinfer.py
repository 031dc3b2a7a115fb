"""The backend of FlashInfer, which needs a GPU: here a module in its place attends by its plans."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import CPU, make_metadata
from tests.unit.attention.workload import BLOCK, Batch, plain
from tgi_cli.attention import KVScales, KVSpec, PagedAttention, create_attention
from tgi_cli.errors import ConfigError

pytest.importorskip("triton", reason="Triton is for Linux")

DIM = 64
MIXED = [(1, 5), (1, 70), (1, 33), (17, 17), (9, 60), (3, 80)]


class Wrapper:
    """Attends, one sequence at a time, over the pages that it was planned with."""

    plans = 0

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        use_tensor_cores: bool = False,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"
        self.tensor_cores = use_tensor_cores
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.buffers = buffers if use_cuda_graph else None
        assert use_cuda_graph == all(buffer is not None for buffer in buffers)

    def reset_workspace_buffer(self, floats: Tensor, integers: Tensor) -> None:
        assert integers.dtype == torch.uint8

    def keep(
        self, query_starts: Tensor, starts: Tensor, pages: Tensor, last_lens: Tensor, *sizes: int
    ) -> None:
        Wrapper.plans += 1
        for tensor in (query_starts, starts, pages, last_lens):
            assert tensor.dtype == torch.int32
        self.lens = query_starts.diff().tolist()
        self.sizes = sizes
        if self.buffers is not None:
            # What graphs read, whose number of rows is fixed.
            assert len(starts) == len(self.buffers[0])
            assert len(last_lens) == len(self.buffers[2])
            assert pages.data_ptr() == self.buffers[1].data_ptr()
            assert starts[-1] == len(pages)
            self.buffers[0].copy_(starts)
            self.buffers[2].copy_(last_lens)
            return
        self.listed(starts, pages, last_lens)

    def listed(self, starts: Tensor, pages: Tensor, last_lens: Tensor) -> None:
        self.pages = [
            pages[begin:end].tolist()
            for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False)
        ]
        self.last_lens = last_lens.tolist()

    def run(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        out: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        if self.buffers is not None:
            self.listed(*self.buffers)
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
            out[start : start + length] = v_scale * plain(
                query[start : start + length],
                keys,
                values,
                self.options["sm_scale"] * k_scale,
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


def write_known(
    self: PagedAttention, layer: int, key: Tensor, value: Tensor | None, slots: Tensor
) -> None:
    """Padding has no slot."""
    kept = slots >= 0
    PagedAttention.write(
        self, layer, key[kept], None if value is None else value[kept], slots[kept]
    )


def stage(
    kv_lens: Tensor,
    slots: Tensor,
    table: Tensor,
    kv_lens_to: Tensor,
    slots_to: Tensor,
    table_to: Tensor,
    rows: int,
) -> None:
    kv_lens_to[:rows] = 0
    slots_to[:rows] = -1
    table_to[:rows] = 0
    kv_lens_to[: len(kv_lens)] = kv_lens
    slots_to[: len(slots)] = slots
    table_to[: len(table), : table.shape[1]] = table


def list_pages(
    table: Tensor, kv_lens: Tensor, starts: Tensor, pages: Tensor, window: int, block_size: int
) -> None:
    for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        first = max(int(kv_lens[row]) - window, 0) // block_size if window else 0
        pages[begin:end] = table[row, first : first + end - begin]


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    from tgi_cli.attention import flashinfer as backend
    from tgi_cli.attention import triton
    from tgi_cli.attention.triton import TritonAttention

    # Triton's kernels need a GPU.
    monkeypatch.setattr(TritonAttention, "write", write_known)
    monkeypatch.setattr(triton, "stage", stage)
    monkeypatch.setattr(backend, "list_pages", list_pages)
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
def test_layers_with_spans_run_triton_s_kernels_where_a_step_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def attend(self: Any, layer: int, query: Tensor, *_: object) -> Tensor:
        taken.append(layer)
        return query

    from tgi_cli.attention.triton import TritonAttention

    monkeypatch.setattr(TritonAttention, "attend", attend)
    attention = make([KVSpec(2, DIM, spans="window"), KVSpec(2, DIM)])
    query, key = (torch.randn(9, heads, DIM).to(torch.bfloat16) for heads in (6, 2))
    for until in (None, torch.full((9,), 8, dtype=torch.int32)):
        metadata = make_metadata([[3]], [9], [9], BLOCK)
        metadata.visible_until = until
        attention.plan(metadata)
        for layer in (0, 1):
            attention(layer, query, key, key, 0.1)
    assert taken == [0]


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


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("flashinfer")
def test_decodes_of_a_fixed_size_are_planned_before_each_replay(window: int | None) -> None:
    """A graph repeats what its launches read: here, all that a capture's call has read."""
    attention = make([KVSpec(2, DIM, window)])
    reference = create_attention("torch", [KVSpec(2, DIM, window)], BLOCK, torch.bfloat16, CPU)
    reference.allocate(200)
    for ours, theirs in zip(attention.stored, reference.stored, strict=True):
        theirs.copy_(ours.normal_())
    buffers = attention.decode_buffers(6, 12)
    assert buffers is not None
    for rows, kv_lens in ((4, []), (4, [70, 16, 130]), (4, [17]), (6, [1, 2, 3, 64, 65, 150])):
        count = len(kv_lens)
        tables = [
            list(range(12 * row, 12 * row + -(-kv // BLOCK))) for row, kv in enumerate(kv_lens)
        ]
        query = torch.randn(rows, 4, DIM).bfloat16()
        attention.plan_padded(None, rows)
        if count:
            metadata = make_metadata(tables, [1] * count, kv_lens, BLOCK)
            # As a graph has it written on the device: the host is asked for the lengths alone.
            stage(
                metadata.kv_lens,
                metadata.slot_mapping,
                metadata.block_table[:, :12],
                buffers.kv_lens,
                buffers.slot_mapping,
                buffers.block_table,
                rows,
            )
            reference.plan(metadata)
            attention.plan_replay(rows, np.array(kv_lens))
        output = attention.attend(0, query, 0.2)
        assert output.isfinite().all()
        if count:
            wanted = reference(0, query[:count], None, None, 0.2)
            torch.testing.assert_close(output[:count], wanted, atol=0.02, rtol=0.02)


@pytest.mark.usefixtures("flashinfer")
def test_scales_of_a_checkpoint_are_handed_on() -> None:
    attention = make([KVSpec(2, DIM)], torch.float8_e4m3fn)
    assert attention.use_scales({0: KVScales(4.0, 8.0)})
    batch = Batch(MIXED, 6, 2, torch.bfloat16, dim=DIM)
    batch.keys = [each * 400 for each in batch.keys]
    batch.values = [each * 800 for each in batch.values]
    batch.scale /= 400

    def kept(numbers: Tensor, scale: float) -> Tensor:
        return (numbers.float() / scale).to(torch.float8_e4m3fn).float() * scale

    for row, output in enumerate(batch.attend(attention, 0)):
        keys, values = kept(batch.keys[row], 4.0), kept(batch.values[row], 8.0)
        wanted = plain(batch.queries[row], keys, values, batch.scale, KVSpec(2, DIM))
        torch.testing.assert_close(output.double() / 800, wanted / 800, atol=0.02, rtol=0)


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
