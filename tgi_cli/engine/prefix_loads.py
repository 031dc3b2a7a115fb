"""Reads stored KV blocks for waiting sequences."""

from __future__ import annotations

from typing import Protocol

from tgi_cli.engine.block_store import BlockStore
from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Step


class BlockSource(Protocol):
    """Where the beginnings of waiting sequences may be, besides the cache."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence waits for no blocks; begins to read them if there are any."""
        ...

    def num_ready(self, sequence: Sequence, num_cached: int) -> int:
        """Blocks after the ``num_cached`` in the cache that need not be computed either."""
        ...

    def apply(self, step: Step, sequence: Sequence, num_cached: int) -> None:
        """Have ``step`` fill those blocks of an admitted sequence."""
        ...


class PrefixLoads:
    """Implements :class:`BlockSource`.

    Reads the beginnings of waiting sequences from a store, before they are admitted.

    Args:
        cache: the blocks in memory.
        store: has further blocks after those in memory; None for none.
    """

    def __init__(self, cache: KVCache, store: BlockStore | None) -> None:
        self._cache = cache
        self._store = store

    def is_ready(self, sequence: Sequence) -> bool:
        if self._store is None or sequence.load_tried:
            return True
        if sequence.load is not None:
            return sequence.load.done
        if sequence.request.fork_of is not None or sequence.request.adapter_id:
            sequence.load_tried = True  # ids of adapters mean nothing after a restart
            return True
        if self._store.is_full:
            return False
        sequence.load_from, contents = self._cache.missing(sequence)
        sequence.load = self._store.load(contents) if contents else None
        sequence.load_tried = sequence.load is None
        return sequence.load_tried

    def num_ready(self, sequence: Sequence, num_cached: int) -> int:
        if sequence.load is None or sequence.load_from > num_cached:
            return 0
        return max(0, sequence.load_from + sequence.load.num_ready - num_cached)

    def apply(self, step: Step, sequence: Sequence, num_cached: int) -> None:
        if sequence.load is None:
            return
        count = self.num_ready(sequence, num_cached)
        read = sequence.load.take()
        sequence.load, sequence.load_tried = None, True
        end = num_cached + count
        for index in range(num_cached, end):
            step.loads.append((sequence.block_ids[index], read[index - sequence.load_from]))
        if count:
            sequence.num_computed = end * self._cache.block_size
