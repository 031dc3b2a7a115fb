"""The way of step-driven services to the engine: one call at a time, each waits for its answer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import grpc

from tgi_cli.engine.messages import (
    Advance,
    Advanced,
    AdvanceError,
    AdvanceFault,
    Drop,
    GenerationRequest,
)

Code = grpc.StatusCode

MAX_CALLERS = 4
"""Calls that may wait for each other: so many of the server's threads may be taken by them."""
_LOOK_SECONDS = 1.0


class Inbox(Protocol):
    """What is needed of the engine's."""

    def put(self, message: Advance | Drop, /) -> None: ...


class CallError(Exception):
    """A call's status."""

    def __init__(self, code: grpc.StatusCode, cause: str) -> None:
        super().__init__(cause)
        self.code = code


class StepClient:
    """The way of all step-driven services to one engine: one call at a time.

    Args:
        inbox: of the engine.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        # Apart from those that the engine's server gives to requests of its own front.
        self._ids = itertools.count(1 << 63)
        self._lock = threading.Lock()
        self._callers = threading.BoundedSemaphore(MAX_CALLERS)
        self._draining = ""
        self._ended = ""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Until nobody else is at work. Raises CallError."""
        if not self._callers.acquire(blocking=False):
            raise CallError(Code.RESOURCE_EXHAUSTED, f"{MAX_CALLERS} calls wait already")
        try:
            with self._lock:
                yield
        finally:
            self._callers.release()

    def next_id(self) -> int:
        """For a request of the engine."""
        return next(self._ids)

    def check(self, new: bool) -> None:
        """Raises CallError when the engine has ended, or is about to and the work is new."""
        cause = self._ended or (self._draining if new else "")
        if cause:
            raise CallError(Code.UNAVAILABLE, cause)

    def advance(
        self,
        chunk: int,
        new: Iterable[GenerationRequest] = (),
        upto: Iterable[int] = (),
        held: Iterable[int] = (),
    ) -> Advanced:
        """See :class:`tgi_cli.engine.messages.Advance`. Raises AdvanceError."""
        answer: Future[Advanced] = Future()
        self._inbox.put(
            Advance(new=tuple(new), upto=tuple(upto), held=tuple(held), chunk=chunk, answer=answer)
        )
        while True:
            try:
                return answer.result(timeout=_LOOK_SECONDS)
            except TimeoutError:
                if self._ended:  # the message came after the loop's end
                    raise AdvanceError(AdvanceFault.ENDED, self._ended) from None

    def drop(self, engine_ids: Iterable[int]) -> None:
        """Have the engine forget requests."""
        ids = tuple(engine_ids)
        if ids:
            self._inbox.put(Drop(ids))

    def drain(self, cause: str) -> None:
        """Refuse new batches from now on."""
        self._draining = cause

    def end(self, cause: str) -> None:
        """The engine's loop is over."""
        self._ended = cause
