"""The engine in this process: its loop in one thread, its outputs sorted by caller in another.

A caller opens a :class:`RequestGroup`, submits requests through it and receives their outputs
step by step. Callers, in any threads, share nothing but the engine's inbox.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import (
    Cancel,
    Fail,
    FinishReason,
    GenerationRequest,
    Shutdown,
    StepOutputs,
)
from tgi_cli.engine.metrics import StepStats
from tgi_cli.engine.step import GrammarCompiler, Worker
from tgi_cli.errors import TgiError
from tgi_cli.llm.errors import EngineDeadError
from tgi_cli.model_server.adapters import AdapterRegistry, EngineEndedError, unknown
from tgi_cli.rpc.interface import TokenBatch
from tgi_cli.rpc.streams import OutputBuffer, split_by_request

log = logging.getLogger(__name__)


class RequestUpdate(NamedTuple):
    """New outputs of one request, and the ``time.monotonic()`` at which they arrived."""

    request_id: int
    arrived: float
    batch: TokenBatch


Mailbox = SimpleQueue[list[RequestUpdate] | EngineDeadError]


class _Receiver(OutputBuffer):
    """Collects the outputs of one request for its caller's mailbox."""

    __slots__ = ("mailbox", "request_id")

    def __init__(self, request_id: int, mailbox: Mailbox) -> None:
        super().__init__()
        self.request_id = request_id
        self.mailbox = mailbox


