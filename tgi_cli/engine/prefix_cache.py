"""Which KV a sequence needs, has, and may reuse: block tables over a :class:`BlockPool`.

Reuse follows a chain of hashes over full blocks: the hash of a block covers its tokens and all
before it, beginning with the request's salt, so equal hashes mean equal KV. Prompt and
generated tokens are indexed alike. The hash is cryptographic (BLAKE2b, 128 bits): prompts come
from strangers, and a forged collision would show one tenant another's context.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from tgi_cli.engine.block_pool import BlockPool
from tgi_cli.engine.sequence import Sequence


class PrefixCache:
    """Gives blocks to sequences and takes them back."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        """The longest run of cached blocks that begins the sequence.

        At least one token is left to be computed: its logits choose the next one.
        """
        if not self.enabled:
            return []
        self._extend_hashes(sequence, len(sequence.token_ids))
        usable = (len(sequence.token_ids) - 1) // self.block_size
        found: list[int] = []
        for content in sequence.block_hashes[:usable]:
            block = self.pool.find(content)
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the sequence lacks to hold its first ``num_tokens`` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_ids))

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Take the missing blocks. Raises IndexError when the pool has fewer."""
        count = self.missing(sequence, num_tokens)
        if count == 0:
            return []
        taken = self.pool.take(count)
        sequence.block_ids.extend(taken)
        return taken

    def index_computed(self, sequence: Sequence, num_computed: int) -> None:
        """Make the full blocks among the first ``num_computed`` tokens findable.

        Their KV must have been computed and their tokens be known.
        """
        if not self.enabled:
            return
        full = num_computed // self.block_size
        if full <= sequence.num_indexed:
            return
        self._extend_hashes(sequence, full * self.block_size)
        for i in range(sequence.num_indexed, full):
            self.pool.index(sequence.block_ids[i], sequence.block_hashes[i])
        sequence.num_indexed = full

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of the sequence back."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_indexed = 0

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        """Hash the full blocks not hashed yet; each is hashed once in a sequence's life."""
        size = self.block_size
        hashes = sequence.block_hashes
        parent = hashes[-1] if hashes else sequence.request.cache_salt
        for i in range(len(hashes), num_tokens // size):
            tokens = array("I", sequence.token_ids[i * size : (i + 1) * size])
            # A key length apart for the salt keeps a salt from posing as a parent's hash.
            key = b"block" if hashes else b"salt"
            parent = blake2b(parent + tokens.tobytes(), digest_size=16, person=key).digest()
            hashes.append(parent)
