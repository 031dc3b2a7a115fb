"""The router's end of the wire: one session, many token streams.

One task reads step messages and gives each stream its tokens, which queue until they are read. When
the session breaks, every live stream ends with an error at once, and the client reconnects until
it is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from tgi_cli.engine.messages import EngineInfo, GenerationRequest, ImageInput
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.errors import ShardError
from tgi_cli.rpc import codec, step_socket, tls_probe
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.endpoint import EngineEndpoint
from tgi_cli.rpc.engine_watch import EngineWatch
from tgi_cli.rpc.image_codec import encode_tensors
from tgi_cli.rpc.interface import GONE, AdapterError, Adapters
from tgi_cli.rpc.resubmission import Resubmission, TakeOver
from tgi_cli.rpc.services import make_stub
from tgi_cli.rpc.status import ADAPTER_STATUSES
from tgi_cli.rpc.streams import STOPPING, RequestStream, RequestStreams
from tgi_cli.rpc.tls import TlsFiles

log = logging.getLogger(__name__)


_HINT_SECONDS = 1.0
"""Seconds before the first log line about waiting, if it has a hint."""
_LOG_SECONDS = 10.0
"""Seconds between two log lines about waiting."""
_LIST_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_ADAPTER_FAULTS = {status: fault for fault, status in ADAPTER_STATUSES.items()}

_Outgoing = asyncio.Queue[pb.ClientMessage | ImageInput]
"""Messages to the engine; an image is encoded when its turn comes."""


class _Hung(Exception):
    """The engine makes no progress; the message has the time."""


class GrpcEngineClient:
    """An :class:`tgi_cli.rpc.interface.EngineClient` over gRPC. Make it with :meth:`connect`."""

    def __init__(self, endpoint: EngineEndpoint, *, stall_seconds: float = 60.0) -> None:
        self._endpoint = endpoint
        self._target = endpoint.url
        self._channel = endpoint.aio_channel()
        self._stub = make_stub(pb, self._channel)
        self._watch = EngineWatch(self._stub, stall_seconds)
        self._info: EngineInfo | None = None
        self._instance = ""
        """Identifies the latest start of the engine; empty if unknown."""
        self._callbacks: list[Callable[[bool], None]] = []
        self._metrics = EngineMetrics()
        self._adapters = Adapters()
        self._connected = False
        self._expects_loss = False
        self._streams = RequestStreams(self._cancel)
        self._resubmission = Resubmission(self._streams)
        self._request_ids = itertools.count(1)
        self._outgoing: _Outgoing = asyncio.Queue()
        self._session: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        target: str,
        timeout: float | None = None,  # noqa: ASYNC109 (its end has a meaning of its own)
        *,
        stall_seconds: float = 60.0,
        tls: TlsFiles | None = None,
        hint: str = "",
    ) -> GrpcEngineClient:
        """Wait for the engine at ``target`` and open the session.

        Args:
            target: See :meth:`tgi_cli.rpc.endpoint.EngineEndpoint.parse`.
            timeout: Seconds to wait for the engine, or None to wait forever.
            stall_seconds: Seconds without progress while requests are live, after which the
                session ends; longer for an engine with longer steps. 0 for never.
            tls: TLS files for TCP, or None for an unencrypted connection.
            hint: What to do if no engine is there; logged while it does not answer.

        Raises:
            ConfigError: The address is invalid, or TLS cannot use the files.
            ShardError: No engine answered in time, or TLS will never let it.
        """
        endpoint = EngineEndpoint.parse(target, tls)
        client = cls(endpoint, stall_seconds=stall_seconds)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client._session = asyncio.create_task(client._run_sessions(opened), name="engine session")
        probing = tls_probe.watch(endpoint, opened)
        waited = 0.0
        try:
            while not opened.done():
                left = _LOG_SECONDS if timeout is None else timeout - waited
                if left <= 0:
                    raise ShardError(
                        f"no model server answered at {target} within {timeout:g} s",
                        "is it still loading? see its log",
                    )
                # Who has started no engine should not have to wait for that message.
                pause = min(left, _LOG_SECONDS if waited or not hint else _HINT_SECONDS)
                await asyncio.wait([opened], timeout=pause)
                waited += pause
                if not opened.done():
                    more = f"; {hint}" if hint else ""
                    log.info("waiting for the model server at %s%s", target, more)
            opened.result()
        except BaseException:
            await client.close()
            raise
        finally:
            probing.cancel()
        return client

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "connect() makes clients"
        return self._info

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def accepting(self) -> bool:
        """Whether the engine takes new requests: it is there, and not known to drain."""
        return self._connected and not self._resubmission.refused

    @property
    def num_live(self) -> int:
        """Number of requests in flight."""
        return len(self._streams)

    def is_live(self, request_id: int) -> bool:
        """Whether a request of this id is in flight."""
        return request_id in self._streams

    def on_refused(self, take_over: TakeOver) -> None:
        """Have ``take_over`` submit requests elsewhere that the engine refuses as it drains."""
        self._resubmission.take_over = take_over

    def on_found(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    def expect_loss(self) -> None:
        self._expects_loss = True

    async def healthy(self) -> bool:
        """Return whether the session is open, and the engine answers or has just answered."""
        return self._connected and await self._watch.answers()

    async def metrics(self) -> EngineMetrics:
        if self._connected:
            try:
                answer = await self._stub.Metrics(pb.MetricsRequest(), timeout=2.0)
            except grpc.aio.AioRpcError as error:
                log.debug("no metrics: %s", error.details())
            else:
                self._metrics = codec.decode_metrics(answer)
        return self._metrics

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    async def list_adapters(self) -> Adapters:
        return await self._call(self._stub.ListAdapters, pb.ListAdaptersRequest(), _LIST_SECONDS)

    async def load_adapter(self, name: str, source: str, in_place: bool = False) -> Adapters:
        message = pb.LoadAdapterRequest(name=name, source=source, in_place=in_place)
        return await self._call(self._stub.LoadAdapter, message)

    async def unload_adapter(self, name: str) -> Adapters:
        message = pb.UnloadAdapterRequest(name=name)
        return await self._call(self._stub.UnloadAdapter, message)

    async def _call(self, method: Any, message: object, timeout: float | None = None) -> Adapters:  # noqa: ASYNC109
        """Make a call about adapters, and keep its answer unless another engine was met since."""
        if not self._connected:
            raise ShardError(GONE, "see its log")
        instance = self._instance
        try:
            answer = codec.decode_adapters(await method(message, timeout=timeout))
        except grpc.aio.AioRpcError as error:
            details = error.details() or str(error.code())
            fault = _ADAPTER_FAULTS.get(error.code())
            if fault is None:
                raise ShardError(f"the model server did not answer: {details}") from error
            raise AdapterError(details, fault=fault) from error
        if self._instance == instance:
            self._adapters = answer
        return answer

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> RequestStream:
        if not self.accepting:
            raise ShardError(STOPPING if self._connected else GONE, "see its log")
        message = codec.encode_submit(request, adapter)
        stream = self._streams.open(request.request_id)
        self._send(request, adapter, message)
        return stream

    def adopt(self, stream: RequestStream, request: GenerationRequest, adapter: str) -> None:
        """Submit a request that another engine has refused, whose stream goes on here.

        Raises:
            ShardError: The engine is gone, or drains too.
        """
        if not self.accepting:
            raise ShardError(STOPPING if self._connected else GONE, "see its log")
        message = codec.encode_submit(request, adapter)
        self._streams.adopt(request.request_id, stream)
        self._send(request, adapter, message)

    def _send(self, request: GenerationRequest, adapter: str, message: pb.ClientMessage) -> None:
        self._resubmission.sent(request, adapter)
        if request.fork_of is None:  # otherwise the engine has them
            for image in {image.digest: image for image in request.images}.values():
                self._outgoing.put_nowait(image)
        self._outgoing.put_nowait(message)

    def next_request_id(self) -> int:
        return next(self._request_ids)

    async def close(self) -> None:
        """End the session; live streams end with an error."""
        if self._session is not None:
            self._session.cancel()
            with suppress(asyncio.CancelledError):
                await self._session
        self._watch.close()
        await self._channel.close(None)

    # -- the session --------------------------------------------------------------------------

    async def _run_sessions(self, opened: asyncio.Future[None]) -> None:
        """Keep a session open: reconnect after each loss."""
        attempt = 0
        while True:
            cause, ended = GONE, False
            try:
                answer = await self._stub.Info(pb.InfoRequest(), wait_for_ready=True)
                listener = step_socket.Listener.beside(self._endpoint.path)
                named = () if listener is None else ((step_socket.METADATA, listener.name),)
                call = self._stub.Session(metadata=named)
                by_socket: socket.socket | None = None
                try:
                    try:
                        answered = await call.initial_metadata()
                        if call.done():  # refused, as by an engine that drains
                            await call.read()
                        if listener is not None and step_socket.METADATA in dict(answered):
                            by_socket = listener.accept()
                    finally:
                        if listener is not None:
                            listener.close()
                    self._outgoing = asyncio.Queue()
                    self._resubmission.clear()
                    self._update_info(answer)
                    self._connected = True
                    attempt = 0
                    if not opened.done():
                        opened.set_result(None)
                    else:
                        log.info("found the model server at %s again", self._target)
                    await self._serve(call, by_socket)
                    ended = True
                finally:
                    call.cancel()
            except grpc.aio.AioRpcError as error:
                log.debug("session with %s: %s", self._target, error.details())
            except _Hung as error:
                cause = str(error)
            except Exception as error:
                # A defect here must not leave streams waiting: log it and end the session.
                log.error("the session with the model server failed", exc_info=error)
                if not opened.done():
                    opened.set_exception(error)
                    return
            finally:
                lost = self._connected
                self._connected = False
                self._watch.forget()
                if ended:
                    self._resubmission.pass_on_all()
                self._streams.end(cause)
            expected, self._expects_loss = self._expects_loss, False
            if expected and lost:
                log.info("the model server at %s has stopped", self._target)
            elif ended:
                log.warning("the model server at %s has stopped", self._target)
            elif lost:
                log.error("%s (%s)", cause, self._target)
            if cause is not GONE:
                await self._watch.until_moved()
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1

    def _update_info(self, answer: pb.InfoResponse) -> None:
        """Update the engine's info and adapters, and call the callbacks."""
        another = not answer.instance or answer.instance != self._instance
        self._instance = answer.instance
        self._info = codec.decode_info(answer)
        self._adapters = codec.decode_adapters(answer.adapters)
        if another:
            self._metrics = EngineMetrics()
        for callback in self._callbacks:
            callback(another)

    async def _serve(self, call: Any, by_socket: socket.socket | None) -> None:
        """Write and read until the session ends, or the engine hangs."""
        tasks = [
            asyncio.create_task(self._read(call, by_socket), name="engine reader"),
            asyncio.create_task(self._watch.until_hung(self.info.step_seconds), name="watch"),
            asyncio.create_task(self._write(call, self._outgoing), name="engine writer"),
        ]
        reading, hanging, _ = tasks
        try:
            await asyncio.wait((reading, hanging), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                seconds = hanging.result()
                raise _Hung(f"the model server has not moved for {seconds:g} s")
            reading.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _read(self, call: Any, by_socket: socket.socket | None) -> None:
        """Deliver the engine's messages until the session ends."""
        reader = step_socket.Reader(self._deliver)
        transport: asyncio.BaseTransport | None = None
        try:
            if by_socket is not None:
                loop = asyncio.get_running_loop()
                transport, _ = await loop.create_unix_connection(lambda: reader, sock=by_socket)
            async for message in call:
                self._deliver(message)
            if transport is not None:
                await reader.ended  # all messages sent before the end of the call have arrived
        finally:
            if transport is not None:
                transport.close()

    def _deliver(self, message: pb.StepMessage) -> None:
        outputs = codec.decode_step(message)
        if outputs.started or outputs.finished:
            self._resubmission.check(outputs)
        self._streams.deliver(outputs)

    @staticmethod
    async def _write(call: Any, outgoing: _Outgoing) -> None:
        try:
            while True:
                message = await outgoing.get()
                if isinstance(message, ImageInput):
                    message = await asyncio.to_thread(encode_tensors, message)
                await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the session has ended; the reader gets the cause

    def _cancel(self, request_id: int) -> None:
        """Send the engine the cancellation of a stream."""
        self._resubmission.forget(request_id)
        if self._connected:
            self._outgoing.put_nowait(codec.encode_cancel(request_id))


def fetch_info(target: str, timeout: float, tls: TlsFiles | None = None) -> EngineInfo:
    """Fetch an engine's info from synchronous code.

    Raises:
        ShardError: It did not answer within ``timeout`` seconds.
    """
    with EngineEndpoint.parse(target, tls).channel() as channel:
        try:
            stub = make_stub(pb, channel)
            answer = stub.Info(pb.InfoRequest(), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ShardError(f"no model server answered at {target}: {error.details()}") from error
    return codec.decode_info(answer)
