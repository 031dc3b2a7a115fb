"""The interface of paged attention, and the cache that its backends share.

Keys and values live in blocks of ``block_size`` tokens; a sequence's block table says which
blocks hold it, in order. After "Efficient Memory Management for Large Language Model Serving
with PagedAttention" (https://arxiv.org/abs/2309.06180).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_cli.attention.fp8 import FP8_DTYPES, to_fp8
from tgi_cli.attention.memory import empty
from tgi_cli.attention.states import StateCache, StateMetadata


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps of a token, a key and a value per KV head, and for how long."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Number of positions that a query sees, its own included (transformers' ``sliding_window``).
    Default: all before it."""


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
    """int32 [B, blocks]: entries behind a sequence's own blocks are not read, nor are blocks
    that lie wholly behind the window of the sequence's first query in this step."""
    slot_mapping: Tensor
    """int64 [T]: ``block_id * block_size + offset`` of each token."""
    query_lens_host: list[int]
    kv_lens_host: list[int]
    num_decodes: int
    """Leading sequences with exactly one query token."""
    states: StateMetadata | None = None
    """The slots of recurrent states, of models that have them."""


class PagedAttention(ABC):
    """The KV cache of all layers, and attention over it.

    ``allocate`` once, then per step one ``plan`` and one call per layer. ``key_cache`` and
    ``value_cache`` hold one tensor per layer: [blocks, block_size, kv_heads, head_dim].

    ``dtype`` is the dtype of queries, keys and values. The cache stores them in ``cache_dtype``, by
    default the same, else an 8-bit float (saturating). All keys that a query sees, its own step's
    included, went through the cache, so chunks do not change a result.

    ``states`` are the recurrent states of a model that has them: a model's layers find all that
    they keep of a sequence here.
    """

    states: StateCache | None = None

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
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        heads = sum(spec.num_kv_heads * spec.head_dim for spec in self.specs)
        return 2 * self.block_size * heads * self.cache_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Allocate ``num_blocks`` blocks; earlier cached content is lost.

        On a CPU the memory is taken from the system page by page as it is written.
        """
        self.key_cache, self.value_cache = [], []
        self.num_blocks = num_blocks
        for spec in self.specs:
            shape = (num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
            self.key_cache.append(empty(shape, self.cache_dtype, self.device))
            self.value_cache.append(empty(shape, self.cache_dtype, self.device))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in every layer.

        All sources are read before any destination is written.
        """
        if not pairs:
            return
        table = torch.tensor(pairs, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        table = table.to(self.device, non_blocking=True)
        sources, destinations = table[:, 0], table[:, 1]
        for cache in map(self.raw, (*self.key_cache, *self.value_cache)):
            cache.index_copy_(0, destinations, cache.index_select(0, sources))

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put keys and values [T, kv_heads, head_dim] into their slots (int64 [T])."""
        # Of the 3 heads of 64 in bf16: 2.4 us for one token, 42 for 512, on one core.
        for cache, new in ((self.key_cache[layer], key), (self.value_cache[layer], value)):
            if cache.dtype in FP8_DTYPES:
                new = to_fp8(new, cache.dtype)
            self.raw(cache).flatten(0, 1).index_copy_(0, slots, new)

    @staticmethod
    def raw(cache: Tensor) -> Tensor:
        """The cache as torch can index it: 8-bit floats have no operators but as uint8."""
        return cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache

    def first_block(self, layer: int, position: int) -> int:
        """Index in its block table of the first block that a query at ``position`` sees."""
        return first_visible(position, self.specs[layer].window) // self.block_size

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share. Runs outside any CUDA graph."""

    def decode_buffers(self, max_rows: int, max_blocks: int) -> AttentionMetadata | None:
        """Make the tensors that captured steps read, always at these addresses.

        For CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) of steps
        that are decodes alone, of at most ``max_rows`` rows with ``max_blocks`` blocks each. To be
        called once, after ``allocate``: further calls make new tensors, and graphs captured
        before then read the old ones.

        Returns None where the backend's steps cannot be captured. Else query_start_loc
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

        1. capture: ``plan_padded(None, rows)``; after a warm-up call of the model (kernels are
           compiled at their first launch), capture another one;
        2. each step: ``plan_padded(metadata, rows)``, replay.

        Raises:
            ValueError: no buffers were made, the step has a prefill, or does not fit in them.
        """
        raise ValueError(f"{type(self).__name__} has no steps of a fixed size")

    @property
    def step_slots(self) -> Tensor | None:
        """int64 [T]: the slots of the step that is planned, of a backend that has :meth:`attend`.

        A caller may then fill them itself, by a kernel that has to read keys and values anyway,
        and call ``attend`` instead of the backend. Negative ones are not to be filled.
        """
        return None

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As a call, over keys and values of the step that are in the cache already.

        Raises:
            ValueError: ``step_slots`` are None.
        """
        raise ValueError(f"{type(self).__name__} attends as it writes")

    @abstractmethod
    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the step's KV, then attend causally over the cache.

        ``query`` is [T, heads, head_dim], ``key`` and ``value`` are [T, kv_heads, head_dim];
        returns [T, heads, head_dim]. Query heads that share a KV head are adjacent.

        With ``softcap`` a score s becomes softcap * tanh(s / softcap) before it is masked
        (Gemma 2, https://arxiv.org/abs/2408.00118). ``sinks`` [heads] are logits that take part
        in the softmax of every query and have no value (gpt-oss).
        """


def first_visible(position: int, window: int | None) -> int:
    """The first position that a query at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)
