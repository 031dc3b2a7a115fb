"""Latent attention of transformers' models.

Modules with latent attention expand tokens' latents by ``expand_kv`` before they call attention.
Without that, attention gets latents and rotated keys, which are cached as they are
(:mod:`tgi_cli.layers.latent`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import ALONE
from tgi_cli.layers import Build
from tgi_cli.layers.latent import LatentExpansion
from tgi_cli.quantization import Unquantized


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
