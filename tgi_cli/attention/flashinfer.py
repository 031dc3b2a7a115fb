"""Paged attention by FlashInfer's kernels (https://docs.flashinfer.ai), an optional package.

FlashInfer plans on the host, per step and per kind of layer, what its kernels then run: so do
:meth:`FlashInferAttention.plan` and, for a kind that it has not met before, the first call of it.
Steps that a CUDA graph holds cannot be planned so: they run Triton's kernels, which need no host,
and Triton writes the cache in all steps.
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

from tgi_cli.attention.base import AttentionMetadata, KVSpec
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.errors import ConfigError

HEAD_DIMS = (64, 128, 256)
"""What its kernels are made for."""
WORKSPACE_BYTES = 128 << 20
"""As its documentation advises, for partial results."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a plan depends on besides the step: layers that agree in it share one."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    softcap: float | None


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
            raise ConfigError(
                "FlashInfer has no attention to tokens that an indexer chooses",
                "use the attention backend triton",
            )
        for head_dim in {spec.head_dim for spec in specs}.difference(HEAD_DIMS):
            raise ConfigError(
                f"FlashInfer has no attention for heads of {head_dim} dimensions",
                "use the attention backend triton",
            )
        for spec in specs:
            if spec.value_width != spec.head_dim or spec.values_in_keys:
                raise ConfigError(
                    f"FlashInfer has no paged attention for keys of {spec.head_dim} and values of "
                    f"{spec.value_width} dimensions",
                    "use the attention backend triton",
                )
            if spec.chunk is not None:
                raise ConfigError(
                    "FlashInfer has no attention over chunks of positions",
                    "use the attention backend triton",
                )
        super().__init__(specs, block_size, dtype, device, cache_dtype)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._kinds: dict[_Kind, _Wrappers] = {}
        self._metadata: AttentionMetadata | None = None
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

    def plan_padded(self, metadata: AttentionMetadata | None, rows: int) -> None:
        super().plan_padded(metadata, rows)
        self._metadata = None

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        super().plan_fixed(metadata, max_context)
        self._metadata = None

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
            raise ConfigError(
                "this model's attention has a bias by distance, which FlashInfer's paged kernels "
                "have not",
                "use the attention backend triton",
            )
        if sinks is not None:
            raise ConfigError(
                "this model's attention has sinks, which FlashInfer's paged kernels have not",
                "use the attention backend triton",
            )
        metadata = self._metadata
        if metadata is None:
            return super().attend(layer, query, scale, softcap)
        spec = self.specs[layer]
        kind = _Kind(query.shape[1], spec.num_kv_heads, spec.head_dim, spec.window, scale, softcap)
        wrappers = self._kinds.get(kind)
        if wrappers is None:
            wrappers = self._kinds[kind] = self._make(kind)
        if wrappers.planned is not metadata:
            self._plan_kind(kind, wrappers, metadata)
        query = query.contiguous()
        output, decodes = torch.empty_like(query), metadata.num_decodes
        caches = self.key_cache[layer], self.value_cache[layer]
        if decodes:
            wrappers.decode.run(query[:decodes], caches, out=output[:decodes])
        if decodes < len(query):
            wrappers.prefill.run(query[decodes:], caches, out=output[decodes:])
        return output

    def _make(self, kind: _Kind) -> _Wrappers:
        # Its advice: from 4 query heads per KV head on, tensor cores are the faster.
        return _Wrappers(
            self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=kind.heads // kind.kv_heads >= 4
            ),
            self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"),
        )

    def _plan_kind(self, kind: _Kind, wrappers: _Wrappers, metadata: AttentionMetadata) -> None:
        decodes = metadata.num_decodes
        options = {
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.softcap or 0.0,
            # Positions before the query's own.
            "window_left": -1 if kind.window is None else kind.window - 1,
            "q_data_type": self.dtype,
            "kv_data_type": self.cache_dtype,
        }
        sizes = (kind.heads, kind.kv_heads, kind.head_dim, self.block_size)
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
        """Without the blocks behind the window: they may be another's, or not even be there."""
        known = self._host.pages.get((window, decodes))
        if known is not None:
            return known
        part = slice(0, metadata.num_decodes) if decodes else slice(metadata.num_decodes, None)
        query_lens, kv_lens = self._host.query_lens[part], self._host.kv_lens[part]
        earlier = kv_lens - query_lens
        first = (0 if window is None else np.maximum(earlier - window + 1, 0)) // self.block_size
        counts = -(-kv_lens // self.block_size) - first
        starts = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, counts)
        places = torch.from_numpy(np.stack((rows, columns)).astype(np.int64))
        if self.device.type == "cuda":
            places = places.pin_memory().to(self.device, non_blocking=True)
        made = _Pages(
            torch.from_numpy(starts),
            metadata.block_table[part][places[0], places[1]],
            torch.from_numpy((kv_lens - 1) % self.block_size + 1),
        )
        self._host.pages[window, decodes] = made
        return made


def _library() -> ModuleType:
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"the attention backend flashinfer needs the package of that name ({error})",
            "pip install flashinfer-python, or use the attention backend triton",
        ) from error
