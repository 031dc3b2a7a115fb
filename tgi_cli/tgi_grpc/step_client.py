"""Runs steps of the engine for its callers: one call at a time, each waits for its result."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING

import grpc

from tgi_cli.engine.messages import (
    Advance,
    Advanced,
    AdvanceError,
    AdvanceFault,
    Drop,
    GenerationRequest,
)

if TYPE_CHECKING:
    from tgi_cli.engine.core import Inbound

Code = grpc.StatusCode

MAX_CALLERS = 4
"""Calls that may wait for each other; each holds one of the server's threads."""
_POLL_SECONDS = 1.0


class CallError(Exception):
    """The status with which a call ends."""

    def __init__(self, cause: str, code: grpc.StatusCode = Code.INVALID_ARGUMENT) -> None:
        super().__init__(cause)
        self.code = code


class StepClient:
    """Steps of one engine, shared by all versions of the services.

    Args:
        inbox: Takes the engine's messages.
    """

    def __init__(self, inbox: SimpleQueue[Inbound]) -> None:
        self._inbox = inbox
        # The ids of the engine's own sessions are below.
        self._ids = itertools.count(1 << 63)
        self._lock = threading.Lock()
        self._callers = threading.BoundedSemaphore(MAX_CALLERS)
        self._draining = ""
        self._ended = ""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other call is in progress. Raises CallError."""
        if not self._callers.acquire(blocking=False):
            raise CallError(f"{MAX_CALLERS} calls are waiting already", Code.RESOURCE_EXHAUSTED)
        try:
            with self._lock:
                yield
        finally:
            self._callers.release()

    def next_id(self) -> int:
        """Return an id for a request of the engine."""
        return next(self._ids)

    def check(self, new: bool) -> None:
        """Raise CallError if the engine has ended, or is draining and the work is new."""
        cause = self._ended or (self._draining if new else "")
        if cause:
            raise CallError(cause, Code.UNAVAILABLE)

    def advance(
        self,
        prefill_budget: int,
        new: Iterable[GenerationRequest] = (),
        new_targets: Iterable[int] = (),
        running: Iterable[int] = (),
    ) -> Advanced:
        """Run a step; see :class:`tgi_cli.engine.messages.Advance`. Raises AdvanceError."""
        answer: Future[Advanced] = Future()
        self._inbox.put(
            Advance(
                new=tuple(new),
                new_targets=tuple(new_targets),
                running=tuple(running),
                prefill_budget=prefill_budget,
                answer=answer,
            )
        )
        while True:
            try:
                return answer.result(timeout=_POLL_SECONDS)
            except TimeoutError:
                if self._ended:  # the message came after the loop's end
                    raise AdvanceError(AdvanceFault.ENDED, self._ended) from None

    def drop(self, engine_ids: Iterable[int]) -> None:
        """Drop requests from the engine."""
        ids = tuple(engine_ids)
        if ids:
            self._inbox.put(Drop(ids))

    def drain(self, cause: str) -> None:
        """Refuse new batches from now on."""
        self._draining = cause

    def end(self, cause: str) -> None:
        """End calls that wait: the engine's loop has ended."""
        self._ended = cause
