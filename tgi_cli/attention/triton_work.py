"""The attention of a step as lists of work, made on the device of the lengths of its sequences.

A work item is a tile of a sequence's queries and a chunk of its keys; kernels process lists of
items, whose partial results are then summed up. There are two lists. Sequences of *few* tokens
(decodes, drafts, the ends of prompts) have small tiles, one or several tokens in each, and chunks
of 256 keys, up to 32 of them, which then become longer. Those of *many* tokens have large tiles;
their keys are cut only where there are too few tiles to occupy a device.

Both rules depend on the sequence's own lengths alone, so which sequences share a step changes
neither what is summed nor the order: a result keeps its last bit. And as an item has a bounded
number of keys, lengths may differ as they like: a step takes as long as its keys do. The items
that take longest come first.

Nothing here waits for the device: the host knows how many items there can be, the device how many
there are. So the lists of a captured step follow the lengths that it is replayed with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.triton_attend import first_visible
from tgi_cli.attention.triton_tiles import KEY_ALIGNMENT
from tgi_cli.device.triton_launch import cached_launches

_DOUBLINGS = 10
"""So that chunks are of 256 to 262,144 keys."""
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """How the sequences of a step become work: what a list depends on besides their lengths.

    Attributes:
        group: rows of queries per token: query heads of a KV head.
        few_rows, many_rows: rows of a tile, multiples of ``group`` unless rows of a token may
            be in two tiles.
        window, chunked: of the cache; see WINDOW and CHUNKED of the kernels.
        few_tokens: most tokens of a sequence that counts as short.
        chunk: keys of a chunk, a multiple of KEY_ALIGNMENT, for few tokens.
        max_chunks: chunks of a sequence of few tokens; if there were more, they become longer.
        many_chunk: the least keys of a chunk for many tokens.
        split_tokens: limit of tokens times chunks, for many tokens.
    """

    group: int
    few_rows: int
    many_rows: int
    window: int = 0
    chunked: bool = False
    few_tokens: int = 16
    chunk: int = 256
    max_chunks: int = 32
    many_chunk: int = 2048
    split_tokens: int = 512

    def bounds(self, query_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tiles and chunks of each sequence, int64, as :func:`work_kernel` has them."""
        few = query_lens <= self.few_tokens
        first = np.zeros_like(kv_lens)
        if self.window:
            earlier = np.maximum(kv_lens - query_lens, 0)
            first = np.maximum(earlier - self.window + 1, 0)
            if self.chunked:
                first = earlier // self.window * self.window
        keys = kv_lens - first // KEY_ALIGNMENT * KEY_ALIGNMENT
        size = np.where(few, self.chunk, self.many_chunk)
        most = np.maximum(self.split_tokens // np.maximum(query_lens, 1), 1)
        most = np.where(few, self.max_chunks, most)
        for _ in range(_DOUBLINGS):
            size = np.where(size * most < keys, size * 2, size)
        rows = np.where(few, self.few_rows, self.many_rows)
        return -(-query_lens * self.group // rows), np.maximum(-(-keys // size), 1)


@dataclass(frozen=True, slots=True)
class ListSize:
    """What the host knows of a list: limits of what the device finds.

    Attributes:
        items: number of items.
        parts: tokens in partial results, each once per chunk; 0: nothing is to be summed up.
        tokens: tokens of the longest sequence.
    """

    items: int = 0
    parts: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The lists of a step, int32 on the device.

    Attributes:
        items: the sequence of each item: few's, then, from ``few.items`` on, many's.
        starts: [B], each sequence's first item within its list. Its items are tile after tile, and
            for each the chunks in order.
        parts_at: [B], where each sequence's parts begin: those of token t and chunk c are at
            ``parts_at + c * query_len + t``, all heads together.
        counts: [2], items of either list.
        few, many: their sizes.
        rule: they follow it.
    """

    items: Tensor
    starts: Tensor
    parts_at: Tensor
    counts: Tensor
    few: ListSize
    many: ListSize
    rule: Rule


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def partition(
    query_lens: tl.tensor,
    kv_lens: tl.tensor,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Whether tokens are few, first key that is seen, where chunks begin, their size and number."""
    few = query_lens <= FEW_TOKENS
    first = kv_lens * 0
    if WINDOW > 0:
        first = first_visible(tl.maximum(kv_lens - query_lens, 0), WINDOW, CHUNKED)
    begin = first // ALIGNMENT * ALIGNMENT
    keys = kv_lens - begin
    size = tl.where(few, CHUNK, MANY_CHUNK)
    most = tl.where(few, MAX_CHUNKS, tl.maximum(SPLIT_TOKENS // tl.maximum(query_lens, 1), 1))
    for _ in tl.static_range(10):  # _DOUBLINGS
        size = tl.where(size * most < keys, size * 2, size)
    return few, first, begin, size, tl.maximum(tl.cdiv(keys, size), 1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def lengths_of(
    query_start_loc: tl.tensor,
    kv_lens: tl.tensor,
    sequences: tl.tensor,
    there: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Where queries of ``sequences`` begin, how many they are, and KV lengths; 0 if not there."""
    kv_len = tl.load(kv_lens + sequences, mask=there, other=0)
    query_begin = tl.load(query_start_loc + sequences, mask=there, other=0)
    query_end = tl.load(query_start_loc + sequences + 1, mask=there, other=0)
    query_len = query_end - query_begin
    return query_begin, query_len, kv_len


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _work_of(
    query_start_loc: tl.tensor,
    kv_lens: tl.tensor,
    sequences: tl.tensor,
    there: tl.tensor,
    GROUP: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    MANY_ROWS: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Whether tokens are few, the number of items, how long one takes, and tokens in parts."""
    _, query_len, kv_len = lengths_of(query_start_loc, kv_lens, sequences, there)
    few, _, begin, size, chunks = partition(
        query_len, kv_len, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
        WINDOW, CHUNKED, ALIGNMENT,
    )  # fmt: skip
    rows = tl.where(few, FEW_ROWS, MANY_ROWS)
    tiles = (query_len * GROUP + rows - 1) // rows
    parts = tl.where(chunks > 1, chunks * query_len, 0)
    return few, tiles * chunks, tl.minimum(size, kv_len - begin), parts


# The compiler must not specialize on what differs between steps: it would compile again.
@cached_launches
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["num_sequences", "many_at"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "kv_lens", "items", "starts", "parts_at", "counts"
    ],
)  # fmt: skip
def work_kernel(
    query_start_loc: tl.tensor,  # [B + 1]
    kv_lens: tl.tensor,  # [B]
    items: tl.tensor,
    starts: tl.tensor,  # [B]
    parts_at: tl.tensor,  # [B]
    counts: tl.tensor,  # [2]
    num_sequences: int,
    many_at: int,  # where in items the list of many begins
    GROUP: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    MANY_ROWS: tl.constexpr,
    FEW_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MANY_CHUNK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (B,). A program finds its sequence's place by looking at all the others."""
    sequence = tl.program_id(0)
    few, count, cost, _ = _work_of(
        query_start_loc, kv_lens, sequence, sequence < num_sequences,
        GROUP, FEW_ROWS, MANY_ROWS, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
        WINDOW, CHUNKED, ALIGNMENT,
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    parts_before = tl.zeros((BLOCK,), dtype=tl.int32)
    few_count = tl.zeros((BLOCK,), dtype=tl.int32)
    many_count = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, num_sequences, BLOCK):
        others = begin + lanes
        few_there, counted, costs, parts = _work_of(
            query_start_loc, kv_lens, others, others < num_sequences,
            GROUP, FEW_ROWS, MANY_ROWS, FEW_TOKENS, CHUNK, MAX_CHUNKS, MANY_CHUNK, SPLIT_TOKENS,
            WINDOW, CHUNKED, ALIGNMENT,
        )  # fmt: skip
        same = few_there == few
        earlier = (costs > cost) | ((costs == cost) & (others < sequence))
        before += tl.where(same & earlier, counted, 0)
        parts_before += tl.where(same & (others < sequence), parts, 0)
        few_count += tl.where(few_there, counted, 0)
        many_count += tl.where(few_there, 0, counted)
    start = tl.sum(before, 0)
    tl.store(starts + sequence, start)
    tl.store(parts_at + sequence, tl.sum(parts_before, 0))
    if sequence == 0:
        tl.store(counts, tl.sum(few_count, 0))
        tl.store(counts + 1, tl.sum(many_count, 0))
    start += tl.where(few, 0, many_at)
    for begin in range(0, count, BLOCK):
        own = begin + lanes
        tl.store(items + start + own, own * 0 + sequence, mask=own < count)


def constants(rule: Rule) -> dict[str, int | bool]:
    """The rule, as arguments that all kernels take."""
    return {
        "FEW_TOKENS": rule.few_tokens,
        "CHUNK": rule.chunk,
        "MAX_CHUNKS": rule.max_chunks,
        "MANY_CHUNK": rule.many_chunk,
        "SPLIT_TOKENS": rule.split_tokens,
        "WINDOW": rule.window,
        "CHUNKED": rule.chunked,
        "ALIGNMENT": KEY_ALIGNMENT,
    }


def sizes_of(rule: Rule, query_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[ListSize, ListSize]:
    """The exact sizes of both lists, of lengths (int64 [B]) that the host knows."""
    tiles, chunks = rule.bounds(query_lens, kv_lens)
    items, few = tiles * chunks, query_lens <= rule.few_tokens

    def size(mine: np.ndarray) -> ListSize:
        parts = int((query_lens * chunks)[mine & (chunks > 1)].sum())
        return ListSize(int(items[mine].sum()), parts, int(query_lens[mine].max(initial=0)))

    return size(few), size(~few)


def limits_of(
    rule: Rule, rows: int, max_keys: int, tokens: int | None = None
) -> tuple[ListSize, ListSize]:
    """Limits of both, where the device alone knows the lengths.

    Args:
        rule: the rule.
        rows: number of sequences.
        max_keys: limit of their KV lengths.
        tokens: tokens of all of them. Default: each has one.
    """
    decodes = tokens is None
    if tokens is None:
        tokens = rows
    keys = max_keys
    if rule.window:
        keys = min(keys, rule.window + tokens + KEY_ALIGNMENT)
    chunks = min(max(-(-keys // rule.chunk), 1), rule.max_chunks)
    few_tiles = rows * -(-rule.group // rule.few_rows)
    if not decodes:
        most = -(-rule.few_tokens * rule.group // rule.few_rows)
        few_tiles = min(tokens * rule.group // rule.few_rows + rows, rows * most)
    items = few_tiles * chunks
    longest = 1 if decodes else min(rule.few_tokens, tokens)
    few = ListSize(items, tokens * chunks if chunks > 1 else 0, longest)
    if decodes:
        return few, ListSize()
    items = tokens * rule.group // rule.many_rows + rows
    parts = 0
    if keys > rule.many_chunk:
        # n tokens in c chunks, n * c <= split_tokens, have n * c * group / many_rows items, and c
        # more for the tile that is not filled.
        shortest = rule.few_tokens + 1
        chunks = min(-(-keys // rule.many_chunk), rule.split_tokens // shortest)
        each = rule.split_tokens * rule.group // rule.many_rows + chunks
        split = min(rows, tokens // shortest)
        items, parts = items + split * each, split * rule.split_tokens
    return few, ListSize(items, parts, tokens)


def make_work(
    metadata: AttentionMetadata,
    rule: Rule,
    sizes: tuple[ListSize, ListSize],
) -> Work:
    """Launch the kernel that makes the lists of a step, in memory for lists of these ``sizes``."""
    few, many = sizes
    rows = metadata.kv_lens.shape[0]
    memory = torch.empty(
        few.items + many.items + 2 * rows + 2, dtype=torch.int32, device=metadata.kv_lens.device
    )
    lengths = [few.items + many.items, rows, rows, 2]
    items, starts, parts_at, counts = torch.split(memory, lengths)
    work_kernel[(rows,)](
        metadata.query_start_loc,
        metadata.kv_lens,
        items,
        starts,
        parts_at,
        counts,
        rows,
        few.items,
        GROUP=rule.group,
        FEW_ROWS=rule.few_rows,
        MANY_ROWS=rule.many_rows,
        **constants(rule),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Work(items, starts, parts_at, counts, few, many, rule)
