"""Paged attention by the kernels in C++, for bfloat16 on a CPU.

kernels/cpp/paged.h describes the algorithm, and why a token's result depends only on its own
sequence, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata, PagedAttention
from tgi_cli.attention.spec import KVSpec
from tgi_cli.kernels import cpp_library, threads
from tgi_cli.kernels.program_parts import SPAN_CODES

TILE = 16
"""Tokens whose keys and values are contiguous in the cache."""

_MAX_HEAD_DIM = 576
_LINE = 64
"""Bytes of a cache line; vectors begin at its multiples."""

_CACHE_DTYPES = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


class StepArgs(Structure):
    """``Step`` of kernels/cpp/attention.h, which describes the fields."""

    _fields_ = (
        ("sequences", c_int64),
        ("tokens", c_int64),
        ("query_start", c_void_p),
        ("kv_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("slots", c_void_p),
        ("visible_until", c_void_p),
    )


class CacheArgs(Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("dtype", c_int32),
    )


class AttentionArgs(Structure):
    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("output", c_void_p),
        ("output_stride", c_int64),
        ("heads", c_int64),
        ("cache", CacheArgs),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("chunk", c_int64),
        ("spans", c_int64),
        ("bias", c_void_p),
        ("distances", c_int64),
    )


class CppAttention(PagedAttention):
    """Over tiles of 16 tokens: ``key_cache`` and ``value_cache`` hold [blocks, tiles of a block,
    kv_heads, head_dim or value_width * 16], in the order of kernels/cpp/attention.h.

    Raises:
        ValueError: there is no library for this processor, or it does not take these arguments;
            see :meth:`supports`.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(specs, block_size, dtype, device, cache_dtype)
        library = cpp_library()
        if library is None:
            raise ValueError(
                "attention's kernels were not compiled; python -m tgi_cli.kernels does"
            )
        if device.type != "cpu" or not self.supports(specs, block_size, dtype, cache_dtype):
            raise ValueError(
                "attention's kernels are for bfloat16 on a CPU, heads of 16 n to"
                f" {_MAX_HEAD_DIM}, and blocks of {TILE} n tokens"
            )
        self.step = StepArgs()
        """Arguments of the last :meth:`plan`; its pointers are valid until the next."""
        self._blocks = torch.empty(0, 0, dtype=torch.uint8)
        self._planned: tuple[Tensor | None, ...] = ()
        self._stored = (0, 0)
        self._step_pointer = byref(self.step)
        self.caches = (CacheArgs * len(self.specs))(
            *(
                CacheArgs(
                    None,
                    None,
                    block_size,
                    0,
                    spec.num_kv_heads,
                    spec.head_dim,
                    spec.value_width,
                    self._cache_code,
                )
                for spec in self.specs
            )
        )
        """Per layer, side by side; valid until the next :meth:`allocate`."""
        self._calls = [
            AttentionArgs(
                cache=cache,
                window=spec.window or 0,
                chunk=spec.chunk or 0,
                spans=SPAN_CODES[spec.spans],
            )
            for cache, spec in zip(self.caches, self.specs, strict=True)
        ]
        self._cache_pointers = [byref(cache) for cache in self.caches]
        self._call_pointers = [byref(call) for call in self._calls]
        self._attend = library.tgi_attention
        self._attend.argtypes = [POINTER(AttentionArgs), POINTER(StepArgs), c_int]
        self._attend.restype = None
        self._store = library.tgi_store_kv
        self._store.argtypes = [
            POINTER(CacheArgs), c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int
        ]  # fmt: skip
        self._store.restype = None

    @staticmethod
    def supports(
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> bool:
        """Whether the kernels are for such models and caches."""
        return (
            dtype == torch.bfloat16
            and (cache_dtype or dtype) in _CACHE_DTYPES
            and block_size % TILE == 0
            and all(
                width % 16 == 0 and width <= _MAX_HEAD_DIM and not (spec.gathered or spec.index)
                for spec in specs
                for width in (spec.head_dim, spec.value_width)
            )
        )

    @property
    def _cache_code(self) -> int:
        return _CACHE_DTYPES[self.cache_dtype]

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.key_cache, self.value_cache = [], []
        # One piece: numpy asks for huge pages where it is large, and gets memory that the system
        # gives as it is written (torch.zeros writes it). A block of all layers is contiguous, so
        # that a few sequences take a few of those pages, not some for each layer.
        buffer = np.zeros(num_blocks * self.block_bytes + _LINE, dtype=np.uint8)
        start = -buffer.ctypes.data % _LINE
        memory = torch.from_numpy(buffer)[start : start + num_blocks * self.block_bytes]
        self._blocks = memory.view(num_blocks, -1)
        blocks = memory.view(self.cache_dtype).view(num_blocks, -1)
        start = 0
        for spec, cache, call in zip(self.specs, self.caches, self._calls, strict=True):
            shape = (self.block_size // TILE, spec.num_kv_heads)
            key_shape = (*shape, spec.head_dim * TILE)
            end = start + math.prod(key_shape)
            keys = blocks[:, start:end].view(num_blocks, *key_shape)
            cache.keys, cache.values = keys.data_ptr(), None
            # The leading dimensions of a tile's keys are the first of its numbers.
            values = keys[..., : spec.value_width * TILE]
            if not spec.values_in_keys:
                value_shape = (*shape, spec.value_width * TILE)
                start, end = end, end + math.prod(value_shape)
                values = blocks[:, start:end].view(num_blocks, *value_shape)
                cache.values = values.data_ptr()
            start = end
            self.key_cache.append(keys)
            self.value_cache.append(values)
            cache.block_stride = self.block_bytes
            call.cache = cache

    def _block_bytes(self) -> list[Tensor]:
        return [self._blocks]

    def write(self, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        self._put(layer, (len(slots), slots.data_ptr()), key, value)

    def _put(self, layer: int, slots: tuple[int, int], key: Tensor, value: Tensor | None) -> None:
        """``slots`` are how many there are, and where."""
        key, key_stride = _rows(key)
        address = value_stride = None
        if value is not None:
            value, value_stride = _rows(value)
            address = value.data_ptr()
        self._store(
            self._cache_pointers[layer],
            *slots,
            key.data_ptr(),
            key_stride,
            address,
            value_stride or 0,
            threads(),
        )

    def plan(self, metadata: AttentionMetadata) -> None:
        starts, kv_lens = metadata.query_start_loc, metadata.kv_lens
        table, slots = metadata.block_table, metadata.slot_mapping
        assert starts.dtype == kv_lens.dtype == table.dtype == torch.int32
        assert slots.dtype == torch.int64
        starts, kv_lens, slots = starts.contiguous(), kv_lens.contiguous(), slots.contiguous()
        if table.stride(1) != 1:
            table = table.contiguous()
        until = metadata.visible_until
        if until is not None:
            assert until.dtype == torch.int32
            until = until.contiguous()
        self._planned = (starts, kv_lens, table, slots, until)
        step = self.step
        step.sequences, step.tokens = len(kv_lens), len(slots)
        step.query_start, step.kv_lens = starts.data_ptr(), kv_lens.data_ptr()
        step.block_table, step.table_stride = table.data_ptr(), table.stride(0)
        step.slots = slots.data_ptr()
        step.visible_until = None if until is None else until.data_ptr()
        self._stored = (len(slots), slots.data_ptr())

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        count, spec = threads(), self.specs[layer]
        query, query_stride = _rows(query)
        if key is not None:
            self._put(layer, self._stored, key, value)
        if spec.value_dim is None:
            # The fastest way to make a tensor: 1.6 us, where new_empty takes 4.7.
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
        else:
            output = query.new_empty(*query.shape[:2], spec.value_dim)
        call = self._calls[layer]
        call.query, call.query_stride = query.data_ptr(), query_stride
        call.output, call.output_stride = output.data_ptr(), output.stride()[0]
        call.heads = query.shape[1]
        call.scale, call.softcap = scale, softcap or 0.0
        if sinks is None:
            call.sinks = None
        else:
            sinks = sinks.to(torch.float32).contiguous()
            call.sinks = sinks.data_ptr()
        call.bias = None
        if bias is not None:
            # The kernel reads keys in their order, which is that of falling distances.
            bias = bias.to(torch.float32).flip(1)
            call.bias, call.distances = bias.data_ptr(), bias.shape[1]
        self._attend(self._call_pointers[layer], self._step_pointer, count)
        return output


def _rows(some: Tensor) -> tuple[Tensor, int]:
    """[T, heads, head_dim] with contiguous tokens, and their stride."""
    token, head, one = some.stride()
    if one == 1 and head == some.shape[2]:
        return some, token
    some = some.contiguous()
    return some, some.stride()[0]
