"""An adapter that all shards of a model read."""

from __future__ import annotations

import threading
from concurrent.futures import Future


class PendingAdapter:
    """A future of the answers of ``shards`` processes."""

    def __init__(self, shards: int) -> None:
        self.future: Future[None] = Future()
        self._missing = shards
        self._lock = threading.Lock()

    def answer(self, error: BaseException | None) -> None:
        """Count a shard that has read it, or fail with the error of one that could not."""
        with self._lock:
            self._missing -= 1
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            elif not self._missing:
                self.future.set_result(None)
