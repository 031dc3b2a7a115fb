"""Memory of the host for blocks that leave the KV cache of a GPU (``--kv-offloading-size``).

A cached block whose memory is taken for other content is copied to a slot of the host, unless its
copy is still there, and copied back when a prompt begins with it. This module has only numbers: the
worker has the memory, and copies as steps say (:attr:`~tgi_cli.engine.step.Step.offloads`,
:attr:`~tgi_cli.engine.step.Step.restores`), in the order of the steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Step


class HostBlocks:
    """Slots by the content of the blocks in them; the least recently used are overwritten.

    Args:
        num_slots: blocks that the host's memory holds.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._offloads: list[tuple[int, int]] = []
        self._held: set[int] = set()
        """Slots that the step being scheduled reads or may read: they are not overwritten."""

    def offload(self, content: bytes, block: int) -> None:
        """The memory of a cached block is taken: the next step is to copy it first."""
        if content in self._slots:
            self._slots.move_to_end(content)
            return
        slot = self._take()
        if slot is not None:
            self._slots[content] = slot
            self._offloads.append((block, slot))

    def hold(self, contents: SequenceOf[bytes]) -> int:
        """How many of these blocks there are, from the first on; they stay for the next step."""
        count = 0
        for content in contents:
            slot = self._slots.get(content)
            if slot is None:
                break
            self._held.add(slot)
            count += 1
        return count

    def restore(self, step: Step, contents: SequenceOf[bytes], blocks: SequenceOf[int]) -> None:
        """Have ``step`` fill ``blocks`` with contents that are held."""
        for content, block in zip(contents, blocks, strict=True):
            self._slots.move_to_end(content)
            step.restores.append((self._slots[content], block))

    def commit(self, step: Step) -> None:
        """``step`` is complete: it copies what is to be copied by now."""
        step.offloads, self._offloads = self._offloads, []
        self._held.clear()

    def _take(self) -> int | None:
        """A slot to be written; None if all of them are held."""
        if self._free:
            return self._free.pop()
        for content, slot in self._slots.items():
            if slot not in self._held:
                del self._slots[content]
                return slot
        return None


class HostLoads:
    """Restores the beginnings of waiting sequences from the host's memory, without waiting.

    Implements :class:`tgi_cli.engine.prefix_loads.BlockSource`.

    Args:
        cache: the blocks on the device, which come first.
        host: the blocks that follow them.
    """

    def __init__(self, cache: KVCache, host: HostBlocks) -> None:
        self._cache = cache
        self._host = host

    def is_ready(self, sequence: Sequence) -> bool:
        return True

    def num_ready(self, sequence: Sequence, num_cached: int) -> int:
        return self._host.hold(self._cache.reusable(sequence)[num_cached:])

    def apply(self, step: Step, sequence: Sequence, num_cached: int) -> None:
        contents = self._cache.reusable(sequence)[num_cached:]
        contents = contents[: self._host.hold(contents)]
        end = num_cached + len(contents)
        if contents:
            self._host.restore(step, contents, sequence.block_ids[num_cached:end])
            sequence.num_computed = end * self._cache.block_size
