"""Attention of image encoders: in both directions, within an image, a tile or a window.

Without FlashAttention, transformers calls attention once for each window (Qwen2.5-VL: 168 calls in
a layer for a photo of 1080 lines), and masks other images. Here all windows of a layer are one call
of our kernels for bfloat16 on a CPU, each a sequence whose tokens are one bidirectional span.
Elsewhere torch computes: windows of equal size are one batch, and an image cut into windows has at
most four sizes of them, of which three are at its edges.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.cpu_cpp import TILE, CppAttention
from tgi_cli.attention.spec import KVSpec
from tgi_cli.kernels import cpp_library
from tgi_cli.models.hf.tower_pieces import NO_PAUSES, pauses_of, pieces
from tgi_cli.models.vision import PausePoints

_CPU = torch.device("cpu")

_WHOLE = "tgi_tower"
"""The name under which towers find :func:`tower_attention`; masks are as for ``sdpa``."""

_WINDOWS = "tgi_flash_windows"
"""transformers hands the bounds of all windows to functions with "flash" in their names."""

_BOUNDED = "fullatt_block_indexes"
"""Configurations of towers with windows name the layers without."""

_CHANGING = ("position_bias", "softcap")
"""What changes scores, and the kernels are not given."""

_MASKED = "PixtralVisionModel"
"""Masks the patches of other images by a matrix of all patches, or hands their bounds over."""


def replace_attention(core: nn.Module) -> None:
    """Let the layers of a model's tower attend by :func:`tower_attention`."""
    whole: Any = getattr(core, "config", None)
    for module in core.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, _BOUNDED) or type(module).__name__ == _MASKED:
            config._attn_implementation_internal = _WINDOWS
        elif config is not whole and getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation_internal = _WHOLE


def tower_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention in both directions, within each of consecutive windows if there are any.

    Args:
        module: module of transformers.
        query: [B, heads, T, dim]; ``key`` and ``value`` likewise, perhaps with fewer heads.
        attention_mask: as for ``sdpa``; None with windows.
        scaling: of the scores. Default: dim ** -0.5.
        cu_seq_lens_q: int [windows + 1], where each window begins; the last is T. B is 1 then.
        is_causal: Default: the module's.
        **others: for ``sdpa``.

    Returns:
        [B, T, heads, dim], and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is not None and key.shape[1] < query.shape[1]:  # heads share keys and values
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    plain = attention_mask is None and not causal and query.shape == key.shape == value.shape
    plain = plain and all(others.get(name) is None for name in _CHANGING)
    if plain and _usable(query, key, value):
        batch, _, count, _ = query.shape
        starts = cu_seq_lens_q
        if starts is None:
            starts = torch.arange(batch + 1, dtype=torch.int32) * count
        # [tokens, heads, dim], without a copy where projections gave them so
        rows = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
        attended = _KERNELS.attend(rows[0], rows[1], rows[2], starts, scale, pauses_of(module))
        return attended.view(batch, count, *attended.shape[1:]), None
    if cu_seq_lens_q is not None:
        assert attention_mask is None
        return _by_sizes(query, key, value, scale, cu_seq_lens_q), None
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **others
    )
    return output, None


def _usable(*tensors: Tensor) -> bool:
    return cpp_library() is not None and all(
        each.dtype == torch.bfloat16 and each.device.type == "cpu" and each.numel()
        for each in tensors
    )


class _Kernels(threading.local):
    """Attention by our kernels, with memory for the keys and values of the largest image so far.

    Of each thread: shards may be threads.
    """

    def __init__(self) -> None:
        self._by_shape: dict[tuple[int, int], CppAttention] = {}

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        scale: float,
        pauses: PausePoints = NO_PAUSES,
    ) -> Tensor:
        """[T, heads, dim] each, of windows that begin at ``starts``, int [windows + 1]."""
        pauses()
        heads, dim = query.shape[1:]
        width = -(-dim // TILE) * TILE  # the kernels take multiples of 16
        if width != dim:
            query, key, value = (pad(each, (0, width - dim)) for each in (query, key, value))
        bounds = torch.tensor(sorted({*starts.tolist()}))  # without empty windows
        lengths = bounds.diff()
        blocks = -(-lengths // TILE)
        first = blocks.cumsum(0) - blocks
        attention = self._attention(heads, width, int(blocks.sum()))
        window = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        offsets = torch.arange(len(query)) - bounds[window]
        table = (first[:, None] + torch.arange(int(blocks.max()))).int()
        slots, last = first[window] * TILE + offsets, (lengths[window] - 1).int()

        def plan(rows: slice) -> None:
            """For some queries: each window has some of its own, or is left out."""
            begins = bounds.clamp(rows.start, rows.stop)
            own = begins.diff() > 0
            counts, of = begins.diff()[own], lengths[own]
            attention.plan(
                AttentionMetadata(
                    query_start_loc=torch.cat([begins[:-1][own], begins[-1:]]).int() - rows.start,
                    kv_lens=of.int(),
                    block_table=table[own],
                    slot_mapping=slots[rows],
                    query_lens_host=counts.tolist(),
                    kv_lens_host=of.tolist(),
                    num_decodes=0,
                    visible_until=last[rows],
                )
            )

        if pauses.check is None:
            plan(slice(0, len(query)))
            return attention(0, query, key, value, scale)[..., :dim]
        attention.write(0, key, value, slots)
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows in pieces(len(query), 4.0 * heads * width * float(lengths.float().mean())):
            plan(rows)
            attended[rows] = attention(0, query[rows], None, None, scale)
            pauses()
        return attended[..., :dim]

    def _attention(self, heads: int, width: int, blocks: int) -> CppAttention:
        attention = self._by_shape.get((heads, width))
        if attention is None:
            spec = KVSpec(num_kv_heads=heads, head_dim=width, spans="whole")
            attention = CppAttention([spec], TILE, torch.bfloat16, _CPU)
            self._by_shape[heads, width] = attention
        if attention.num_blocks < blocks:
            attention.allocate(blocks)
        return attention


_KERNELS = _Kernels()


def _by_sizes(query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: Tensor) -> Tensor:
    """By torch, the windows of each size at once: [1, T, heads, dim]."""
    if len(bounds) == 2:
        whole = scaled_dot_product_attention(query, key, value, scale=scale)
        return whole.transpose(1, 2)
    starts, lengths = bounds[:-1].long(), bounds.diff()
    # [T, heads, dim]
    tokens = [each[0].transpose(0, 1) for each in (query, key, value)]
    output = torch.empty_like(tokens[2], memory_format=torch.contiguous_format)
    for length in sorted({each for each in lengths.tolist() if each}):
        own = starts[lengths == length]
        where = (own[:, None] + torch.arange(length, device=own.device)).flatten()
        # [windows, heads, length, dim]
        queries, keys, values = (
            each.index_select(0, where).view(len(own), length, *each.shape[1:]).transpose(1, 2)
            for each in tokens
        )
        attended = scaled_dot_product_attention(queries, keys, values, scale=scale)
        output.index_copy_(0, where, attended.transpose(1, 2).flatten(0, 1))
    return output[None]


for _name in (_WHOLE, _WINDOWS):
    AttentionInterface.register(_name, tower_attention)
AttentionMaskInterface.register(_WHOLE, sdpa_mask)
