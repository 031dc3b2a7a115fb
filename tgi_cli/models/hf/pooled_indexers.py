"""Indexers that score means of several tokens: those of GLM-5.3-Flash and of Qwen 4.

A text is cut into pools of equal size. A query attends to the tokens of the best pools, and to
those after the last pool that is complete. Caches have the numbers of single tokens, as prefixes
are reused and cut anywhere; the means are made of them in each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.attention.sparse import ChosenRows, Pools, choose_tokens


def is_pooled(indexer: Any) -> bool:
    """Whether an indexer is one of these."""
    return hasattr(indexer, "index_kpool_compress_gate") or hasattr(indexer, "compress_ratio")


def chooser(indexer: Any, rotary: Any) -> Callable[..., ChosenRows | None]:
    """What an indexer computes, in place of its forward and with the same arguments.

    Args:
        indexer: transformers' module.
        rotary: the decoder's rotary embedding, if it has one.

    Returns:
        A function that returns the choice; None where queries attend to all tokens that they see,
        and in a dry run.
    """
    if hasattr(indexer, "index_kpool_compress_gate"):
        return partial(_by_gated_means, indexer)
    return partial(_by_means, indexer, rotary)


def _by_gated_means(
    indexer: Any, hidden_states: Tensor, q_resid: Tensor, *_: object, **__: object
) -> ChosenRows | None:
    """GLM-5.3-Flash's: gates weigh the keys of a pool, number by number."""
    query = indexer.wq_b(q_resid)[0].view(-1, indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(hidden_states))[0]
    gate = F.linear(hidden_states, indexer.index_kpool_compress_gate)[0]
    kept = torch.cat((key, gate.to(key.dtype)), -1)
    context = indexer.tgi_attention
    layer = context.index_cache(indexer, kept)
    if kept.is_meta:
        return None
    weights = indexer.weights_proj(hidden_states)[0].float()
    weights = weights * (indexer.softmax_scale * indexer.n_heads**-0.5)
    bias = indexer.index_kpool_compress_ape.float()

    def weighed(keys: Tensor, _: Tensor) -> Tensor:
        own, gates = keys.chunk(2, -1)
        return (torch.softmax(gates + bias, 2) * own).sum(2)

    pools = Pools(indexer.index_kpool, weighed)
    return choose_tokens(context.step, layer, query, kept, weights, indexer.index_topk, pools)


def _by_means(
    indexer: Any,
    rotary: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: object,
    **__: object,
) -> ChosenRows | None:
    """Qwen 4's: the mean of a pool is normed, and rotated as the first of its tokens would be."""
    tokens, heads, dim = hidden_states.shape[1], indexer.index_n_heads, indexer.index_head_dim
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    both = indexer.index_qk_proj(hidden_states)[0].view(tokens, heads + 1, dim)
    cos, sin = position_embeddings
    query = indexer.q_layernorm(both[None, :, :heads])
    query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2)[0]
    key = both[:, heads]
    context = getattr(indexer, "tgi_attention", None)
    if context is None:  # states are rehearsed first
        return None
    layer = context.index_cache(indexer, key)
    if key.is_meta:
        return None

    def normed(keys: Tensor, positions: Tensor) -> Tensor:
        means = indexer.k_layernorm(keys.mean(2).to(key.dtype))
        cos, sin = rotary(means, positions[None])
        rotated: Tensor = rotate(means[:, None], cos=cos, sin=sin)
        return rotated[:, 0].float()

    weights = torch.full((tokens, heads), dim**-0.5, device=key.device)
    pools = Pools(indexer.compress_ratio, normed)
    return choose_tokens(context.step, layer, query, key, weights, indexer.token_budget, pools)
