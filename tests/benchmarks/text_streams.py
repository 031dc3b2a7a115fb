"""Streams of text beside which a benchmark measures something else."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx


@dataclass
class TextStreams:
    """Streams of text in a thread, one after the other, with the times of their tokens."""

    client: httpx.Client
    tokens: int
    times: list[list[float]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> TextStreams:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()

    def wait(self, streams: int) -> None:
        """Until so many more have begun."""
        wanted = len(self.times) + streams
        while len(self.times) < wanted:
            assert self._thread is not None
            if not self._thread.is_alive():
                raise RuntimeError("the streams have ended")
            time.sleep(0.01)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens of a stream, of gaps that ended within a time."""
        pairs = [pair for times in self.times for pair in pairwise(times)]
        return [(after - before) * 1e3 for before, after in pairs if begin < after <= end]

    def _read(self) -> None:
        while not self._ended.is_set():
            body = {
                "model": "tgi",
                # Another text each time: drafts would come from the one before.
                "prompt": f"{len(self.times)} times upon a time",
                "max_tokens": self.tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
            with self.client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                times: list[float] = []
                self.times.append(times)
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
                    if self._ended.is_set():
                        return
