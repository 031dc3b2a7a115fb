"""The interface of paged attention, and the cache that its backends share.

Keys and values live in blocks of ``block_size`` tokens; a sequence's block table says which
blocks hold it, in order. After "Efficient Memory Management for Large Language Model Serving
with PagedAttention" (https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention.fp8 import FP8_DTYPES, to_fp8
from tgi_cli.attention.memory import empty
from tgi_cli.attention.spec import KVScales, KVSpec
from tgi_cli.attention.states import StateCache, StateMetadata


@dataclass(slots=True)
class AttentionMetadata:
    """One step over a flat batch of T tokens of B sequences, decodes first.

    The tokens of a sequence are contiguous, in the order of the sequences; they are the last
    of its KV. Tensors are on the model's device.
    """

    query_start_loc: Tensor
    """int32 [B+1]: where each sequence's tokens begin in the flat batch."""
    kv_lens: Tensor
    """int32 [B]: KV length of each sequence, this step's tokens included."""
    block_table: Tensor
    """int32 [B, blocks]: entries after a sequence's own blocks are not read, nor are blocks
    that lie wholly outside the window of the sequence's first query in this step."""
    slot_mapping: Tensor
    """int64 [T]: ``block_id * block_size + offset`` of each token."""
    query_lens_host: list[int]
    kv_lens_host: list[int]
    num_decodes: int
    """Leading sequences with exactly one query token."""
    states: StateMetadata | None = None
    """The slots of recurrent states, of models that have them."""
    visible_until: Tensor | None = None
    """int32 [T], of a step with tokens in bidirectional spans (images of Gemma 3, prompts of
    PaliGemma): the position of the span's last token, -1 for a token that is in none. The tokens of
    a span attend to each other in layers whose :attr:`KVSpec.spans` says so. A step that has one
    of them has all those that come after it, too."""
    sparse: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    """The plans of sparse attention for the step; see :mod:`tgi_cli.attention.sparse`."""


