"""Which prompts' prefixes a replica has probably in its KV cache, from what was sent to it.

The replica itself is not asked: it may have dropped a prefix earlier than this index does, or have
another one from a generated text. A wrong guess costs the computation of a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tgi_cli.engine.messages import GenerationRequest

BLOCK_TOKENS = 64
"""Tokens of a block here: four KV blocks, whose hashing takes about a microsecond."""


def prefix_hashes(request: GenerationRequest, adapter: str) -> list[int]:
    """A hash for each whole block of the prompt, of the block and all that its KV depends on.

    These are the tokens before it, the adapter, the cache salt and the images.
    """
    ids = request.prompt_ids
    images: dict[int, bytes] = {}
    for image in request.images:
        block = image.spans[0][0] // BLOCK_TOKENS
        images[block] = images.get(block, b"") + image.digest
    hashes = []
    value = hash((adapter, request.cache_salt))
    for index in range(len(ids) // BLOCK_TOKENS):
        block_ids = ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
        value = hash((value, block_ids, images.get(index)))
        hashes.append(value)
    return hashes


class PrefixIndex:
    """The blocks of one replica, at most as many as its KV cache holds.

    The least recently used ones are dropped first, of one prompt the last. So whenever a block is
    in the index, all blocks before it are.

    Args:
        capacity: Number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._capacity = max(1, capacity)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """The number of leading blocks of a prompt that are in the index."""
        blocks = self._blocks
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, hashes: Sequence[int]) -> None:
        """A prompt was sent to the replica."""
        blocks = self._blocks
        for value in reversed(hashes[: self._capacity]):
            blocks[value] = None
            blocks.move_to_end(value)
        self._shrink()

    def resize(self, capacity: int) -> None:
        """Empty the index, for another engine with a KV cache of that many blocks."""
        self._blocks.clear()
        self._capacity = max(1, capacity)

    def _shrink(self) -> None:
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
