"""The engine in this process: its loop in one thread, the dispatch of its outputs in another.

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
from typing import NamedTuple

from tgi_cli.engine.block_store import BlockStore
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
from tgi_cli.engine.speculator import Speculator
from tgi_cli.engine.step import GrammarCompiler, Worker
from tgi_cli.errors import TgiError
from tgi_cli.llm.outputs import EngineDeadError
from tgi_cli.model_server.adapters import AdapterRegistry, EngineEndedError
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
        worker: Worker, warmed up.
        limits: Limits of steps and requests.
        depth: Steps in flight beyond the one that is awaited.
        on_stats: Called with each step's statistics as JSON, on the loop's thread.
        model_id: Id of the base model; adapters may not have this name.
        on_end: Called when the loop has ended, on its thread.
        grammars: Compiles grammars. Default: requests with one are refused.
        speculator: Proposes draft tokens. Default: no speculative decoding.
        blocks: Keeps copies of KV blocks. Default: none are kept.

    Attributes:
        request_ids: Unique ids for requests.
        adapters: The loaded adapters.
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
        speculator: Speculator | None = None,
        blocks: BlockStore | None = None,
    ) -> None:
        self.request_ids: Iterator[int] = itertools.count(1)
        on_step = None if on_stats is None else _json_callback(on_stats)
        core = EngineCore(worker, limits, depth, grammars, speculator, on_step, blocks=blocks)
        self._inbox, self._outbox = core.inbox, core.outbox
        self.adapters = AdapterRegistry(core.inbox.put, limits.max_loras, model_id)
        self._lock = threading.RLock()
        """Guards the fields below; reentrant, as a stream may be garbage-collected at any time."""
        self._receivers: dict[int, _Receiver] = {}
        self._cancelled: set[int] = set()
        self._ended: str | None = None
        """Why the engine accepts no more requests, or None."""
        self._failure: BaseException | None = None
        # The loop alone refers to core and worker, so that its end frees the model.
        self._loop = threading.Thread(
            target=self._run, args=(core, on_end), name="engine", daemon=True
        )
        self._dispatcher = threading.Thread(
            target=self._dispatch, name="engine-outputs", daemon=True
        )
        self._loop.start()
        self._dispatcher.start()

    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """Submit a request, whose outputs arrive in ``mailbox``. Raises EngineDeadError."""
        with self._lock:
            if self._ended is not None:
                raise self._error()
            self._receivers[request.request_id] = _Receiver(request.request_id, mailbox)
            self._inbox.put(request)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, with an update for its caller; ignored if not live."""
        with self._lock:
            if request_id in self._receivers:
                self._cancelled.add(request_id)
                self._inbox.put(Cancel(request_id))

    def drop(self, request_id: int) -> None:
        """End a request at the next step, without an update."""
        with self._lock:
            self._cancelled.discard(request_id)
            if self._receivers.pop(request_id, None) is not None:
                self._inbox.put(Cancel(request_id))

    def load_adapter(self, name: str, find: Callable[[], Path], in_place: bool = False) -> None:
        """See :meth:`tgi_cli.model_server.adapters.AdapterRegistry.load`; also EngineDeadError."""
        try:
            self.adapters.load(name, find, in_place)
        except EngineEndedError:
            raise self._error() from None

    def adapter_id(self, name: str | None) -> int:
        """The id of a loaded adapter, or 0 for the base model. Raises ValueError."""
        return self.adapters.id_of(name or "")

    def close(self, cause: str = "the LLM was closed") -> None:
        """End the loop; waiting callers get an EngineDeadError. May be called twice."""
        with self._lock:
            if self._ended is None:
                self._ended = cause
                self._inbox.put(Shutdown())
        if threading.current_thread() not in (self._loop, self._dispatcher):
            self._loop.join()
            self._dispatcher.join()

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
        except BaseException as error:  # whatever ended the loop, waiting callers must get it
            self._failure = error
        finally:
            if on_end is not None:
                on_end()

    def _dispatch(self) -> None:
        """Dispatch the outputs of each step until the loop has ended."""
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
    """The requests of one caller, used by one thread at a time; :meth:`close` cancels them."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.live: set[int] = set()
        self._engine = engine
        self._mailbox: Mailbox = SimpleQueue()

    def submit(self, request: GenerationRequest) -> None:
        """Raises EngineDeadError."""
        self.live.add(request.request_id)  # first: Ctrl-C may come while it is submitted
        try:
            self._engine.submit(request, self._mailbox)
        except EngineDeadError:
            self.live.discard(request.request_id)
            raise

    def receive(self) -> list[RequestUpdate]:
        """Wait for updates of live requests. Raises EngineDeadError."""
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
        """End a request at the next step, without an update."""
        if request_id in self.live:
            self.live.discard(request_id)
            self._engine.drop(request_id)

    def close(self) -> None:
        """Cancel the live requests."""
        for request_id in list(self.live):
            self.drop(request_id)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error, which refer to the worker and so to the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _json_callback(on_stats: Callable[[str], None]) -> Callable[[StepStats], None]:
    """Call the user's callback with statistics as JSON, until it raises."""
    broken = False

    def callback(stats: StepStats) -> None:
        nonlocal broken
        if broken:
            return
        try:
            on_stats(json.dumps(stats))
        except Exception:  # code of the user, which must not end the engine
            broken = True
            log.exception("on_stats raised an error and is not called again")

    return callback