class PagedAttention(ABC):
    """The KV cache of all layers, and attention over it.

    ``allocate`` once, then per step one ``plan`` and one call per layer. ``key_cache`` and
    ``value_cache`` hold one tensor per layer: [blocks, block_size, kv_heads, head_dim or
    value_width]; with ``values_in_keys`` the latter is a view of the former.

    ``dtype`` is the dtype of queries, keys and values. The cache stores them in ``cache_dtype``, by
    default the same, else an 8-bit float (saturating). All keys that a query sees, its own step's
    included, went through the cache, so chunks do not change a result.

    ``states`` are the recurrent states of a model that has them: a model's layers find all that
    they keep of a sequence here.
    """

    states: StateCache | None = None
    planned: AttentionMetadata | None = None
    """The step of the last :meth:`plan`; None after :meth:`plan_padded`."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        if cache_dtype not in (None, dtype, *FP8_DTYPES):
            raise ValueError(f"a cache for {dtype} is not kept in {cache_dtype}")
        self.specs = tuple(specs)
        self.block_size = block_size
        self.dtype = dtype
        self.cache_dtype = dtype if cache_dtype is None else cache_dtype
        self.device = device
        self.num_blocks = 0
        self.scales: dict[int, KVScales] = {}
        """Scales by layer; layers that are missing have none."""
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []

    def use_scales(self, scales: Mapping[int, KVScales]) -> bool:
        """Store keys and values divided by the ``scales`` of their layers.

        Must be called before anything is stored, for layers whose values are not part of their
        keys and that compute attention. Returns whether the backend supports it; otherwise, it
        stores keys and values unscaled.
        """
        return False

    def write_factors(self, layer: int) -> tuple[float, float]:
        """Factors of keys and values before they are rounded to the cache's dtype."""
        scales = self.scales.get(layer)
        return (1.0, 1.0) if scales is None else (1.0 / scales.key, 1.0 / scales.value)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        numbers = sum(spec.numbers for spec in self.specs)
        return self.block_size * numbers * self.cache_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Allocate ``num_blocks`` blocks; earlier cached content is lost.

        On a CPU, pages are taken from the system as they are written.
        """
        self.key_cache, self.value_cache = [], []
        self.num_blocks = num_blocks
        for spec in self.specs:
            shape = (num_blocks, self.block_size, spec.num_kv_heads)
            keys = empty((*shape, spec.head_dim), self.cache_dtype, self.device)
            self.key_cache.append(keys)
            self.value_cache.append(
                keys[..., : spec.value_width]
                if spec.values_in_keys
                else empty((*shape, spec.value_width), self.cache_dtype, self.device)
            )

    @property
    def stored(self) -> list[Tensor]:
        """The caches of keys, and those of values that are stored apart from keys."""
        values = zip(self.value_cache, self.specs, strict=True)
        return [*self.key_cache, *(cache for cache, spec in values if not spec.values_in_keys)]

    def export_block(self, block: int) -> bytes:
        """The content of a block in all layers, on a CPU; see :mod:`tgi_cli.engine.block_store`."""
        return b"".join(rows[block].numpy().tobytes() for rows in self._block_bytes())

    def import_blocks(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Fill blocks with results of :meth:`export_block` for the same layers and dtypes."""
        for block, content in blocks:
            start = 0
            for rows in self._block_bytes():
                target = rows[block].numpy()
                target[:] = np.frombuffer(content, np.uint8, len(target), start)
                start += len(target)

    def _block_bytes(self) -> list[Tensor]:
        """The stored caches as uint8 [blocks, bytes of a block]."""
        return [cache.view(torch.uint8).flatten(1) for cache in self.stored]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer.

        All sources are read before any destination is written.
        """
        if not pairs:
            return
        table = torch.tensor(pairs, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        table = table.to(self.device, non_blocking=True)
        sources, destinations = table[:, 0], table[:, 1]
        for cache in map(self.raw, self.stored):
            cache.index_copy_(0, destinations, cache.index_select(0, sources))

    def write(self, layer: int, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """Put keys and values [T, kv_heads, dimensions] into their slots (int64 [T]).

        ``value`` is None where they are part of the keys.
        """
        # Of the 3 heads of 64 in bf16: 2.4 us for one token, 42 for 512, on one core.
        new_ones = zip(
            (self.key_cache[layer], self.value_cache[layer]),
            (key, value),
            self.write_factors(layer),
            strict=True,
        )
        for cache, new, factor in new_ones:
            if new is None:
                continue
            if cache.dtype in FP8_DTYPES:
                new = to_fp8(new if factor == 1.0 else new.float() * factor, cache.dtype)
            self.raw(cache).flatten(0, 1).index_copy_(0, slots, new)

    def gather(self, cache: Tensor, row: int, first_block: int = 0) -> Tensor:
        """The content of a layer's ``cache`` for a sequence of the planned step.

        Returns:
            float32 [kv_heads, tokens, dimensions] from the first token of ``first_block`` on.

        Raises:
            ValueError: no step is planned, or one that is padded to a fixed size.
        """
        step = self.planned
        if step is None:
            raise ValueError("no keys and values can be gathered in a step of a fixed size")
        length = step.kv_lens_host[row]
        table = step.block_table[row, first_block : -(-length // self.block_size)]
        tokens = self.raw(cache).index_select(0, table).view(cache.dtype).flatten(0, 1)
        return tokens[: length - first_block * self.block_size].transpose(0, 1).float()

    def store(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Write the keys and values of the planned step to its slots; see :meth:`write`."""
        assert self.planned is not None
        self.write(layer, key, value, self.planned.slot_mapping)

    def read(self, layer: int, slots: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of single tokens.

        Args:
            layer: index of the cache.
            slots, heads: int64, broadcast to one shape: the slots of tokens, and which KV head.

        Returns:
            [*shape, head_dim] and [*shape, value_width], in ``dtype``; the whole keys instead of
            values that are part of them. Caches in tiles (native) do not support it.
        """
        spec = self.specs[layer]
        rows = slots * spec.num_kv_heads + heads

        def gathered(cache: Tensor) -> Tensor:
            found = self.raw(cache).flatten(0, 2).index_select(0, rows.flatten())
            return found.view(cache.dtype).to(self.dtype).view(*rows.shape, -1)

        keys = gathered(self.key_cache[layer])
        return keys, keys if spec.values_in_keys else gathered(self.value_cache[layer])

    def beside(self) -> Self:
        """The same caches, for a second plan of the step, until they are allocated again.

        Must only be called without keys and values.
        """
        return copy(self)

    @staticmethod
    def raw(cache: Tensor) -> Tensor:
        """The cache in a dtype that torch can index: 8-bit floats as uint8."""
        return cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache

    def first_block(self, layer: int, position: int) -> int:
        """Index in its block table of the first block that a query at ``position`` sees."""
        spec = self.specs[layer]
        return 0 if spec.spans == "whole" else spec.first_visible(position) // self.block_size

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share. Runs outside any CUDA graph."""

    def decode_buffers(self, max_rows: int, max_blocks: int) -> AttentionMetadata | None:
        """Make the tensors that captured steps read, always at these addresses.

        For CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) of steps
        that are decodes alone, of at most ``max_rows`` rows with ``max_blocks`` blocks each. To be
        called once, after ``allocate``: further calls make new tensors, and graphs captured
        before then read the old ones.

        Returns None if the backend's steps cannot be captured. Otherwise query_start_loc
        [max_rows + 1], kv_lens [max_rows], block_table [max_rows, max_blocks] and slot_mapping
        [max_rows], all rows padding as below. Only :meth:`plan_padded` need write them.
        """
        return None

    def plan_padded(self, metadata: AttentionMetadata | None, rows: int) -> None:
        """As :meth:`plan`, for B decodes that run as a step of ``rows`` >= B rows.

        Copies ``metadata`` into the tensors of :meth:`decode_buffers`, on the current stream and
        without waiting; ``metadata`` itself need not outlive the call. Rows from B on are
        padding: KV length 0, slot -1. Their keys and values are not written, no block is read
        for them, and their attention output is zeros. With None, all rows are padding.

        Until the next plan a call per layer takes tensors of ``rows`` tokens. What it launches
        depends on their shapes and on ``rows`` alone; everything else is read on the device, from
        these tensors. So, per number of rows:

        1. capture: ``plan_padded(None, rows)`` and a warm-up call of the model (kernels are
           compiled at their first launch); the same again, of which the call is captured;
        2. each step: ``plan_padded(metadata, rows)``, replay.

        Raises:
            ValueError: no buffers were made, the step has a prefill, or does not fit in them.
        """
        raise ValueError(f"{type(self).__name__} has no steps of a fixed size")

    def plan_replay(self, rows: int, kv_lens: np.ndarray) -> None:  # noqa: B027
        """Do the host's work for a replay of a captured step of decodes; none by default.

        To be called before the replay of a step of ``rows`` rows that was planned by
        :meth:`plan_padded`, unless that is called itself.

        Args:
            rows: rows of the step, padding included.
            kv_lens: of the rows without padding.
        """

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        """As :meth:`plan`, for a step whose lengths are known only to the device.

        For CUDA graphs: what a call per layer launches depends on the shapes of the tensors, on
        ``num_decodes`` and ``max_context`` alone. All else is read on the device, from
        ``metadata``, whose tensors graphs read again at each replay.

        Args:
            metadata: ``num_decodes`` sequences of one token each, the other B - num_decodes with
                as many as ``query_start_loc`` says, perhaps none. A sequence without KV is
                padding, and so are tokens after the last sequence: their slots are -1, and their
                attention output is zeros. The lists for the host are empty.
            max_context: upper bound of KV lengths.

        Raises:
            ValueError: the backend has no such steps, or a layer's attention has none.
        """
        raise ValueError(f"{type(self).__name__} has no steps of unknown lengths")

    @property
    def step_slots(self) -> Tensor | None:
        """int64 [T]: the slots of the planned step, if the backend has :meth:`attend`.

        A caller may then fill them itself, by a kernel that has to read keys and values anyway,
        and call ``attend`` instead of the backend. Negative slots must not be filled.
        """
        return None

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`__call__`, over keys and values that are in the cache already.

        Raises:
            ValueError: ``step_slots`` are None.
        """
        raise ValueError(f"{type(self).__name__} attends as it writes")

    @abstractmethod
    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Write the step's KV, then attend over the cache, causally except for bidirectional spans.

        Args:
            layer: index of the cache.
            query: [T, heads, head_dim]; query heads that share a KV head are adjacent.
            key: [T, kv_heads, head_dim]; None (and no value) to write nothing, if an earlier call
                of this step has: for layers that share keys and values.
            value: [T, kv_heads, value_width]; None also where values are part of the keys.
            scale: factor of the scores.
            softcap: a score s becomes softcap * tanh(s / softcap) before it is masked (Gemma 2,
                https://arxiv.org/abs/2408.00118).
            sinks: [heads], logits that take part in the softmax of every query and have no value
                (gpt-oss).
            bias: float32 [heads, D >= 2], added to the scaled scores. Column d is for keys that
                are d positions before the query, column 0 also for those after it; beyond the
                last column the bias goes on as a straight line through the last two: (0, -slope)
                is ALiBi
                (https://arxiv.org/abs/2108.12409), two equal ones let it stay as it is (T5,
                https://arxiv.org/abs/1910.10683).

        Returns:
            [T, heads, value_width]
        """


def bias_at(bias: Tensor, distances: Tensor) -> Tensor:
    """The biases of queries that are ``distances`` (integers, any shape) after their keys.

    Args:
        bias: as :class:`PagedAttention` takes it, [heads, D].
        distances: negative distances, of hidden keys, count as 0.

    Returns:
        float32 [heads, *distances.shape]
    """
    last = bias.shape[1] - 1
    known = bias.index_select(1, distances.clamp(0, last).flatten()).view(-1, *distances.shape)
    slopes = (bias[:, last] - bias[:, last - 1]).view(-1, *[1] * distances.ndim)
    return known.add_((distances - last).clamp_min_(0) * slopes)
