"""Paged attention by FlashInfer's kernels (https://docs.flashinfer.ai), an optional package.

FlashInfer plans on the host, per step and per kind of layer, what its kernels then run: so do
:meth:`FlashInferAttention.plan` and, for a kind that it has not met before, the first call of it.
A step that a CUDA graph holds has wrappers of its own, one per number of rows, whose plan is made
again before each replay. Triton writes the cache in all steps, and lists the pages of such steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.spec import KVSpec
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.attention.triton_cache import list_pages
from tgi_cli.errors import ConfigError

HEAD_DIMS = (64, 128, 256)
"""Dimensions of heads that its kernels support."""
WORKSPACE_BYTES = 128 << 20
"""Workspace for partial results, as its documentation advises."""
PLAN_BYTES = 8 << 20
"""Memory that its wrappers take for a plan."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a plan depends on besides the step; layers with equal values share a plan."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    softcap: float | None


@dataclass(slots=True)
class _Captured:
    """Tensors at fixed addresses that all graphs of one kind of layer read."""

    starts: Tensor
    """int32 [max_rows + 1], on the device: where each sequence's pages begin."""
    last_lens: Tensor
    """int32 [max_rows]."""
    pages: Tensor
    """int32."""
    workspace: Tensor
    """Workspace of all plans, since one graph runs at a time."""
    wrappers: dict[int, Any] = field(default_factory=dict)
    """Wrappers by number of rows."""
    listed: tuple[object, bool] | None = None
    """The plan whose pages are listed, and whether that was captured."""


@dataclass(slots=True)
class _Wrappers:
    """FlashInfer's, of one kind of layer."""

    decode: Any
    prefill: Any
    planned: AttentionMetadata | None = None
    """The step that they are planned for."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """FlashInfer's page table of some sequences, of a window's last blocks or of all."""

    starts: Tensor
    """int32 [n + 1], on the host: where each sequence's pages begin."""
    pages: Tensor
    """int32, on the device."""
    last_lens: Tensor
    """int32 [n], on the host: tokens in each last page."""


@dataclass(slots=True)
class _Host:
    """A step's lengths; ``pages`` are made once per window and part of the batch."""

    query_lens: np.ndarray
    kv_lens: np.ndarray
    pages: dict[tuple[int | None, bool], _Pages] = field(default_factory=dict)


