"""KV blocks: references to them, and an index of their content.

A block is an index into the device's cache, or a slot for a recurrent state, which is shared and
found in the same way (:mod:`tgi_cli.engine.state_slots`). It is one of

    ==========  ==============  =====================================================
    state       reference count location
    ==========  ==============  =====================================================
    used        > 0             in the block tables of that many sequences
    cached      0, has a hash   free list, back part: content is valid until it is taken
    free        0, no hash      free list, front part
    ==========  ==============  =====================================================

and ``used + cached + free == num_blocks`` always. Blocks without content are taken first, then
cached ones, least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

OnEvict = Callable[[bytes, int], None]
"""Called with the hash of a content and the block that has it, before it is overwritten."""


class BlockPool:
    """Reference-counted blocks with an O(1) free list and an index of cached content.

    Args:
        num_blocks: how many.
        on_evict: called for cached content whose block is taken.
    """

    def __init__(self, num_blocks: int, on_evict: OnEvict | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # An OrderedDict is the intrusive doubly linked list: O(1) at both ends and in between.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content is indexed, used or free."""
        return len(self._by_hash)

    def take(self, count: int) -> list[int]:
        """``count`` blocks with reference count 1; their old content is dropped from the index.

        Raises:
            IndexError: fewer are available; nothing is taken.
        """
        if count > len(self._free):
            raise IndexError(f"{count} blocks requested, {len(self._free)} available")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            old = self._hashes[block]
            if old is not None:
                del self._by_hash[old]
                self._hashes[block] = None
                if self._on_evict is not None:
                    self._on_evict(old, block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block (a prefix hit, or a fork)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a sequence's table.

        From the last to the first, so that the tail of a prefix is evicted before its head.

        Raises:
            ValueError: a block has no reference.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            if count < 0:
                raise ValueError(f"block {block} released more often than taken")
            self._references[block] = count
            if count == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    # Without content: to be reused first, which also keeps fresh memory fresh.
                    self._free.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """Drop the content of a block from the index; available, it is the next to be taken."""
        content = self._hashes[block]
        if content is not None:
            del self._by_hash[content]
            self._hashes[block] = None
        if not self._references[block]:
            self._free.move_to_end(block, last=False)

    @property
    def evicts(self) -> bool:
        """Whether the next block to be taken has content, which would be lost."""
        return bool(self._free) and self._hashes[next(iter(self._free))] is not None

    def is_used(self, block: int) -> bool:
        """Whether it has a reference."""
        return self._references[block] > 0

    def find(self, content: bytes) -> int | None:
        """The block with this content hash, or None."""
        return self._by_hash.get(content)

    def index(self, block: int, content: bytes) -> None:
        """Declare the content of a full, computed, used block. The first of equal blocks stays."""
        if self._hashes[block] is None and content not in self._by_hash:
            self._hashes[block] = content
            self._by_hash[content] = block
