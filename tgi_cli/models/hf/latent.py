"""Latent and sparse attention of transformers' models.

Modules with latent attention expand tokens' latents by ``expand_kv`` before they call attention.
Without that, attention gets latents and rotated keys, which are cached as they are
(:mod:`tgi_cli.layers.latent`).

Modules with an indexer (DeepSeek V3.2's, https://arxiv.org/abs/2512.02556, and MiniMax M3's by
blocks) attend to the best so many tokens of a text. In shorter texts these are all, and the
indexer is left out: longer ones are not served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import ALONE
from tgi_cli.layers import Build
from tgi_cli.layers.latent import LatentExpansion
from tgi_cli.models.hf.masks import Unsupported
from tgi_cli.quantization import Unquantized


class EveryToken:
    """What an indexer chooses of a text that is short enough; and the mask that it is given."""

    dtype = torch.bool

    def __getitem__(self, _: object) -> EveryToken:
        return self

    def __and__(self, mask: Any) -> Any:
        return mask

    __rand__ = __and__

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported("computes with what its indexer chooses")


EVERY_TOKEN = EveryToken()


class _Indexer(nn.Module):
    def forward(self, *_: object, **__: object) -> EveryToken:
        return EVERY_TOKEN


def _every_token(*_: object, **__: object) -> EveryToken:
    return EVERY_TOKEN


def leave_out_indexers(decoder: nn.Module) -> tuple[list[str], int | None]:
    """Let the modules of a model attend to all tokens of a text.

    Returns:
        Paths of what was removed, and how long a text may be; None without sparse attention.
    """
    removed: list[str] = []
    limit: int | None = None
    for path, module in list(decoder.named_modules()):
        if hasattr(module, "build_attention_mask_from_topk"):
            cast(Any, module).build_attention_mask_from_topk = _every_token
        indexer: Any = getattr(module, "indexer", None)
        if hasattr(indexer, "index_topk"):
            tokens = int(indexer.index_topk)
        elif hasattr(indexer, "topk_blocks"):
            tokens = int(indexer.topk_blocks * indexer.block_size)
        elif hasattr(indexer, "token_budget"):
            tokens = int(indexer.token_budget)
        else:
            continue
        limit = tokens if limit is None else min(limit, tokens)
        module.indexer = _Indexer()
        removed.append(f"{path}.indexer")
    return removed, limit


def keep_latents(parent: Any, linear: nn.Linear, style: str | None, build: Build) -> nn.Module:
    """Let ``parent``, which has latent attention, hand latents to attention.

    ``style`` is the entry of ``linear``, its ``kv_b_proj``, in the tensor-parallel plan. Returns
    what takes the place of ``linear``.
    """
    heads, key_dim, value_dim = parent.num_heads, parent.qk_nope_head_dim, parent.v_head_dim
    if linear.bias is not None or linear.out_features != heads * (key_dim + value_dim):
        raise ValueError("kv_b_proj is not a matrix per head")
    parent.expand_kv = _keep
    own = build if style == "colwise" else replace(build, shard=ALONE)
    return LatentExpansion(own, heads, linear.in_features, key_dim, value_dim)


def keep_all_latents(decoder: nn.Module) -> None:
    """As :func:`keep_latents`, of a model that is not loaded but only looked at."""
    for module in list(decoder.modules()):
        if hasattr(module, "expand_kv"):
            linear = cast(nn.Linear, module.kv_b_proj)
            module.kv_b_proj = keep_latents(
                module, linear, None, Build(linear.weight.dtype, Unquantized())
            )


def latent_expansion(module: nn.Module) -> LatentExpansion | None:
    """What a module with latent attention makes keys and values by; None for others."""
    found = getattr(module, "kv_b_proj", None)
    return found if isinstance(found, LatentExpansion) else None


def absorbed(
    expansion: LatentExpansion, query: Tensor, latent: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries over rows, and the rows: [1, heads, T, ·] and [1, 1, T, ·], by what ``expand_kv``
    was given, [1, 1, T, ·] each."""
    heads = query[0].transpose(0, 1)
    plain, turned = heads[..., : expansion.key_dim], heads[..., expansion.key_dim :]
    queries = torch.cat((expansion.absorb(plain), turned), dim=-1)
    return queries.transpose(0, 1)[None], torch.cat((latent, rotated), dim=-1)


def _keep(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latent, rotated
