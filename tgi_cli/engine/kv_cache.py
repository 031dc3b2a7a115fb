"""Block tables over a BlockPool: the blocks that each sequence holds, reuses and is promised.

Reuse follows a chain of hashes over full blocks: the hash of a block covers its tokens and all
before it, beginning with the request's adapter and salt, so equal hashes mean equal KV. For the
tokens of an image, it covers the image and their positions in it. Prompt and generated tokens
are indexed alike. The hash is cryptographic (BLAKE2b, 128 bits): prompts come from strangers, and a
forged collision would show one tenant another's context.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import NamedTuple

from tgi_cli.engine.block_pool import BlockPool, OnEvict
from tgi_cli.engine.block_store import BlockStore
from tgi_cli.engine.config import CapacityPolicy, SchedulerConfig
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.state_slots import StateSlots
from tgi_cli.engine.step import FRESH

MIN_SNAPSHOT_BLOCKS = 8
"""Blocks by which cached KV must exceed the longest snapshot of a state for another one to be made,
which takes a step of its own."""


class Prefix(NamedTuple):
    """What a sequence need not compute: cached blocks, and the slot of the state at their end."""

    blocks: list[int]
    state: int = FRESH


class KVCache:
    """Gives blocks, and slots for recurrent states, to sequences, and releases them.

    Args:
        config: sizes, and the capacity policy.
        store: keeps copies of computed blocks; None for no copies.
        on_evict: see :class:`BlockPool`.

    Attributes:
        pool: the blocks.
        states: the slots; None if the model has no recurrent states.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        store: BlockStore | None = None,
        on_evict: OnEvict | None = None,
    ) -> None:
        self._store = store
        self.states = StateSlots(config) if config.num_state_slots else None
        self.pool = BlockPool(config.num_blocks, on_evict)
        self.block_size = config.block_size
        self._reuse = config.prefix_caching
        self._window = config.window
        self._guaranteed = config.capacity_policy is CapacityPolicy.GUARANTEED_NO_EVICT

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def demand(self, sequence: Sequence) -> int:
        """Blocks that must be available to admit a sequence.

        All its known tokens must fit, not only its first chunk; with ``guaranteed_no_evict``, all
        tokens that it may ever have (the KV of the last one is never needed).
        """
        final = sequence.max_tokens - 1
        return self.blocks_for(final if self._guaranteed else sequence.num_tokens)

    def match(self, sequence: Sequence) -> Prefix:
        """The longest run of cached blocks that begins the sequence; nothing is taken.

        At least one token is left to compute: its logits choose the next one. In a new sequence,
        it is a token of the prompt, which forks wait for. If the model has recurrent states, there
        is a snapshot at the end of the run.
        """
        found: list[int] = []
        for content in self.reusable(sequence):
            block = self.pool.find(content)
            if block is None:
                break
            found.append(block)
        return Prefix(found) if self.states is None else self._with_state(sequence, found)

    def missing(self, sequence: Sequence) -> tuple[int, list[bytes]]:
        """The number of blocks that :meth:`match` finds, and the hashes of those after them."""
        found = len(self.match(sequence).blocks)
        return found, self.reusable(sequence)[found:]

    def reusable(self, sequence: Sequence) -> list[bytes]:
        """The hashes of the leading blocks that a sequence may reuse."""
        if not self._reuse or sequence.request.computes_whole_prompt:
            return []
        self._extend_hashes(sequence, len(sequence.token_ids))
        known = len(sequence.token_ids) if sequence.started else sequence.prompt_tokens
        return sequence.block_hashes[: (known - 1) // self.block_size]

    def _with_state(self, sequence: Sequence, found: list[int]) -> Prefix:
        """The part of ``found`` that ends at a snapshot; plans one where that is much shorter."""
        assert self.states is not None
        count, state = len(found), FRESH
        while count:
            state = self.states.find(sequence.block_hashes[count - 1])
            if state != FRESH:
                break
            count -= 1
        lacking = len(found) - count
        end = len(found) * self.block_size
        sequence.snapshot_at = end if lacking >= MIN_SNAPSHOT_BLOCKS else 0
        return Prefix(found[:count], state)

    def admit(self, sequence: Sequence, prefix: Prefix, running: Collection[Sequence]) -> bool:
        """Give a waiting sequence the blocks of its known tokens, if they fit beside ``running``.

        The blocks of ``prefix`` hold its beginning already and are shared, not taken. Blocks that
        running sequences were promised are left to them, or one block each without a promise:
        admitting others at their cost would only lead to preemption.
        """
        computed = prefix.blocks
        self.pool.share(computed)  # before counting, for they may be among the available ones
        claims = self.promised(running) if self._guaranteed else len(running)
        if self.demand(sequence) - len(computed) + claims > self.pool.num_available:
            self.pool.release(computed)
            return False
        self._begin(sequence, prefix)
        self.grow(sequence, sequence.num_tokens)
        return True

    def hold(self, sequence: Sequence) -> None:
        """Have a waiting sequence share the longest prefix that is cached."""
        prefix = self.match(sequence)
        self.pool.share(prefix.blocks)
        self._begin(sequence, prefix)

    def _begin(self, sequence: Sequence, prefix: Prefix) -> None:
        sequence.block_ids = list(prefix.blocks)
        sequence.num_computed = len(prefix.blocks) * self.block_size
        if self.states is not None:
            self.states.hold(sequence, prefix.state)

    def promised(self, running: Iterable[Sequence]) -> int:
        """Blocks that running sequences may still demand."""
        return sum(self.demand(sequence) - len(sequence.block_ids) for sequence in running)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Take the blocks it lacks for ``num_tokens``. Raises IndexError if there are too few."""
        count = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if count <= 0:
            return []
        taken = self.pool.take(count)
        sequence.block_ids.extend(taken)
        return taken

    def index_computed(self, sequence: Sequence, num_computed: int) -> None:
        """Make the full blocks among the first ``num_computed`` tokens findable.

        Their KV must have been computed and their tokens be known.
        """
        if not self._reuse:
            return
        full = num_computed // self.block_size
        if full > sequence.num_indexed:
            self._extend_hashes(sequence, full * self.block_size)
            for i in range(sequence.num_indexed, full):
                self.pool.index(sequence.block_ids[i], sequence.block_hashes[i])
            sequence.num_indexed = full
        if self._store is not None and 0 <= sequence.num_saved < sequence.num_indexed:
            self._save(sequence, self._store)

    def _save(self, sequence: Sequence, store: BlockStore) -> None:
        """Copy indexed blocks in order: without those before it, a block is of no use."""
        if sequence.request.adapter_id:  # ids of adapters differ between processes
            sequence.num_saved = -1
        while 0 <= sequence.num_saved < sequence.num_indexed:
            index = sequence.num_saved
            if index < sequence.num_window_freed:
                sequence.num_saved = -1
            elif store.save(sequence.block_hashes[index], sequence.block_ids[index]):
                sequence.num_saved += 1
            else:
                return

    def free_out_of_window(self, sequence: Sequence, num_computed: int) -> None:
        """Release the blocks that no later token of a sliding-window model attends to.

        The next query is at ``num_computed`` and attends to ``window`` positions, its own included.
        The block table keeps the ids of released blocks, which attention never reads.
        """
        if self._window is None:
            return
        behind = max(0, num_computed - self._window + 1) // self.block_size
        if behind > sequence.num_window_freed:
            self.pool.release(sequence.block_ids[sequence.num_window_freed : behind])
            sequence.num_window_freed = behind

    def release(self, sequence: Sequence) -> None:
        """Release all blocks and slots of the sequence."""
        if self.states is not None:
            self.states.detach(sequence)
        self.pool.release(sequence.block_ids[sequence.num_window_freed :])
        if self._store is not None and sequence.num_saved > 0:
            self._store.touch(sequence.block_hashes[: sequence.num_saved])
        sequence.block_ids = []
        sequence.num_indexed = 0
        sequence.num_window_freed = 0

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        """Hash the full blocks that are not hashed yet; each is hashed once per sequence."""
        size = self.block_size
        hashes = sequence.block_hashes
        request = sequence.request
        parent = hashes[-1] if hashes else request.cache_salt
        first = b"salt"
        if request.adapter_id and not hashes:
            # Of fixed length, so that no salt can pose as another adapter's id.
            parent, first = request.adapter_id.to_bytes(8, "little") + parent, b"adapter"
        for i in range(len(hashes), num_tokens // size):
            tokens = array("I", sequence.token_ids[i * size : (i + 1) * size])
            # BLAKE2's ``person`` of the first block keeps a salt from posing as a parent's hash.
            key = b"block" if hashes else first
            content = parent + tokens.tobytes()
            if i * size < sequence.images_end:
                assert sequence.images is not None
                seen = sequence.images.content(i * size, (i + 1) * size)
                if seen:  # of fixed length; another ``person`` keeps it from posing as tokens
                    content, key = content + seen, key + b"+image"
            parent = blake2b(content, digest_size=16, person=key).digest()
            hashes.append(parent)
