"""Paged attention by Triton's kernels, for CUDA.

A step's leading sequences of few tokens, decodes above all, share one launch in which several
programs may split the KV of each; the others, prompts, have another. No launch waits for the
device. Steps of decodes alone can be planned for a fixed number of rows, and then a CUDA graph can
hold them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from tgi_cli.attention import triton_tiles as tiles
from tgi_cli.attention.base import AttentionMetadata, KVSpec, PagedAttention
from tgi_cli.attention.triton_cache import how_to_read, stage, write_cache
from tgi_cli.attention.triton_kernels import decode_kernel, prefill_kernel, reduce_kernel
from tgi_cli.attention.triton_latent import LatentRows, Sequences, attend_latents

_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class _Leading:
    """The sequences at the front that are split like decodes."""

    sequences: int
    tokens: int
    most: int
    """Tokens of the longest of them, of this step."""
    max_keys: int
    """No KV of theirs is longer."""


class _StepTensors:
    """A plan. How many sequences lead depends on how many heads share a KV head."""

    def __init__(
        self, metadata: AttentionMetadata, leading: _Leading | None = None, padded: bool = False
    ) -> None:
        self.metadata = metadata
        self.padded = padded
        """Whether there may be tokens that belong to no sequence."""
        self._leading = leading
        self._leading_of: dict[int, _Leading] = {}

    def leading(self, group: int) -> _Leading:
        """Where ``group`` query heads share a KV head."""
        if self._leading is not None:
            return self._leading
        known = self._leading_of.get(group)
        if known is None:
            lens = self.metadata.query_lens_host
            kv_lens = self.metadata.kv_lens_host
            end, limit = self.metadata.num_decodes, tiles.SHORT_ROWS // group
            while end < len(lens) and lens[end] <= limit and kv_lens[end] >= tiles.LONG_KEYS:
                end += 1
            most = max(lens[:end], default=0)
            max_keys = max(kv_lens[:end], default=0)
            known = self._leading_of[group] = _Leading(end, sum(lens[:end]), most, max_keys)
        return known


class TritonAttention(PagedAttention):
    """For bfloat16, float16 and float32, and any head_dim: above 256 its tiles become small.

    The cache may be of 8-bit floats on every GPU; those from compute capability 8.9 on read them
    by casts, the others from their bits.
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
        self.hardware = tiles.Hardware()
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            index = torch.cuda.current_device() if device.index is None else device.index
            self.hardware = tiles.Hardware(
                properties.multi_processor_count,
                driver.active.utils.get_device_properties(index)["max_shared_mem"],
                (properties.major, properties.minor),
            )
        self._step: _StepTensors | None = None
        self._buffers: AttentionMetadata | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        self.planned, self._step = metadata, _StepTensors(metadata)

    def decode_buffers(self, max_rows: int, max_blocks: int) -> AttentionMetadata | None:
        if any(spec.index for spec in self.specs):
            return None  # how long sequences are is known on the host, outside of a graph

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        starts = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        slots = zeros(max_rows, dtype=torch.int64).fill_(-1)
        lens, table = zeros(max_rows), zeros(max_rows, max_blocks)
        self._buffers = AttentionMetadata(starts, lens, table, slots, [], [], max_rows)
        return self._buffers

    def plan_padded(self, metadata: AttentionMetadata | None, rows: int) -> None:
        buffers = self._buffers
        self.planned = None
        if buffers is None:
            raise ValueError("decodes of a padded size need decode_buffers first")
        max_rows, max_blocks = buffers.block_table.shape
        source = metadata
        if source is None:
            nothing = slice(0, 0)
            source = AttentionMetadata(
                buffers.query_start_loc[:1],
                buffers.kv_lens[nothing],
                buffers.block_table[nothing],
                buffers.slot_mapping[nothing],
                [],
                [],
                0,
            )
        count, width = source.block_table.shape
        if not count <= rows <= max_rows or width > max_blocks:
            raise ValueError(
                f"{count} rows of {width} blocks as {rows} rows, of {max_rows} x {max_blocks}"
            )
        if not count == source.num_decodes == source.slot_mapping.shape[0]:
            raise ValueError(f"{source.num_decodes} of {count} sequences are decodes")
        stage(
            source.kv_lens,
            source.slot_mapping,
            source.block_table,
            buffers.kv_lens,
            buffers.slot_mapping,
            buffers.block_table,
            rows,
        )
        padded = AttentionMetadata(
            buffers.query_start_loc[: rows + 1],
            buffers.kv_lens[:rows],
            buffers.block_table[:rows],
            buffers.slot_mapping[:rows],
            [1] * rows,
            [],
            rows,
        )
        # That the longest could fill its blocks is all that a launch may depend on.
        self._step = _StepTensors(padded, _Leading(rows, rows, 1, max_blocks * self.block_size))

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        if any(spec.index or _has_latents(spec) for spec in self.specs):
            raise ValueError("latent and sparse attention have no steps of unknown lengths")
        rows = metadata.num_decodes
        self.planned = None
        self._step = _StepTensors(metadata, _Leading(rows, rows, 1, max_context), padded=True)

    @property
    def step_slots(self) -> Tensor:
        return self._planned.metadata.slot_mapping

    @property
    def _planned(self) -> _StepTensors:
        if self._step is None:
            raise ValueError("attention before the first plan")
        return self._step

    def write(self, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        key, value = _rows(key), None if value is None else _rows(value)
        key_cache, value_cache = self.raw(self.key_cache[layer]), self.raw(self.value_cache[layer])
        bits = how_to_read(self.cache_dtype, casts=False)
        write_cache(key, value, key_cache, value_cache, slots, bits)

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
        if key is not None:
            self.write(layer, key, value, self.step_slots)
        return self.attend(layer, query, scale, softcap, sinks, bias)

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        step, spec = self._planned, self.specs[layer]
        query = _rows(query)
        tokens, heads, head_dim = query.shape
        value_dim = spec.value_width
        make = torch.zeros if step.padded else torch.empty
        output = make((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
        if bias is not None:
            bias = bias.float().contiguous()
        leading = step.leading(heads // spec.num_kv_heads)
        if _has_latents(spec) and softcap is None and bias is None:
            self._attend_latents(layer, query, output, scale, sinks)
            return output
        common = {
            "query": query,
            "key_cache": self.raw(self.key_cache[layer]),
            "value_cache": self.raw(self.value_cache[layer]),
            "sinks": query if sinks is None else sinks,
            "bias": query if bias is None else bias,
            "output": output,
            "scale": scale * _LOG2E if softcap is None else 2.0 * scale / softcap,
            "cap": 0.0 if softcap is None else softcap * _LOG2E,
            "query_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "table_stride": step.metadata.block_table.stride(0),
            "KV_HEADS": spec.num_kv_heads,
            "GROUP": heads // spec.num_kv_heads,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "VALUE_ROW": head_dim if spec.values_in_keys else value_dim,
            "BLOCK_SIZE": self.block_size,
            "WINDOW": spec.reach or 0,
            "CHUNKED": spec.chunk is not None,
            "DISTANCES": 0 if bias is None else bias.shape[1],
            "HAS_CAP": softcap is not None,
            "HAS_SINKS": sinks is not None,
            "FP8": how_to_read(self.cache_dtype, self.hardware.casts_fp8),
            # Of float32 a tensor core takes 10 bits of mantissa: a sum of three such products has
            # its precision (https://arxiv.org/abs/2203.03341).
            "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
            "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
            "BLOCK_V": max(triton.next_power_of_2(value_dim), 16),
        }
        if leading.tokens:
            self._decode(step.metadata, leading, common)
        if tokens > leading.tokens:
            self._prefill(step.metadata, leading, tokens, common)
        return output

    def _attend_latents(
        self, layer: int, query: Tensor, output: Tensor, scale: float, sinks: Tensor | None
    ) -> None:
        metadata, leading = self._planned.metadata, self._planned.leading(query.shape[1])
        bits = how_to_read(self.cache_dtype, self.hardware.casts_fp8)
        rows = LatentRows(self.raw(self.key_cache[layer]), self.specs[layer].value_width, bits)
        groups = [Sequences(0, leading.sequences, leading.most, leading.max_keys)]
        if len(query) > leading.tokens:
            first = leading.sequences
            lens, kv_lens = metadata.query_lens_host[first:], metadata.kv_lens_host[first:]
            groups.append(Sequences(first, len(lens), max(lens), max(kv_lens)))
        for group in groups:
            if group.count:
                attend_latents(query, output, rows, metadata, group, scale, sinks, self.hardware)

    def _decode(
        self, metadata: AttentionMetadata, leading: _Leading, common: dict[str, Any]
    ) -> None:
        output, kv_heads = common["output"], common["KV_HEADS"]
        heads, value_dim = output.shape[1:]
        tile = tiles.decode_tile(
            self.hardware,
            max(common["BLOCK_D"], common["BLOCK_V"]),
            self.dtype.itemsize,
            self.cache_dtype.itemsize,
            # One tile for whatever is short, as each is compiled when it is first met.
            common["GROUP"] if leading.most == 1 else tiles.SHORT_ROWS,
        )
        keys = leading.max_keys
        if common["WINDOW"]:
            keys = min(keys, common["WINDOW"] + leading.most + tile.keys)
        splits = tiles.num_splits(self.hardware, tile, leading.sequences, kv_heads, keys)
        parts = part_sums = output
        if splits > 1:
            shape = (leading.tokens, heads, splits)
            parts = output.new_empty(*shape, value_dim, dtype=torch.float32)
            part_sums = output.new_empty(shape, dtype=torch.float32)
        several = leading.most > 1
        decode_kernel[(kv_heads, splits, leading.sequences)](
            **common,
            query_start_loc=metadata.query_start_loc,
            kv_lens=metadata.kv_lens,
            block_table=metadata.block_table,
            parts=parts,
            part_sums=part_sums,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            SEVERAL=several,
            WHOLE=splits == 1,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits == 1:
            return
        reduce_kernel[(heads, leading.most, leading.sequences)](
            parts,
            part_sums,
            metadata.query_start_loc,
            metadata.kv_lens,
            common["sinks"],
            output,
            splits,
            HEADS=heads,
            VALUE_DIM=value_dim,
            WINDOW=common["WINDOW"],
            CHUNKED=common["CHUNKED"],
            HAS_SINKS=common["HAS_SINKS"],
            BLOCK_S=8 if splits <= 8 else tiles.MAX_SPLITS,
            BLOCK_N=tile.keys,
            BLOCK_V=common["BLOCK_V"],
            SEVERAL=several,
            num_warps=4,
        )

    def _prefill(
        self, metadata: AttentionMetadata, leading: _Leading, tokens: int, common: dict[str, Any]
    ) -> None:
        tile = tiles.prefill_tile(
            self.hardware,
            max(common["BLOCK_D"], common["BLOCK_V"]),
            self.dtype.itemsize,
            self.cache_dtype.itemsize,
            common["GROUP"],
        )
        first = leading.sequences
        sequences = len(metadata.kv_lens) - first
        most_tiles = (tokens - leading.tokens) // (tile.rows // common["GROUP"]) + sequences
        prefill_kernel[(most_tiles, common["KV_HEADS"])](
            **common,
            query_start_loc=metadata.query_start_loc[first:],
            kv_lens=metadata.kv_lens[first:],
            block_table=metadata.block_table[first:],
            num_sequences=sequences,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _has_latents(spec: KVSpec) -> bool:
    """Whether all heads share keys that have values within."""
    return spec.values_in_keys and spec.num_kv_heads == 1 and spec.reach is None


def _rows(tensor: Tensor) -> Tensor:
    """With the dimensions of a head side by side, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def probe() -> None:
    """Compile and launch kernels. Raises what Triton raises where it cannot, and RuntimeError for
    GPUs before compute capability 8.0, whose tensor cores it does not know."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("its kernels are for GPUs of compute capability 8.0 and later")
    attention = TritonAttention([KVSpec(1, 16)], 16, torch.float16, device)
    attention.allocate(1)
    attention.decode_buffers(1, 1)
    attention.plan_padded(None, 1)
    tokens = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    attention(0, tokens, tokens, tokens, 1.0)
