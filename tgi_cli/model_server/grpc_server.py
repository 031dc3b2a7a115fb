"""The model server's gRPC server: sessions around the queues of one engine.

The threads:

- a session's reader puts submits and cancels into the engine's inbox;
- the dispatcher splits each step's outputs from the engine's outbox by session;
- a session's writer merges the outputs that are queued for it, encodes and sends them, by gRPC or
  on a socket of its own (:mod:`tgi_cli.rpc.step_socket`).

None of them is the engine's thread. A writer that is behind sends several steps as one message:
a slow client costs memory bounded by its own requests, and no time of others.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import grpc

from tgi_cli.engine.core import Inbound
from tgi_cli.engine.messages import Cancel, EngineInfo, Finished, FinishReason, StepOutputs
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.engine.validation import validate_request
from tgi_cli.errors import AddressInUseError
from tgi_cli.model_server.adapters import AdapterRegistry, AdapterServicer
from tgi_cli.model_server.grpc_service import GrpcService
from tgi_cli.model_server.request_spans import RequestSpans
from tgi_cli.model_server.session import ClientSession
from tgi_cli.process import unix_socket
from tgi_cli.rpc import channel_options, codec, services, step_socket
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.status import shorten

log = logging.getLogger(__name__)

MAX_SESSIONS = 24
_UNARY_THREADS = 8
"""Threads beyond those of sessions, so that Info and Health are always answered."""


class Engine(Protocol):
    """The part of :class:`tgi_cli.engine.core.EngineCore` that the server uses."""

    inbox: SimpleQueue[Inbound]
    outbox: SimpleQueue[StepOutputs | None]

    @property
    def progress(self) -> int: ...

    @property
    def live_requests(self) -> int: ...

    @property
    def metrics(self) -> EngineMetrics: ...


class _Route(NamedTuple):
    session: ClientSession
    client_id: int


class EngineServer(AdapterServicer):
    """Serves one engine on a unix socket. Each client's ids are its own.

    Args:
        engine: The engine, whose loop runs in another thread.
        info: The engine's effective settings, for clients.
        max_loras: Adapters that can share a batch; 0 if none can be loaded.
        spans: Records the spans of traced requests. Default: nothing does.

    Attributes:
        services: Other services on the same server; add them before :meth:`start`.
        sessions: The open sessions.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        max_loras: int = 0,
        spans: RequestSpans | None = None,
    ) -> None:
        super().__init__(AdapterRegistry(engine.inbox.put, max_loras, info.model_id))
        self._spans = spans
        self.services: list[GrpcService] = []
        self._engine = engine
        self._info = info
        self._instance = uuid.uuid4().hex
        self._engine_ids = itertools.count(1)
        self._lock = threading.Lock()
        """Guards ``sessions``, ``_routes`` (but for look-ups) and the sessions' fields."""
        self.sessions: set[ClientSession] = set()
        self._routes: dict[int, _Route] = {}
        self._closed_because = ""
        self._draining = False
        self._server: grpc.Server | None = None
        self._folder: Path | None = None
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatch", daemon=True)

    @property
    def live_requests(self) -> int:
        """Requests that were accepted and whose end was not reported; from any thread.

        The engine may not have seen some of them yet. After :meth:`drain` there are no new ones.
        """
        return len(self._routes)

    # -- life ---------------------------------------------------------------------------------

    def listen_to_engine(self) -> None:
        """Start dispatching the engine's outputs, before clients can connect."""
        self._dispatcher.start()

    def start(self, path: Path) -> None:
        """Bind the socket and serve, in threads.

        Raises:
            ConfigError, AddressInUseError: see :func:`tgi_cli.process.unix_socket.claim`.
        """
        unix_socket.claim(path)
        server = grpc.server(
            ThreadPoolExecutor(MAX_SESSIONS + _UNARY_THREADS, thread_name_prefix="rpc"),
            options=channel_options.TCP_SERVER
            if any(service.remote for service in self.services)
            else channel_options.SERVER,
            interceptors=() if self._spans is None else (self._spans.calls,),
        )
        services.add_to_server(pb, self, server)
        for service in self.services:
            service.add_to(server)
        try:
            server.add_insecure_port(f"unix:{path}")
            path.chmod(0o600)
        except (RuntimeError, OSError) as error:
            raise AddressInUseError(f"cannot listen on {path}: {error}") from error
        if not self._dispatcher.is_alive():
            self.listen_to_engine()
        self._folder = path.parent
        server.start()
        self._server = server

    def drain(self) -> None:
        """Refuse new requests from now on; live ones continue."""
        with self._lock:
            self._closed_because = "the model server is shutting down"
            self._draining = True
        for service in self.services:
            service.drain()

    def stop(self, cause: str = "the model server has stopped") -> None:
        """End every session and close the socket. Requests still live end with ``cause``.

        Call it after the engine's loop: the last outputs are delivered first.
        """
        if self._dispatcher.is_alive():
            self._dispatcher.join(timeout=2.0)
        for service in self.services:
            service.end(cause)
        with self._lock:
            self._closed_because = cause
            for session in self.sessions:
                if session.live:
                    session.outgoing.put(self._ended(list(session.live), cause))
                session.outgoing.put(None)
        if self._server is not None:
            self._server.stop(grace=2.0).wait()

    # -- rpcs ---------------------------------------------------------------------------------

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return codec.encode_info(self._info, self.adapters.now, self._instance)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        engine = self._engine
        return pb.HealthResponse(steps=engine.progress, live_requests=engine.live_requests)

    def Metrics(
        self, request: pb.MetricsRequest, context: grpc.ServicerContext
    ) -> pb.MetricsResponse:
        return codec.encode_metrics(self._engine.metrics)

    def Session(
        self, request_iterator: Iterator[pb.ClientMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.StepMessage]:
        session = ClientSession()
        with self._lock:
            full = len(self.sessions) >= MAX_SESSIONS
            closed = self._closed_because
            if not full and not closed:
                self.sessions.add(session)
        if closed:
            context.abort(grpc.StatusCode.UNAVAILABLE, shorten(closed))
        if full:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} clients are connected already"
            )
        if not context.add_callback(lambda: self._close(session)):
            self._close(session)
            return
        by_socket = self._steps_of(session, context)
        context.send_initial_metadata(((step_socket.METADATA, "1"),) if by_socket else ())
        threading.Thread(
            target=self._read, args=(session, request_iterator), name="session", daemon=True
        ).start()
        messages = session.messages()
        if session.steps is not None:
            step_socket.send(session.steps, messages)
        else:
            yield from messages

    def _steps_of(self, session: ClientSession, context: grpc.ServicerContext) -> bool:
        """Connect to the client's step socket; return False if it has none or it is unreachable."""
        names = [
            value for key, value in context.invocation_metadata() if key == step_socket.METADATA
        ]
        if self._folder is None or not names:
            return False
        connection = step_socket.connect(self._folder, str(names[0]))
        with self._lock:
            session.use(connection)
        return connection is not None

    # -- a session's threads ------------------------------------------------------------------

    def _read(self, session: ClientSession, messages: Iterator[pb.ClientMessage]) -> None:
        """Handle the client's messages until it half-closes the stream or is gone."""
        try:
            for message in messages:
                kind = message.WhichOneof("kind")
                if kind == "submit":
                    self._submit(session, message.submit)
                elif kind == "tensors":
                    session.images.add(message.tensors)
                else:
                    self._cancel(session, message.cancel)
        except Exception as error:  # grpc raises a bare Exception when the call has ended
            log.debug("a session ended: %s", error)
            return
        with self._lock:
            session.half_closed = True
            if not session.live:
                session.outgoing.put(None)

    def _submit(self, session: ClientSession, message: pb.Submit) -> None:
        client_id = message.request_id
        problem = ""
        try:
            request = codec.decode_submit(message, session.images)
            validate_request(request, self._info)
            adapter_id = self.adapters.id_of(message.adapter)
        except ValueError as error:
            problem = str(error)
        with self._lock:
            if session.closed:
                return
            reason = FinishReason.ERROR
            if self._closed_because:
                problem = self._closed_because
                if self._draining:  # its client may have another engine
                    reason = FinishReason.DRAINING
            elif client_id in session.live:
                problem = f"request id {client_id} is in use"
            if problem:
                session.outgoing.put(self._ended([client_id], problem, reason))
                return
            engine_id = next(self._engine_ids)
            # Its parent may have ended: then there is nothing to share.
            fork_of = None if request.fork_of is None else session.live.get(request.fork_of)
            session.live[client_id] = engine_id
            self._routes[engine_id] = _Route(session, client_id)
        if self._spans is not None:
            self._spans.begin(engine_id, request)
        self._engine.inbox.put(
            replace(request, request_id=engine_id, fork_of=fork_of, adapter_id=adapter_id)
        )

    def _cancel(self, session: ClientSession, client_id: int) -> None:
        """Forward a cancel; the id stays live until the engine reports the end."""
        with self._lock:
            engine_id = session.live.get(client_id)
        if engine_id is not None:
            self._engine.inbox.put(Cancel(engine_id))

    def _close(self, session: ClientSession) -> None:
        """The call has ended: cancel the client's requests."""
        with self._lock:
            self.sessions.discard(session)
            orphans = session.close()
            for engine_id in orphans:
                self._routes.pop(engine_id, None)
        for engine_id in orphans:
            self._engine.inbox.put(Cancel(engine_id))
        session.outgoing.put(None)

    # -- the dispatcher's thread --------------------------------------------------------------

    def _dispatch(self) -> None:
        while (outputs := self._engine.outbox.get()) is not None:
            self.adapters.take(outputs.adapters)
            self._split(outputs)
            if self._spans is not None:
                self._spans.take(outputs)
        self.adapters.end()

    def _split(self, outputs: StepOutputs) -> None:
        """Give each session its outputs under its own ids; drop those of ended sessions."""
        routes = self._routes
        parts: defaultdict[ClientSession, StepOutputs] = defaultdict(StepOutputs)
        found = [routes.get(engine_id) for engine_id in outputs.request_ids]
        first = found[0] if found else None
        if first is not None and all(r is not None and r.session is first.session for r in found):
            # One client, the usual case: its arrays are the engine's.
            parts[first.session] = StepOutputs(
                [route.client_id for route in found if route is not None],
                outputs.token_ids,
                outputs.logprobs,
                outputs.top_ids,
                outputs.top_logprobs,
            )
        else:
            for index, route in enumerate(found):
                if route is None:
                    continue
                part = parts[route.session]
                part.request_ids.append(route.client_id)
                part.token_ids.append(outputs.token_ids[index])
                part.logprobs.append(outputs.logprobs[index])
                part.top_ids.append(outputs.top_ids[index])
                part.top_logprobs.append(outputs.top_logprobs[index])
        for name in ("started", "prompt_logprobs", "drafts", "finished"):
            for entry in getattr(outputs, name):
                route = routes.get(entry.request_id)
                if route is not None:
                    own = replace(entry, request_id=route.client_id)
                    getattr(parts[route.session], name).append(own)
        if outputs.finished:
            self._end_requests(finished.request_id for finished in outputs.finished)
        for session, part in parts.items():
            session.outgoing.put(part)
        if outputs.finished:
            self._end_half_closed(parts)

    def _end_requests(self, engine_ids: Iterable[int]) -> None:
        with self._lock:
            for engine_id in engine_ids:
                route = self._routes.pop(engine_id, None)
                if route is not None:
                    route.session.live.pop(route.client_id, None)

    def _end_half_closed(self, sessions: Iterable[ClientSession]) -> None:
        with self._lock:
            for session in sessions:
                if session.half_closed and not session.live:
                    session.outgoing.put(None)

    def _ended(
        self, client_ids: list[int], cause: str, reason: FinishReason = FinishReason.ERROR
    ) -> StepOutputs:
        return StepOutputs(finished=[Finished(i, reason, cause) for i in client_ids])
