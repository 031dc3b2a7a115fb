"""Sums over the parts that kernels of attention leave of a sequence's chunks of keys.

Flash-Decoding's second step, https://pytorch.org/blog/flash-decoding/. The constants are those of
:mod:`tgi_cli.attention.triton_kernels`. Sequences of one chunk have no parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.triton_attend import LOG2E, LOWEST
from tgi_cli.attention.triton_tiles import Hardware, next_power_of_2
from tgi_cli.attention.triton_work import ListSize, Work, constants, lengths_of, partition
from tgi_cli.device.triton_launch import cached_launches

_PROGRAMS_AT_ONCE = 8
"""Programs of :func:`reduce_kernel` that a processor holds at once, by its registers."""
_LEAST_PROGRAMS = 4
"""Per sequence, so that one with as many tokens as a list may have is no tail of the launch."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory for the parts of a list.

    Attributes:
        numbers: float32 [tokens in parts, heads, value_dim], what was attended to.
        sums: float32 [tokens in parts, heads], log2 of the sum of weights.
    """

    numbers: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, size: ListSize, heads: int, value_dim: int, device: torch.device) -> Parts:
        """For a list of this size; without parts, something that is neither written nor read."""
        if not size.parts:
            return _nothing(device)
        shape = (size.parts, heads)
        return cls(
            torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


@cache
def _nothing(device: torch.device) -> Parts:
    # Aligned like other tensors: kernels are compiled for what is.
    return Parts(*torch.empty(2, 64, dtype=torch.float32, device=device))


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize_on_alignment=["query_start_loc", "kv_lens", "parts_at"]
)
def reduce_kernel(
    parts: tl.tensor,  # float32 [tokens in parts, heads, VALUE_DIM]
    part_sums: tl.tensor,  # float32 [tokens in parts, heads]
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,
    parts_at: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the power of 2 that is not below MAX_CHUNKS
    BLOCK_V: tl.constexpr,  # that which is not below VALUE_DIM
) -> None:
    """Sequences of few tokens. Grid: (heads, any, B): programs of a sequence share its tokens.

    A program takes all chunks of one row at once, to wait for memory once.
    """
    head, sequence = tl.program_id(0), tl.program_id(2)
    query_begin, query_len, kv_len = lengths_of(query_start_loc, kv_lens, sequence, sequence >= 0)
    few, _, _, _, chunks = partition(
        query_len, kv_len, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
        WINDOW, CHUNKED, ALIGNMENT,
    )  # fmt: skip
    if few & (chunks > 1):
        dims = tl.arange(0, BLOCK_V)
        inside = dims < VALUE_DIM
        for token in range(tl.program_id(1), query_len, tl.num_programs(1)):
            # Loaded again, as the loop stores; and what is added to the chunks is 0, but of this:
            # else their addresses are computed before the loop, and take twice the registers.
            first = tl.load(parts_at + sequence)
            chunk = tl.arange(0, BLOCK_S) + tl.minimum(first, 0)
            made = chunk < chunks
            part = first + chunk * query_len + token
            place = part.to(tl.int64) * (KV_HEADS * GROUP) + head
            sums = tl.load(part_sums + place, mask=made, other=float("-inf"))
            at = parts + place[:, None] * VALUE_DIM + dims[None, :]
            part_rows = tl.load(at, mask=made[:, None] & inside[None, :], other=0.0)
            largest = tl.maximum(tl.max(sums, 0), LOWEST)
            if HAS_SINKS:
                sink = tl.load(sinks + head).to(tl.float32) * LOG2E
                largest = tl.maximum(largest, sink)
            weights = tl.exp2(sums - largest)
            total = tl.sum(weights, 0)
            if HAS_SINKS:
                total += tl.exp2(sink - largest)
            attended = tl.sum(part_rows * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
            number = (query_begin + token).to(tl.int64) * (KV_HEADS * GROUP) + head
            to = output + number * VALUE_DIM + dims
            tl.store(to, attended.to(output.dtype.element_ty), mask=inside)


@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["many_at"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "kv_lens", "items", "starts", "parts_at", "counts"
    ],
)  # fmt: skip
def reduce_tiles_kernel(
    parts: tl.tensor,  # float32 [tokens in parts, heads, VALUE_DIM]
    part_sums: tl.tensor,  # float32 [tokens in parts, heads]
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,
    items: tl.tensor,
    starts: tl.tensor,
    parts_at: tl.tensor,
    counts: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,  # [T, heads, VALUE_DIM], contiguous
    many_at: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    VALUE_DIM: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows that a program takes, a power of 2
    BLOCK_V: tl.constexpr,
    BACKWARDS: tl.constexpr,  # the last tile of a sequence is its first
) -> None:
    """Sequences of many tokens. Grid: (any, KV_HEADS, rows of a tile in blocks of BLOCK_R)."""
    kv_head = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_V)
    inside = dims < VALUE_DIM
    for item in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        sequence = tl.load(items + many_at + item)
        query_begin, query_len, kv_len = lengths_of(
            query_start_loc, kv_lens, sequence, sequence >= 0
        )
        _, _, _, _, chunks = partition(
            query_len, kv_len, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
            WINDOW, CHUNKED, ALIGNMENT,
        )  # fmt: skip
        place = item - tl.load(starts + sequence)
        # The first chunk of a tile stands for the tile.
        if (chunks > 1) & (place % chunks == 0):
            tile = place // chunks
            if BACKWARDS:
                tile = tl.cdiv(query_len * GROUP, ROWS) - 1 - tile
            own = tile * ROWS + rows
            known = (rows < ROWS) & (own < query_len * GROUP)
            heads = kv_head * GROUP + own % GROUP
            first = tl.load(parts_at + sequence) + own // GROUP
            first = first.to(tl.int64) * (KV_HEADS * GROUP) + heads
            step = query_len * (KV_HEADS * GROUP)
            largest = tl.full((BLOCK_R,), LOWEST, dtype=tl.float32)
            for chunk in range(0, chunks):
                at = part_sums + first + chunk * step
                sums = tl.load(at, mask=known, other=float("-inf"))
                largest = tl.maximum(largest, sums)
            total = tl.zeros((BLOCK_R,), dtype=tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32) * LOG2E
                largest = tl.maximum(largest, sink)
                total += tl.exp2(sink - largest)
            attended = tl.zeros((BLOCK_R, BLOCK_V), dtype=tl.float32)
            for chunk in range(0, chunks):
                each = first + chunk * step
                sums = tl.load(part_sums + each, mask=known, other=float("-inf"))
                weights = tl.exp2(sums - largest)
                at = parts + each[:, None] * VALUE_DIM + dims[None, :]
                part_rows = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0)
                attended += part_rows * weights[:, None]
                total += weights
            attended /= tl.where(total == 0.0, 1.0, total)[:, None]
            number = (query_begin + own // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + heads
            to = output + number[:, None] * VALUE_DIM + dims[None, :]
            mask = known[:, None] & inside[None, :]
            tl.store(to, attended.to(output.dtype.element_ty), mask=mask)


def _programs_of_few(tokens: int, rows: int, hardware: Hardware) -> int:
    """Programs that share the tokens of a sequence.

    One for each of the longest sequence's tokens, where the device runs all of them at once. Where
    it does not, most would have nothing to do: a step of decodes and a prompt's end has dozens of
    sequences with one token.

    Args:
        tokens: of the longest sequence in the list.
        rows: heads times sequences.
        hardware: of the device.
    """
    return min(tokens, max(_PROGRAMS_AT_ONCE * hardware.processors // rows, _LEAST_PROGRAMS))


def add_up(
    parts: Parts,
    work: Work,
    metadata: AttentionMetadata,
    output: Tensor,
    sinks: Tensor | None,
    kv_heads: int,
    hardware: Hardware,
    *,
    many: bool,
    backwards: bool = True,
) -> None:
    """Sum up the ``parts`` of one of the lists into ``output`` [T, heads, value_dim].

    Args:
        parts: as the list's kernel has left them.
        work: the lists.
        metadata: metadata of the step.
        output: contiguous.
        sinks: sinks of each head; they take part in the sum.
        kv_heads: that share the heads.
        hardware: of the device.
        many: whether it is the list of sequences with many tokens.
        backwards: of many tokens, whether the last tile of a sequence is the first of its list.
    """
    heads, value_dim = output.shape[1:]
    block_v = max(next_power_of_2(value_dim), 16)
    rule = constants(work.rule)
    sinks_or_any = output if sinks is None else sinks
    if not many:
        sequences = metadata.kv_lens.shape[0]
        programs = _programs_of_few(work.few.tokens, heads * sequences, hardware)
        reduce_kernel[(heads, programs, sequences)](
            parts.numbers,
            parts.sums,
            metadata.query_start_loc,
            metadata.kv_lens,
            work.parts_at,
            sinks_or_any,
            output,
            KV_HEADS=kv_heads,
            GROUP=work.rule.group,
            VALUE_DIM=value_dim,
            **rule,
            HAS_SINKS=sinks is not None,
            BLOCK_S=next_power_of_2(work.rule.max_chunks),
            BLOCK_V=block_v,
            num_warps=4 if block_v <= 128 else 8,
        )
        return
    rows = work.rule.many_rows
    block_r = max(min(next_power_of_2(rows), 8192 // block_v), 1)
    programs = min(work.many.items, max(4 * hardware.processors // kv_heads, 1))
    reduce_tiles_kernel[(programs, kv_heads, triton.cdiv(rows, block_r))](
        parts.numbers,
        parts.sums,
        metadata.query_start_loc,
        metadata.kv_lens,
        work.items,
        work.starts,
        work.parts_at,
        work.counts,
        sinks_or_any,
        output,
        work.few.items,
        KV_HEADS=kv_heads,
        GROUP=work.rule.group,
        ROWS=work.rule.many_rows,
        VALUE_DIM=value_dim,
        **rule,
        HAS_SINKS=sinks is not None,
        BLOCK_R=block_r,
        BLOCK_V=block_v,
        BACKWARDS=backwards,
        num_warps=8,
    )
