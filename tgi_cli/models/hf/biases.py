"""Biases of scores that a model computes from its tokens, in place of masks and of bias tensors.

- Of a key (Doge, https://arxiv.org/abs/2412.11834): a number that every query adds to its score.
  It becomes a further dimension of the key, which queries multiply by a constant.
- Of a query and a distance (Inkling): each query has a profile, the biases of the keys that are 0,
  1, 2... positions before it. No kernel takes them; keys and values are gathered from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tgi_cli.attention import PagedAttention
from tgi_cli.device.distributed import ALONE, Shard

_MORE = 16
"""Dimensions by which a key grows for its bias: kernels take multiples of 16."""

TILE_SCORES = 1 << 24
"""Limit of the scores that are computed at once, 64 MiB of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBias:
    """Stands for a mask [1, heads, queries, keys] that is a bias of the keys.

    Attributes:
        values: [1, kv_heads, T].
        mask: what hides keys.
    """

    values: Tensor
    mask: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That the mask would have, up to its queries and keys."""
        return 1, self.values.shape[1], 1, 1

    # What a model does to give the mask one entry per query head.

    def __getitem__(self, _: object) -> KeyBias:
        return self

    def expand(self, *_: int) -> KeyBias:
        return self

    def reshape(self, *_: int) -> KeyBias:
        return self

    def folded(self, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Queries and keys [1, heads, T, head_dim + 16], whose scores have the bias."""
        wide = pad(query, (0, _MORE))
        wide[..., query.shape[-1]] = 1 / scale
        own = pad(self.values[..., None], (0, _MORE - 1)).to(key.dtype)
        return wide, torch.cat((key, own), dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """Stands for a bias [1, heads, queries, keys] that depends on queries and distances.

    Attributes:
        profiles: [1, heads, T, extent]; entry d is for the key d positions before the query. Keys
            that are farther have a bias of 0.
    """

    profiles: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The bias's dtype."""
        return self.profiles.dtype

    def float(self) -> DistanceBias:
        """In float32."""
        return self.to(torch.float32)

    def to(self, dtype: torch.dtype) -> DistanceBias:
        """In another dtype."""
        return replace(self, profiles=self.profiles.to(dtype))

    def __mul__(self, factor: Tensor) -> DistanceBias:
        """Multiplied by a number per query, [1, 1, T, 1]."""
        return replace(self, profiles=self.profiles * factor)


def replace_biases(decoder: nn.Module) -> int | None:
    """Let the modules of a model that compute such biases return stand-ins.

    Returns:
        How long a text may be; None if there is no limit. Doge hides keys in longer ones.
    """
    limit: int | None = None
    for module in decoder.modules():
        kind = type(module)
        if not kind.__module__.startswith("transformers.models."):
            continue
        if kind.__name__ == "DogeAttention":
            cast(Any, module).prepare_dynamic_mask = MethodType(_of_keys, module)
            window = cast(int, module.keep_window_size)
            limit = window if limit is None else min(limit, window)
        elif kind.__name__ in ("InklingRelativeLogits", "Inkling2RelativeLogits"):
            module.forward = MethodType(_of_distances, module)
        elif kind.__name__ == "Inkling2RelativePositionBias":  # transformers from 5.24 on
            module.forward = MethodType(_of_hidden_states, module)
    return limit


def _of_keys(
    module: Any,
    hidden_states: Tensor,
    dt_states: Tensor,
    keep_window_size: int = 0,
    attention_mask: Any = None,
) -> KeyBias:
    """``dt_states`` [1, kv_heads, T] are of all shards, whose sums they are."""
    own = cast(Shard, getattr(module, "tgi_shard", ALONE)).share(dt_states.shape[1])
    return KeyBias(dt_states[:, own], attention_mask)


def _of_distances(module: Any, relative_states: Tensor, *_: object, **__: object) -> DistanceBias:
    return DistanceBias((relative_states @ module.proj).transpose(1, 2))


def _of_hidden_states(module: Any, hidden: Tensor, _: object, position_ids: Tensor) -> DistanceBias:
    heads = module.linear(hidden).view(*hidden.shape[:-1], module.num_heads, -1)
    return _of_distances(module, module.norm(heads, position_ids))


def attend(
    attention: PagedAttention,
    layer: int,
    states: tuple[Tensor, Tensor, Tensor],
    scale: float,
    bias: DistanceBias,
    sinks: Tensor | None = None,
) -> Tensor:
    """As a call of ``attention``, with a bias by queries and distances, in float32.

    Args:
        attention: its cache ``layer`` is of a layer that gathers.
        layer: index of the cache.
        states: queries, keys and values of the step, [T, heads, dimensions] each.
        scale: factor of the scores.
        bias: bias of these queries.
        sinks: [heads, T], logits that have no value, of each query.

    Returns:
        [T, heads, value_width]
    """
    query, key, value = states
    step, spec = attention.planned, attention.specs[layer]
    assert step is not None
    attention.write(layer, key, value, step.slot_mapping)
    output = query.new_empty(*query.shape[:2], spec.value_width)
    heads, start = query.shape[1], 0
    for row, (length, end) in enumerate(zip(step.query_lens_host, step.kv_lens_host, strict=True)):
        first = attention.first_block(layer, end - length)
        keys, values = (
            attention.gather(cache[layer], row, first).repeat_interleave(
                heads // spec.num_kv_heads, 0
            )
            for cache in (attention.key_cache, attention.value_cache)
        )
        places = torch.arange(first * attention.block_size, end, device=query.device)
        tile = max(1, TILE_SCORES // (heads * len(places)))
        for begin in range(0, length, tile):
            tokens = slice(start + begin, start + min(begin + tile, length))
            position = end - length + begin
            own = torch.arange(position, position + tokens.stop - tokens.start, device=query.device)
            distances = own[:, None] - places
            scores = query[tokens].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
            scores += _at(bias.profiles[0, :, tokens].float(), distances)
            hidden = distances < 0
            if spec.window is not None:
                hidden |= distances >= spec.window
            scores.masked_fill_(hidden, float("-inf"))
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                sink = sinks[:, tokens, None].float()
                weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
            output[tokens] = (weights @ values).transpose(0, 1).to(query.dtype)
        start += length
    return output


def _at(profiles: Tensor, distances: Tensor) -> Tensor:
    """Biases [heads, queries, keys] of profiles [heads, queries, extent]."""
    extent = profiles.shape[-1]
    index = distances.clamp(0, extent - 1).expand(len(profiles), -1, -1)
    return profiles.gather(-1, index).masked_fill_(distances >= extent, 0.0)
