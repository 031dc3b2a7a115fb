"""Sparse attention, as far as it selects all keys.

Some models score keys by an indexer, and attend to the best alone (DeepSeek Sparse Attention,
https://arxiv.org/abs/2512.02556). Until a text is longer than their number, these are all keys: the
indexer is not asked, and what it would cache is not kept. Longer texts are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TOP_K = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text", "mistral_large4_text")
"""Model types whose indexers choose ``index_topk`` keys for each query."""

_BLOCKS = ("minimax_m3_vl_text",)
"""Model types whose indexers choose ``index_topk_blocks`` blocks of keys."""


def select_everything(decoder: nn.Module, config: Any) -> int | None:
    """Let the indexers of ``decoder`` select all keys.

    Returns:
        How long a text may be for that; None if there are no indexers.
    """
    if config.model_type in _TOP_K:
        limit = int(config.index_topk)
        forward: Callable[..., Tensor | None] = _indices
    elif config.model_type in _BLOCKS:
        limit = int(config.index_topk_blocks * config.index_block_size)
        forward = _nothing
    else:
        return None
    found = False
    for module in decoder.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            indexer.forward = forward  # type: ignore[method-assign]
            found = True
    return limit if found else None


def _indices(hidden: Tensor, *_: object, **__: object) -> Tensor:
    """Something of the shape of indices, which attention here does not look at."""
    return torch.zeros(1, hidden.shape[1], 1, dtype=torch.int32, device=hidden.device)


def _nothing(*_: object, **__: object) -> None:
    return None
