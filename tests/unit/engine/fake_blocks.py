"""A store of KV blocks in memory, whose reads end when they are told to."""

from __future__ import annotations

from collections.abc import Sequence

from tests.unit.engine.fake_worker import FakeWorker
from tgi_cli.engine.block_store import StoreEvent

MOST_READS = 3


class FakeRead:
    """A run of blocks that is being read."""

    def __init__(self, store: FakeBlockStore, contents: list[bytes]) -> None:
        self._store = store
        self.contents = contents
        self.read: list[bytes] = []
        self.done = False
        self.taken = False

    @property
    def num_ready(self) -> int:
        return len(self.read)

    def finish(self, count: int) -> None:
        """The first ``count`` blocks are there, as far as they are not torn."""
        for content in self.contents[:count]:
            if content not in self._store.saved:
                break
            self.read.append(self._store.saved[content])
        self.done = True

    def take(self) -> list[bytes]:
        assert not self.taken, "taken twice"
        self.taken = True
        if not self.done:
            self.finish(0)
        return self.read


class FakeBlockStore:
    """Implements :class:`tgi_cli.engine.block_store.BlockStore` over a fake worker."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.saved: dict[bytes, bytes] = {}
        self.reads: list[FakeRead] = []
        self.busy = False
        self.touched: list[bytes] = []
        self.num_bytes = 0
        self.counts = dict.fromkeys(StoreEvent, 0)

    @property
    def pending(self) -> list[FakeRead]:
        """Reads that have not ended."""
        return [read for read in self.reads if not read.done]

    @property
    def loading(self) -> bool:
        return any(not read.taken for read in self.reads)

    @property
    def is_full(self) -> bool:
        return sum(not read.taken for read in self.reads) >= MOST_READS

    def save(self, content: bytes, block: int) -> bool:
        if self.busy:
            return False
        found = self.worker.export_block(block)
        assert self.saved.setdefault(content, found) == found, "equal hashes, other KV"
        return True

    def load(self, contents: Sequence[bytes]) -> FakeRead | None:
        run: list[bytes] = []
        for content in contents:
            if content not in self.saved:
                break
            run.append(content)
        if not run:
            return None
        self.reads.append(FakeRead(self, run))
        return self.reads[-1]

    def touch(self, contents: Sequence[bytes]) -> None:
        self.touched += contents

    def timed(self, prompt_tokens: int, seconds: float) -> None:
        assert prompt_tokens > 0
