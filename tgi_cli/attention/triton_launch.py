"""Launches of the attention kernels, for layers that agree in what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgi_cli.attention import triton_tiles as tiles
from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.spec import KVSpec
from tgi_cli.attention.triton_cache import how_to_read
from tgi_cli.attention.triton_kernels import decode_kernel, prefill_kernel
from tgi_cli.attention.triton_reduce import Parts, add_up
from tgi_cli.attention.triton_work import Rule, Work, constants
from tgi_cli.kernels.program_parts import SPAN_CODES

FEW_ROWS = 64
"""Rows of queries, heads times tokens, up to which the tokens of a sequence are few: decodes,
drafts to verify, the ends of prompts."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the kernels are compiled for.

    Attributes:
        spec: specification of the cache.
        heads: heads of queries.
        block_size: tokens of a block.
        dtype, cache_dtype: of queries, and of cached keys and values.
        softcap, sinks: whether there are any.
        distances: columns of the bias; 0 if there is none.
        spans: whether there are bidirectional spans that it sees.
    """

    spec: KVSpec
    heads: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    softcap: bool = False
    sinks: bool = False
    distances: int = 0
    spans: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernels are run for a kind of layer.

    Attributes:
        rule: how sequences become work.
        decode, prefill: tiles.
        programs: programs of decodes that the device runs at once.
        hardware: the device.
        constants: compile-time arguments of both kernels.
    """

    rule: Rule
    decode: tiles.Tile
    prefill: tiles.Tile
    programs: int
    hardware: tiles.Hardware
    constants: dict[str, Any]

    @classmethod
    def of(cls, kind: LayerKind, hardware: tiles.Hardware) -> Launch:
        """Choose tiles for the ``hardware``."""
        spec = kind.spec
        group = kind.heads // spec.num_kv_heads
        keys = tiles.HeadTile.of(spec.head_dim)
        values = tiles.HeadTile.of(spec.value_width)
        sizes = max(keys.dims, values.dims), kind.dtype.itemsize, kind.cache_dtype.itemsize
        plain = spec.chunk is None and not (kind.softcap or kind.distances or kind.spans)
        decode = tiles.decode_tile(hardware, *sizes, group, plain)
        prefill = tiles.prefill_tile(hardware, *sizes, group, spec.chunk is not None)
        rule = Rule(
            group=group,
            few_rows=decode.rows // group * group,
            many_rows=prefill.rows // group * group,
            # Of a span all is seen: which keys a query sees does not follow from its position.
            window=0 if spec.spans == "whole" else spec.reach or 0,
            chunked=spec.chunk is not None,
            few_tokens=max(FEW_ROWS // group, 1),
        )
        shared = tiles.tile_bytes(decode, *sizes)
        programs = tiles.programs_at_once(hardware, decode, shared)
        compiled = {
            "KV_HEADS": spec.num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": spec.head_dim,
            "VALUE_DIM": spec.value_width,
            "VALUE_ROW": spec.head_dim if spec.values_in_keys else spec.value_width,
            "BLOCK_SIZE": kind.block_size,
            **constants(rule),
            "SEEN": spec.reach or 0,
            "SPANS": SPAN_CODES[spec.spans] if kind.spans else 0,
            "DISTANCES": kind.distances,
            "HAS_CAP": kind.softcap,
            "HAS_SINKS": kind.sinks,
            "FP8": how_to_read(kind.cache_dtype, hardware.casts_fp8),
            # Of float32 a tensor core takes 10 bits of mantissa: a sum of three such products has
            # its precision (https://arxiv.org/abs/2203.03341).
            "PRECISION": "tf32x3" if kind.dtype == torch.float32 else "tf32",
            "BLOCK_D": keys.block,
            "REST_D": keys.rest,
            "BLOCK_V": values.block,
            "REST_V": values.rest,
        }
        return cls(rule, decode, prefill, programs, hardware, compiled)

    def run(
        self,
        metadata: AttentionMetadata,
        work: Work,
        output: Tensor,
        sinks: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        """Attend for all tokens of a step.

        Args:
            metadata: metadata of the step.
            work: its lists, by ``rule``.
            output: [T, heads, value_dim], contiguous; written.
            sinks: sinks of each head.
            arguments: what the kernels take besides.
        """
        until = metadata.visible_until
        arguments = {
            **arguments,
            **self.constants,
            "output": output,
            "query_start_loc": metadata.query_start_loc,
            "kv_lens": metadata.kv_lens,
            "block_table": metadata.block_table,
            # Where it is not read, any other tensor of its dtype: kernels are compiled for that.
            "visible_until": metadata.kv_lens if until is None else until,
            "table_stride": metadata.block_table.stride(0),
            "items": work.items,
            "starts": work.starts,
            "parts_at": work.parts_at,
            "counts": work.counts,
        }
        kv_heads, (heads, value_dim) = self.constants["KV_HEADS"], output.shape[1:]
        if work.few.items:
            parts = Parts.empty(work.few, heads, value_dim, output.device)
            decode_kernel[(min(work.few.items * kv_heads, self.programs),)](
                **arguments,
                parts=parts.numbers,
                part_sums=parts.sums,
                BLOCK_M=self.decode.rows,
                BLOCK_N=self.decode.keys,
                num_warps=self.decode.warps,
                num_stages=self.decode.stages,
                maxnreg=self.decode.registers,
            )
            if work.few.parts:
                add_up(parts, work, metadata, output, sinks, kv_heads, self.hardware, many=False)
        if work.many.items:
            parts = Parts.empty(work.many, heads, value_dim, output.device)
            # A program per item, which the device gives to whichever processor is free. Where the
            # host knows but a limit of their number, most would have none: some per processor.
            programs = work.many.items
            if not metadata.query_lens_host:
                programs = min(programs, max(4 * self.hardware.processors // kv_heads, 1))
            prefill_kernel[(programs, kv_heads)](
                **arguments,
                parts=parts.numbers,
                part_sums=parts.sums,
                many_at=work.few.items,
                BLOCK_M=self.prefill.rows,
                BLOCK_N=self.prefill.keys,
                num_warps=self.prefill.warps,
                num_stages=self.prefill.stages,
            )
            if work.many.parts:
                add_up(parts, work, metadata, output, sinks, kv_heads, self.hardware, many=True)
