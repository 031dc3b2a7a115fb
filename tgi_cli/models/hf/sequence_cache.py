"""What transformers' decoders take as their cache: one sequence's keys and values, in its blocks.

A sequence of an encoder-decoder model has P encoder tokens and then those of the decoder. Its
blocks hold, in each layer, the keys and values of cross-attention at positions 0 to P - 1 and those
of the decoder's self-attention from position P on, so a token takes as much memory as in any other
model. Both are gathered from the blocks when a layer attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.models.hf.masks import Unsupported


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Which cache of a :class:`PagedAttention` each decoder layer uses.

    Attributes:
        specs: specifications of the caches.
        own: index of the cache of each layer's self-attention.
        cross: of its cross-attention; the same one where they have the same sizes.
    """

    specs: tuple[KVSpec, ...]
    own: tuple[int, ...]
    cross: tuple[int, ...]

    @classmethod
    def of(cls, filled: EncoderDecoderCache) -> CacheLayout:
        """The layout for a model that has filled ``filled`` in a dry run.

        Raises:
            Unsupported: its layers do not all have self-attention and cross-attention.
        """
        parts = (filled.self_attention_cache.layers, filled.cross_attention_cache.layers)
        if len(parts[0]) != len(parts[1]) or not parts[0]:
            raise Unsupported("has decoder layers that do not keep keys and values of both kinds")
        specs: list[KVSpec] = []
        own, cross = [], []
        for layers in zip(*parts, strict=True):
            mine, theirs = map(_spec, layers)
            own.append(len(specs))
            specs.append(mine)
            if theirs != mine:
                specs.append(theirs)
            cross.append(len(specs) - 1)
        return cls(tuple(specs), tuple(own), tuple(cross))


def _spec(layer: Any) -> KVSpec:
    keys, values = layer.keys, layer.values
    if keys is None or keys.ndim != 4:
        raise Unsupported("keeps keys and values in a form of its own")
    return KVSpec(keys.shape[1], keys.shape[3], value_dim=values.shape[3])


class _LayerInBlocks(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one sequence in one layer, at consecutive positions of its blocks."""

    is_sliding = False
    is_initialized = True

    def __init__(
        self, attention: PagedAttention, index: int, blocks: Tensor, first: int, length: int
    ) -> None:
        """Begin at position ``first``; ``length`` positions have been written."""
        self._attention = attention
        self._index = index
        self._blocks = blocks
        self._first = first
        self._length = length

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """[1, heads, length, dimensions]"""
        return self._gather(self._attention.key_cache[self._index])

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """[1, heads, length, dimensions]"""
        return self._gather(self._attention.value_cache[self._index])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [1, heads, n, dimensions]; returns all of them."""
        attention, size = self._attention, self._attention.block_size
        begin = self._first + self._length
        self._length += key_states.shape[2]
        positions = torch.arange(begin, self._first + self._length, device=key_states.device)
        slots = self._blocks.index_select(0, positions // size) * size + positions % size
        key, value = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        attention.write(self._index, key, value, slots)
        return self.keys, self.values

    def _gather(self, cache: Tensor) -> Tensor:
        size, end = self._attention.block_size, self._first + self._length
        begin = self._first // size
        blocks = self._blocks[begin : -(-end // size)]
        found = self._attention.raw(cache).index_select(0, blocks).view(cache.dtype)
        tokens = found.flatten(0, 1)[self._first - begin * size : end - begin * size]
        return tokens.transpose(0, 1)[None].to(self._attention.dtype)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is to be made: the blocks are there."""


def sequence_cache(
    layout: CacheLayout,
    attention: PagedAttention,
    blocks: Tensor,
    encoder_tokens: int,
    decoder_tokens: int,
    encoded: bool,
) -> EncoderDecoderCache:
    """The cache of one sequence, for a forward pass of transformers' decoder.

    Args:
        layout: layout of the model.
        attention: has the blocks of all sequences.
        blocks: int64 [n], the sequence's block table.
        encoder_tokens: length of its prompt.
        decoder_tokens: tokens that the decoder has computed.
        encoded: whether the keys and values of cross-attention have been written.
    """

    def part(indices: tuple[int, ...], first: int, length: int) -> Cache:
        return Cache([_LayerInBlocks(attention, i, blocks, first, length) for i in indices])

    return EncoderDecoderCache(
        part(layout.own, encoder_tokens, decoder_tokens),
        part(layout.cross, 0, encoder_tokens if encoded else 0),
    )