class FlashInferAttention(TritonAttention):
    """For float16 and bfloat16, heads of 64, 128 or 256 dimensions, and no sinks.

    Layers with bidirectional spans run Triton's kernels in steps that have some.

    Raises:
        ConfigError: FlashInfer is not installed, or has no kernel for these dtypes and sizes.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._library = _library()
        if dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"FlashInfer has no attention for {str(dtype).removeprefix('torch.')}",
                "use bfloat16 or float16, or the attention backend triton",
            )
        if any(spec.index for spec in specs):
            raise _refusal("FlashInfer has no attention to tokens that an indexer chooses")
        for head_dim in {spec.head_dim for spec in specs}.difference(HEAD_DIMS):
            raise _refusal(f"FlashInfer has no attention for heads of {head_dim} dimensions")
        for spec in specs:
            if spec.value_width != spec.head_dim or spec.values_in_keys:
                raise _refusal(
                    f"FlashInfer has no paged attention for keys of {spec.head_dim} and values of "
                    f"{spec.value_width} dimensions"
                )
            if spec.chunk is not None:
                raise _refusal("FlashInfer has no attention over chunks of positions")
        super().__init__(specs, block_size, dtype, device, cache_dtype)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._kinds: dict[_Kind, _Wrappers] = {}
        self._metadata: AttentionMetadata | None = None
        self._captured: dict[_Kind, _Captured] = {}
        self._rows = 0
        self._kv_lens = np.empty(0, np.int32)
        self._host = _Host(np.empty(0), np.empty(0))
        self._copied: Any = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        self._metadata = metadata
        self._host = _Host(
            np.array(metadata.query_lens_host, np.int32), np.array(metadata.kv_lens_host, np.int32)
        )
        if self._copied is not None:
            # FlashInfer copies a plan from memory that its next one overwrites. What this waits
            # for comes first in the step before, whose own predecessor is done.
            self._copied.synchronize()
        for kind, wrappers in self._kinds.items():
            self._plan_kind(kind, wrappers, metadata)
        if self._copied is not None:
            self._copied.record()

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        # Rows of padding attend to a token of any block: to numbers, whatever the memory had.
        for cache in map(self.raw, self.stored):
            cache.zero_()

    def decode_buffers(self, max_rows: int, max_blocks: int) -> AttentionMetadata | None:
        self._captured.clear()
        return super().decode_buffers(max_rows, max_blocks)

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        super().plan_fixed(metadata, max_context)
        # A plan of prompts depends on their lengths: such steps run Triton's kernels.
        self._metadata, self._rows = None, 0

    def plan_padded(self, metadata: AttentionMetadata | None, rows: int) -> None:
        super().plan_padded(metadata, rows)
        self._metadata, self._rows = None, rows
        self.plan_replay(
            rows, np.array([] if metadata is None else metadata.kv_lens_host, np.int32)
        )

    def plan_replay(self, rows: int, kv_lens: np.ndarray) -> None:
        # Padding has a page with one token: without any, a plan has no defined result.
        self._kv_lens = np.ones(rows, np.int32)
        self._kv_lens[: len(kv_lens)] = kv_lens
        if self._copied is not None:
            self._copied.synchronize()
        for kind, captured in self._captured.items():
            if rows in captured.wrappers:
                self._plan_captured(kind, captured, rows)
        if self._copied is not None:
            self._copied.record()

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if bias is not None:
            raise _refusal(
                "this model's attention has a bias by distance, which FlashInfer's paged kernels "
                "have not"
            )
        if sinks is not None:
            raise _refusal(
                "this model's attention has sinks, which FlashInfer's paged kernels have not"
            )
        metadata, spec = self._metadata, self.specs[layer]
        kind = _Kind(query.shape[1], spec.num_kv_heads, spec.head_dim, spec.window, scale, softcap)
        spans = metadata is not None and metadata.visible_until is not None
        if (metadata is None and not self._rows) or (spans and spec.spans != "none"):
            return super().attend(layer, query, scale, softcap)
        if metadata is None:
            return self._attend_captured(layer, query, kind)
        wrappers = self._kinds.get(kind)
        if wrappers is None:
            wrappers = self._kinds[kind] = self._make(kind)
        if wrappers.planned is not metadata:
            self._plan_kind(kind, wrappers, metadata)
        query = query.contiguous()
        output, decodes = torch.empty_like(query), metadata.num_decodes
        caches = self.key_cache[layer], self.value_cache[layer]
        scales = self._scales_of(layer)
        if decodes:
            wrappers.decode.run(query[:decodes], caches, out=output[:decodes], **scales)
        if decodes < len(query):
            wrappers.prefill.run(query[decodes:], caches, out=output[decodes:], **scales)
        return output

    def _scales_of(self, layer: int) -> dict[str, float]:
        scales = self.scales.get(layer)
        return {} if scales is None else {"k_scale": scales.key, "v_scale": scales.value}

    def _attend_captured(self, layer: int, query: Tensor, kind: _Kind) -> Tensor:
        """In a step of decodes that was planned for a number of rows."""
        captured = self._captured.get(kind)
        if captured is None:
            captured = self._captured[kind] = self._make_captured()
        wrapper = captured.wrappers.get(self._rows)
        if wrapper is None:  # in the call before a capture
            wrapper = captured.wrappers[self._rows] = self._make_decode(kind, captured)
            self._plan_captured(kind, captured, self._rows)
        step = self._planned
        capturing = query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured.listed != (step, capturing):
            metadata = step.metadata
            starts = captured.starts[: self._rows + 1]
            window = kind.window or 0
            list_pages(
                metadata.block_table,
                metadata.kv_lens,
                starts,
                captured.pages,
                window,
                self.block_size,
            )
            captured.listed = (step, capturing)
        query = query.contiguous()
        output = torch.empty_like(query)
        caches = self.key_cache[layer], self.value_cache[layer]
        wrapper.run(query, caches, out=output, **self._scales_of(layer))
        return output

    def _make_captured(self) -> _Captured:
        assert self._buffers is not None
        max_rows, max_blocks = self._buffers.block_table.shape

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        return _Captured(
            zeros(max_rows + 1),
            zeros(max_rows),
            zeros(max_rows * max_blocks),
            zeros(PLAN_BYTES, torch.uint8),
        )

    def _make_decode(self, kind: _Kind, captured: _Captured) -> Any:
        rows = self._rows
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=_tensor_cores(kind),
            paged_kv_indptr_buffer=captured.starts[: rows + 1],
            paged_kv_indices_buffer=captured.pages,
            paged_kv_last_page_len_buffer=captured.last_lens[:rows],
        )
        wrapper.reset_workspace_buffer(self._workspace, captured.workspace)
        return wrapper

    def _plan_captured(self, kind: _Kind, captured: _Captured, rows: int) -> None:
        lens = self._kv_lens
        starts, last_lens, _ = _page_counts(lens - 1, lens, kind.window, self.block_size)
        # The pages are listed on the device, in the graph: the plan itself needs their number.
        captured.wrappers[rows].plan(
            torch.from_numpy(starts),
            captured.pages[: int(starts[-1])],
            torch.from_numpy(last_lens),
            *self._sizes(kind),
            **self._options(kind),
        )

    def _make(self, kind: _Kind) -> _Wrappers:
        return _Wrappers(
            self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=_tensor_cores(kind)
            ),
            self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"),
        )

    def _sizes(self, kind: _Kind) -> tuple[int, int, int, int]:
        return kind.heads, kind.kv_heads, kind.head_dim, self.block_size

    def _options(self, kind: _Kind) -> dict[str, Any]:
        return {
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.softcap or 0.0,
            # Positions before the query's own.
            "window_left": -1 if kind.window is None else kind.window - 1,
            "q_data_type": self.dtype,
            "kv_data_type": self.cache_dtype,
        }

    def _plan_kind(self, kind: _Kind, wrappers: _Wrappers, metadata: AttentionMetadata) -> None:
        decodes = metadata.num_decodes
        sizes, options = self._sizes(kind), self._options(kind)
        if decodes:
            pages = self._pages(kind.window, metadata, True)
            wrappers.decode.plan(pages.starts, pages.pages, pages.last_lens, *sizes, **options)
        if decodes < len(metadata.query_lens_host):
            pages = self._pages(kind.window, metadata, False)
            query_starts = np.zeros(len(pages.last_lens) + 1, np.int32)
            np.cumsum(self._host.query_lens[decodes:], out=query_starts[1:])
            wrappers.prefill.plan(
                torch.from_numpy(query_starts),
                pages.starts,
                pages.pages,
                pages.last_lens,
                *sizes,
                causal=True,
                **options,
            )
        wrappers.planned = metadata

    def _pages(self, window: int | None, metadata: AttentionMetadata, decodes: bool) -> _Pages:
        """Drop the blocks outside the window, which may be another sequence's, or free."""
        known = self._host.pages.get((window, decodes))
        if known is not None:
            return known
        part = slice(0, metadata.num_decodes) if decodes else slice(metadata.num_decodes, None)
        query_lens, kv_lens = self._host.query_lens[part], self._host.kv_lens[part]
        earlier = kv_lens - query_lens
        starts, last_lens, first = _page_counts(earlier, kv_lens, window, self.block_size)
        counts = np.diff(starts)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, counts)
        places = torch.from_numpy(np.stack((rows, columns)).astype(np.int64))
        if self.device.type == "cuda":
            places = places.pin_memory().to(self.device, non_blocking=True)
        made = _Pages(
            torch.from_numpy(starts),
            metadata.block_table[part][places[0], places[1]],
            torch.from_numpy(last_lens),
        )
        self._host.pages[window, decodes] = made
        return made


def _page_counts(
    earlier: np.ndarray, kv_lens: np.ndarray, window: int | None, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where pages begin, tokens in the last ones, and the first ones that are seen; int32."""
    first = (0 if window is None else np.maximum(earlier - window + 1, 0)) // block_size
    starts = np.zeros(len(kv_lens) + 1, np.int32)
    np.cumsum(-(-kv_lens // block_size) - first, out=starts[1:])
    return starts, (kv_lens - 1) % block_size + 1, np.broadcast_to(first, kv_lens.shape)


def _tensor_cores(kind: _Kind) -> bool:
    """Whether to use tensor cores: FlashInfer advises it from 4 query heads per KV head on."""
    return kind.heads // kind.kv_heads >= 4


def _refusal(message: str) -> ConfigError:
    return ConfigError(message, "use the attention backend triton")


def _library() -> ModuleType:
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"the attention backend flashinfer needs the package of that name ({error})",
            "pip install flashinfer-python, or use the attention backend triton",
        ) from error
