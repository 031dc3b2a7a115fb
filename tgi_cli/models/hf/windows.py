"""Attention within the windows of an image, many windows at once.

Without FlashAttention, transformers calls attention once for each window (Qwen2.5-VL: 168 calls in
a layer for a photo of 1080 lines). Windows of equal size are one batch here; an image cut into
windows has at most four sizes of them, of which three are at its edges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_NAME = "tgi_flash_windows"
"""transformers hands the bounds of all windows to functions with "flash" in their names."""

_BOUNDED = "fullatt_block_indexes"
"""Configurations of towers with windows name the layers without."""

_MASKED = "PixtralVisionModel"
"""Masks the patches of other images by a matrix of all patches, or hands their bounds over."""


def attend_in_windows(tower: nn.Module) -> None:
    """Let a tower's layers attend in all windows of an image by a few calls, and without masks."""
    for module in tower.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, _BOUNDED) or type(module).__name__ == _MASKED:
            config._attn_implementation_internal = _NAME


def window_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within each of consecutive windows, in both directions.

    Args:
        module: unused.
        query: [1, heads, T, dim]; ``key`` and ``value`` likewise.
        attention_mask: None.
        scaling: of the scores.
        cu_seq_lens_q: int [windows + 1], where each window begins; the last is T.

    Returns:
        [1, T, heads, dim], and no weights.
    """
    assert attention_mask is None
    if len(cu_seq_lens_q) == 2:
        whole = scaled_dot_product_attention(query, key, value, scale=scaling)
        return whole.transpose(1, 2), None
    starts, lengths = cu_seq_lens_q[:-1].long(), cu_seq_lens_q.diff()
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
        attended = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        output.index_copy_(0, where, attended.transpose(1, 2).flatten(0, 1))
    return output[None], None


AttentionInterface.register(_NAME, window_attention)