class InProcessEngine:
    """One engine core and its two threads; they end with :meth:`close`, or with the process.

    Args:
        worker: warmed up.
        limits: what a step and a request may not exceed.
        depth: steps in flight beyond the one that is awaited.
        on_stats: gets each step's statistics as JSON, on the loop's thread.
        model_id: of the base, whose name no adapter may have.
        on_end: called when the loop has ended, on its thread.
        grammars: compiles them; None: no request may have one.

    Attributes:
        request_ids: unique ones.
        adapters: those that requests may use.
    """

    def __init__(
        self,
        worker: Worker,
        limits: SchedulerConfig,
        depth: int,
        on_stats: Callable[[str], None] | None = None,
        model_id: str = "",
        on_end: Callable[[], None] | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.request_ids: Iterator[int] = itertools.count(1)
        on_step = None if on_stats is None else _told(on_stats)
        core = EngineCore(worker, limits, depth, grammars, on_step)
        self._inbox, self._outbox = core.inbox, core.outbox
        self.adapters = AdapterRegistry(core.inbox.put, limits.max_loras, model_id)
        self._lock = threading.RLock()
        """Guards the fields below; reentrant, for a stream may be collected at any time."""
        self._receivers: dict[int, _Receiver] = {}
        self._cancelled: set[int] = set()
        self._ended: str | None = None
        """Why nothing can be submitted any more."""
        self._failure: BaseException | None = None
        # The loop alone holds core and worker: when it ends, they and the model are free.
        self._loop = threading.Thread(
            target=self._run, args=(core, on_end), name="engine", daemon=True
        )
        self._sorter = threading.Thread(target=self._sort, name="engine-outputs", daemon=True)
        self._loop.start()
        self._sorter.start()

    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """Give a request to the engine; what becomes of it arrives in ``mailbox``.

        Raises:
            EngineDeadError: the loop has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise self._error()
            self._receivers[request.request_id] = _Receiver(request.request_id, mailbox)
            self._inbox.put(request)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step; its caller is told. One that is not live is ignored."""
        with self._lock:
            if request_id in self._receivers:
                self._cancelled.add(request_id)
                self._inbox.put(Cancel(request_id))

    def drop(self, request_id: int) -> None:
        """End a request at the next step; nobody is told."""
        with self._lock:
            self._cancelled.discard(request_id)
            if self._receivers.pop(request_id, None) is not None:
                self._inbox.put(Cancel(request_id))

    def load_adapter(self, name: str, find: Callable[[], Path], in_place: bool = False) -> None:
        """Load an adapter; see :meth:`~tgi_cli.model_server.adapters.AdapterRegistry.load`.

        Raises:
            EngineDeadError: the engine is gone.
        """
        try:
            self.adapters.load(name, find, in_place)
        except EngineEndedError:
            raise self._error() from None

    def adapter_id(self, name: str | None) -> int:
        """The id of a loaded adapter, 0 for none. Raises ValueError for an unknown name."""
        found = self.adapters.id_of(name or "")
        if found is None:
            raise ValueError(unknown(name or "", self.adapters.now.names))
        return found

    def close(self, cause: str = "the LLM was closed") -> None:
        """End the loop; callers that wait get an EngineDeadError. May be called twice."""
        with self._lock:
            if self._ended is None:
                self._ended = cause
                self._inbox.put(Shutdown())
        if threading.current_thread() not in (self._loop, self._sorter):
            self._loop.join()
            self._sorter.join()

    def fail(self, error: TgiError) -> None:
        """End the loop because its worker is lost; requests end with the cause."""
        self._inbox.put(Fail(error.cause, error.remedy))

    def _error(self) -> EngineDeadError:
        error = EngineDeadError(self._ended or "the engine has ended", "make a new LLM")
        error.__cause__ = self._failure
        return error

    def _run(self, core: EngineCore, on_end: Callable[[], None] | None) -> None:
        try:
            core.run()
        except BaseException as error:  # whatever ended the loop, those who wait must hear of it
            self._failure = error
        finally:
            if on_end is not None:
                on_end()

    def _sort(self) -> None:
        """Take each step's outputs apart by request, until the loop has ended."""
        while (outputs := self._outbox.get()) is not None:
            self.adapters.take(outputs.adapters)
            self._deliver(outputs)
        self._loop.join()
        with self._lock:
            if self._failure is not None:
                self._ended = f"the engine failed: {self._failure}"
                _forget_frames(self._failure)
            elif self._ended is None:
                self._ended = "the engine has ended"
            waiting = {receiver.mailbox for receiver in self._receivers.values()}
            self._receivers.clear()
            for mailbox in waiting:
                mailbox.put(self._error())
        self.adapters.end()

    def _deliver(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
        updates: dict[Mailbox, list[RequestUpdate]] = {}
        with self._lock:
            changed = split_by_request(outputs, self._receivers)
            for finished in outputs.finished:
                request_id = finished.request_id
                receiver = self._receivers.get(request_id)
                if receiver is None:
                    continue
                if finished.reason is FinishReason.CANCELLED and request_id not in self._cancelled:
                    changed.discard(receiver)  # the loop ends: an error will say why
                    continue
                del self._receivers[request_id]
                self._cancelled.discard(request_id)
            for receiver in changed:
                batch, receiver.batch = receiver.pending(), None
                update = RequestUpdate(receiver.request_id, now, batch)
                updates.setdefault(receiver.mailbox, []).append(update)
        for mailbox, update_list in updates.items():
            mailbox.put(update_list)


class RequestGroup:
    """The requests of one caller, used by one thread at a time; leaving it cancels the rest."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.live: set[int] = set()
        self._engine = engine
        self._mailbox: Mailbox = SimpleQueue()

    def submit(self, request: GenerationRequest) -> None:
        """Raises EngineDeadError."""
        self._engine.submit(request, self._mailbox)
        self.live.add(request.request_id)

    def receive(self) -> list[RequestUpdate]:
        """Wait for news of live requests. Raises EngineDeadError."""
        received = self._mailbox.get()
        if isinstance(received, EngineDeadError):
            self.live.clear()
            raise received
        updates = [update for update in received if update.request_id in self.live]
        self.live.difference_update(
            update.request_id for update in updates if update.batch.finished is not None
        )
        return updates

    def drop(self, request_id: int) -> None:
        """End a request at the next step and hear no more of it."""
        if request_id in self.live:
            self.live.discard(request_id)
            self._engine.drop(request_id)

    def close(self) -> None:
        """Cancel what is live."""
        for request_id in list(self.live):
            self.drop(request_id)

    def __enter__(self) -> RequestGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: the worker, and with it the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _told(on_stats: Callable[[str], None]) -> Callable[[StepStats], None]:
    """Step statistics as JSON to the user's callback; one that raises is not called again."""
    broken = False

    def tell(stats: StepStats) -> None:
        nonlocal broken
        if broken:
            return
        try:
            on_stats(json.dumps(stats))
        except Exception:  # a user's code, which must not take the engine down
            broken = True
            log.exception("on_stats raised, and is not called any more")

    return tell
