"""Loading, unloading and listing LoRA adapters: the registry of their names, and the rpcs.

A name may be reused after its adapter was unloaded. An id is never reused, so that what the engine
caches for one adapter can never serve another.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import grpc

from tgi_cli.engine.messages import AdapterAnswer, LoadAdapter, UnloadAdapter
from tgi_cli.errors import ModelNotFoundError, ShardError, TgiError
from tgi_cli.hub import lora_files as hub
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.interface import Adapter, AdapterError, AdapterFault, Adapters
from tgi_cli.rpc.status import ADAPTER_STATUSES, shorten

log = logging.getLogger(__name__)

MAX_CALLS = 4
"""Adapters that are fetched and loaded concurrently; each holds a thread that other calls need."""

MAX_SOURCE = 4096
"""Characters of a path, as on Linux."""


class EngineEndedError(ShardError):
    """The engine's loop has ended and answers no more messages."""


class AdapterRegistry:
    """The adapters of one engine. Any thread may call any method.

    Args:
        send: Puts a message into the engine's inbox.
        max_loras: Adapters that can share a batch; 0 if none can be loaded.
        model_id: The base model.

    Attributes:
        now: The loaded adapters; immutable, replaced at each change.
    """

    def __init__(
        self,
        send: Callable[[LoadAdapter | UnloadAdapter], None],
        max_loras: int = 0,
        model_id: str = "",
    ) -> None:
        self.now = Adapters(max_loras)
        self._send = send
        self._model_id = model_id
        self._next_ids = itertools.count(1)
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._ids: dict[str, int] = {}
        self._loaded: dict[str, Adapter] = {}
        self._loading: set[str] = set()
        self._waiting: dict[int, Future[str]] = {}
        self._ended = False

    def id_of(self, name: str) -> int:
        """Return the engine's id of a loaded adapter, or 0 for no name.

        Raises:
            ValueError: No adapter of this name is loaded.
        """
        if not name:
            return 0
        try:
            return self._ids[name]
        except KeyError:
            raise ValueError(_unknown(name, self.now.names)) from None

    def load(self, name: str, find: Callable[[], Path], in_place: bool = False) -> None:
        """Load an adapter and wait until requests may name it.

        Args:
            name: For requests to use.
            find: Returns its folder; called once the name is known to be free.
            in_place: Replace an adapter of the same name once the new one is loaded.

        Raises:
            AdapterError: The name is taken, adapters are off, or the adapter does not fit.
            ConfigError: The name is invalid.
            HubError, ModelError: Raised by ``find``.
            EngineEndedError: The engine's loop has ended.
        """
        if not self.now.max_loras:
            raise AdapterError(
                "adapters are off",
                "start the server with --lora-adapters, or with --max-loras",
                AdapterFault.OFF,
            )
        hub.check_name(name, self._model_id)
        with self._lock:
            if name in self._loading or (name in self._ids and not in_place):
                raise AdapterError(
                    f"an adapter {name!r} is loaded already",
                    "unload it first, or replace it",
                    AdapterFault.TAKEN,
                )
            self._loading.add(name)
        try:
            began = time.monotonic()
            path = find()
            base = hub.base_model_of(path)
            if not hub.is_same_base(base, self._model_id):
                log.warning(
                    "the adapter %s names %s as its base, and %s is served: is it the right one?",
                    name,
                    base,
                    self._model_id,
                )
            adapter_id = next(self._next_ids)
            error = self._request(LoadAdapter(adapter_id, name, str(path)))
            if error:
                raise AdapterError(error)
            with self._lock:
                before = self._ids.get(name)
                self._ids[name] = adapter_id
                self._loaded[name] = Adapter(name, str(path))
                self._publish()
            if before is not None:
                self._send(UnloadAdapter(before))
            log.info("adapter %s: %s, loaded in %.1f s", name, path, time.monotonic() - began)
        finally:
            with self._lock:
                self._loading.discard(name)

    def unload(self, name: str) -> None:
        """Remove a name; requests that use the adapter run to their end. Raises AdapterError."""
        with self._lock:
            adapter_id = self._ids.pop(name, None)
            self._loaded.pop(name, None)
            self._publish()
        if adapter_id is None:
            raise AdapterError(_unknown(name, self.now.names), fault=AdapterFault.UNKNOWN)
        self._send(UnloadAdapter(adapter_id))
        log.info("adapter %s: unloaded", name)

    def take(self, answers: Iterable[AdapterAnswer]) -> None:
        """Handle the engine's answers; no thread waits for the answer to an unloading."""
        for answer in answers:
            with self._lock:
                waiting = self._waiting.pop(answer.adapter_id, None)
            if waiting is not None:
                waiting.set_result(answer.error)
            elif answer.error:
                log.warning("adapter %d: %s", answer.adapter_id, answer.error)

    def end(self) -> None:
        """Fail the calls that wait: the engine's loop has ended."""
        with self._lock:
            self._ended = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(_ended())

    def _request(self, message: LoadAdapter) -> str:
        future: Future[str] = Future()
        with self._lock:
            if self._ended:
                raise _ended()
            self._waiting[message.adapter_id] = future
        self._send(message)
        return future.result()

    def _publish(self) -> None:
        self.now = Adapters(self.now.max_loras, tuple(self._loaded.values()))


class AdapterServicer:
    """The calls of the service that are about adapters."""

    def __init__(self, adapters: AdapterRegistry) -> None:
        self.adapters = adapters
        self._calls = threading.BoundedSemaphore(MAX_CALLS)

    def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.Adapters:
        source, revision = hub.split_revision(request.source)

        def find() -> Path:
            if len(source) > MAX_SOURCE:
                raise AdapterError(
                    f"the path or id has {len(source)} characters, more than {MAX_SOURCE}"
                )
            try:
                return hub.resolve_adapter(source, revision, absolute=True)
            except OSError as error:  # a name that is too long for the file system
                raise AdapterError(f"invalid adapter path: {error.strerror}") from error

        return self._run(context, lambda: self.adapters.load(request.name, find, request.in_place))

    def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.Adapters:
        return self._run(context, lambda: self.adapters.unload(request.name))

    def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.ServicerContext
    ) -> pb.Adapters:
        return codec.encode_adapters(self.adapters.now)

    def _run(self, context: grpc.ServicerContext, work: Callable[[], None]) -> pb.Adapters:
        """Do the work and return the loaded adapters; errors become the call's status."""
        if not self._calls.acquire(blocking=False):
            busy = f"{MAX_CALLS} adapters are being loaded already; try again"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        try:
            work()
        except EngineEndedError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, shorten(error.cause))
        except TgiError as error:
            context.abort(ADAPTER_STATUSES[_fault(error)], shorten(one_line(error)))
        finally:
            self._calls.release()
        return codec.encode_adapters(self.adapters.now)


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return an error text with the adapters that there are."""
    names = ", ".join(sorted(known))
    others = f"there are: {names}" if names else "none is loaded"
    if len(name) > hub.NAME_CHARACTERS:
        return f"there is no adapter with a name of {len(name)} characters; {others}"
    return f"there is no adapter {name!r}; {others}"


def _ended() -> EngineEndedError:
    return EngineEndedError("the engine has ended", "see its log")


def _fault(error: TgiError) -> AdapterFault:
    if isinstance(error, AdapterError):
        return error.fault
    missing = isinstance(error, ModelNotFoundError)
    return AdapterFault.UNKNOWN if missing else AdapterFault.UNUSABLE


def one_line(error: TgiError) -> str:
    """Return cause and remedy."""
    return f"{error.cause}; {error.remedy}" if error.remedy else error.cause
