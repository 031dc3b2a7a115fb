"""The contract between the engine and a store of copies of KV blocks outside of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol


class StoreEvent(StrEnum):
    """What happens to a block of a prompt that is not in memory, or to its copy."""

    HIT = "hit"
    """It was read."""
    MISS = "miss"
    """There is no copy, or it was removed or damaged."""
    SKIPPED = "skipped"
    """There is a copy that would be read more slowly than the block is computed."""
    WRITTEN = "written"
    EVICTED = "evicted"
    """Its copy was removed, as the limit of bytes was reached."""
    DAMAGED = "damaged"
    """Its copy was damaged, and removed."""
    FAILED = "failed"
    """Its copy could not be written."""


class BlockExporter(Protocol):
    """A worker whose blocks can be copied, and filled by :attr:`tgi_cli.engine.step.Step.loads`."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def block_identity(self) -> bytes:
        """A hash of all that determines the bytes of a block, apart from its content's hash."""
        ...

    def export_block(self, block: int) -> bytes:
        """The keys and values of a block in all layers, as they are after the last launched step.

        Equal blocks give equal bytes, in a form that the model, the data type of the cache and the
        attention backend determine.
        """
        ...


class StoredBlocks(Protocol):
    """A run of blocks that is being read."""

    @property
    def done(self) -> bool:
        """Whether reading has ended: all was read, or the rest cannot be, or takes too long."""
        ...

    @property
    def num_ready(self) -> int:
        """Blocks that were read, from the first on."""
        ...

    def take(self) -> list[bytes]:
        """The blocks that were read, once; reading ends."""
        ...


class BlockStore(Protocol):
    """Keeps copies of computed blocks by the hashes of their content.

    No method waits for a disk.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        ...

    @property
    def counts(self) -> Mapping[StoreEvent, int]:
        """Number of blocks by what happened to them since the start."""
        ...

    @property
    def loading(self) -> bool:
        """Whether blocks are being read, or were read and not taken yet."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the limit of blocks that were read, and not taken yet, allows no further one."""
        ...

    def save(self, content: bytes, block: int) -> bool:
        """Copy a computed block unless a copy exists; False if that has to wait."""
        ...

    def load(self, contents: Sequence[bytes]) -> StoredBlocks | None:
        """Begin to read a run of blocks; None if there is none, or computing it is faster."""
        ...

    def touch(self, contents: Sequence[bytes]) -> None:
        """Note that a sequence has used these blocks, from its first on: they are dropped last."""
        ...

    def timed(self, prompt_tokens: int, seconds: float) -> None:
        """Learn that a step which computed prompt tokens alone took ``seconds``."""
        ...
