"""The router's end of the wire: one session, many token streams.

One task reads step messages and hands each request its tokens; a stream that nobody reads just
gathers. When the session breaks, every live stream ends with an error at once, and the client
looks for the engine again until it is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from tgi_cli.engine.messages import (
    EngineInfo,
    Finished,
    FinishReason,
    GenerationRequest,
    StepOutputs,
)
from tgi_cli.errors import ShardError
from tgi_cli.rpc import adapter_calls, codec, engine_pb2_grpc, probe, statistics, steps
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.address import Endpoint
from tgi_cli.rpc.interface import Adapters, EngineLoad, EngineStatistics, TokenBatch
from tgi_cli.rpc.tls import TlsFiles

log = logging.getLogger(__name__)

GONE = "the model server is gone"
STOPPING = "the model server is shutting down"

_PATIENCE_SECONDS = 10.0
"""Between two words about waiting."""
_LIST_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


class _Stream:
    """The tokens of one request, gathered until they are asked for."""

    __slots__ = ("_batch", "_client", "_done", "_request_id", "_waiter")

    def __init__(self, client: GrpcEngineClient, request_id: int) -> None:
        self._client = client
        self._request_id = request_id
        self._batch: TokenBatch | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._done = False

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        while self._batch is None:
            if self._done:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch, self._batch = self._batch, None
        if batch.finished is not None:
            self._done = True
        return batch

    def cancel(self) -> None:
        self._batch = None
        self._done = True
        self._wake()
        self._client._cancel(self._request_id, self)

    def _gathered(self) -> TokenBatch:
        """The batch that the reader of the session adds to."""
        batch = self._batch
        if batch is None:
            batch = self._batch = TokenBatch()
        return batch

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class GrpcEngineClient:
    """An :class:`tgi_cli.rpc.interface.EngineClient` over gRPC. Make it with :meth:`connect`."""

    def __init__(self, endpoint: Endpoint, *, stall_seconds: float = 120.0) -> None:
        self._endpoint = endpoint
        self._target = endpoint.url
        self._stall_seconds = stall_seconds
        self._channel = endpoint.aio_channel()
        self._stub = engine_pb2_grpc.EngineStub(self._channel)  # type: ignore[no-untyped-call]
        self._info: EngineInfo | None = None
        self._load = EngineLoad()
        self._statistics = EngineStatistics()
        self._adapters = Adapters()
        self._connected = False
        self._streams: dict[int, _Stream] = {}
        self._request_ids = itertools.count(1)
        self._outgoing: asyncio.Queue[pb.ClientMessage] = asyncio.Queue()
        self._keeper: asyncio.Task[None] | None = None
        self._seen: tuple[int, float] | None = None
        """The step counter while requests were live, and when it was first seen so."""

    @classmethod
    async def connect(
        cls,
        target: str,
        timeout: float | None = None,  # noqa: ASYNC109 (its end has a meaning of its own)
        *,
        stall_seconds: float = 120.0,
        tls: TlsFiles | None = None,
    ) -> GrpcEngineClient:
        """Wait for the engine at ``target`` and open the session.

        Args:
            target: as :meth:`tgi_cli.rpc.address.Endpoint.parse` takes it.
            timeout: seconds to wait for it to come up; None waits for ever.
            stall_seconds: how long one step may take before :meth:`healthy` says no.
            tls: how it is spoken to on TCP; None: in the clear.

        Raises:
            ConfigError: an address that is none, or files that TLS cannot use.
            ShardError: no engine answered in time, or none ever will: TLS keeps it apart.
        """
        endpoint = Endpoint.parse(target, tls)
        client = cls(endpoint, stall_seconds=stall_seconds)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client._keeper = asyncio.create_task(client._keep(opened), name="engine session")
        looking = probe.watch(endpoint, opened)
        waited = 0.0
        try:
            while not opened.done():
                left = _PATIENCE_SECONDS if timeout is None else timeout - waited
                if left <= 0:
                    raise ShardError(
                        f"no model server answered at {target} within {timeout:g} s",
                        "is it still loading? see its log",
                    )
                await asyncio.wait([opened], timeout=min(left, _PATIENCE_SECONDS))
                waited += min(left, _PATIENCE_SECONDS)
                if not opened.done():
                    log.info("waiting for the model server at %s", target)
            opened.result()
        except BaseException:
            await client.close()
            raise
        finally:
            looking.cancel()
        return client

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "connect() makes clients"
        return self._info

    @property
    def load(self) -> EngineLoad:
        return self._load

    @property
    def connected(self) -> bool:
        return self._connected

    async def healthy(self) -> bool:
        """Ask the engine, for two seconds at most.

        False when it does not answer, or when requests are live and no step has ended for
        ``stall_seconds`` of asking.
        """
        if not self._connected:
            return False
        try:
            health = await self._stub.Health(pb.HealthRequest(), timeout=2.0)
        except grpc.aio.AioRpcError:
            return False
        if not health.live_requests:
            self._seen = None
            return True
        now = time.monotonic()
        if self._seen is None or self._seen[0] != health.steps:
            self._seen = (health.steps, now)
            return True
        return now - self._seen[1] < self._stall_seconds

    async def statistics(self) -> EngineStatistics:
        if self._connected:
            try:
                answer = await self._stub.Statistics(pb.StatisticsRequest(), timeout=2.0)
            except grpc.aio.AioRpcError as error:
                log.debug("no statistics: %s", error.details())
            else:
                self._statistics = statistics.decode(answer)
                self._load = codec.decode_load(answer.load)
        return self._statistics

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    async def list_adapters(self) -> Adapters:
        method, seconds = self._stub.ListAdapters, _LIST_SECONDS
        self._adapters = await adapter_calls.call(method, pb.ListAdaptersRequest(), seconds)
        return self._adapters

    async def load_adapter(self, name: str, source: str, in_place: bool = False) -> Adapters:
        message = pb.LoadAdapterRequest(name=name, source=source, in_place=in_place)
        self._adapters = await adapter_calls.call(self._stub.LoadAdapter, message)
        return self._adapters

    async def unload_adapter(self, name: str) -> Adapters:
        message = pb.UnloadAdapterRequest(name=name)
        self._adapters = await adapter_calls.call(self._stub.UnloadAdapter, message)
        return self._adapters

    def submit(self, request: GenerationRequest, adapter: str = "") -> _Stream:
        if not self._connected:
            raise ShardError(GONE, "see its log")
        message = codec.encode_submit(request, adapter)
        stream = _Stream(self, request.request_id)
        self._streams[request.request_id] = stream
        self._outgoing.put_nowait(message)
        return stream

    def next_request_id(self) -> int:
        return next(self._request_ids)

    async def close(self) -> None:
        """End the session; live streams end with an error."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        await self._channel.close(None)

    # -- the session --------------------------------------------------------------------------

    async def _keep(self, opened: asyncio.Future[None]) -> None:
        """Hold a session open; after a loss, look for the engine until there is one again."""
        attempt = 0
        while True:
            try:
                answer = await self._stub.Info(pb.InfoRequest(), wait_for_ready=True)
                listener = steps.Listener.beside(self._endpoint.path)
                named = () if listener is None else ((steps.METADATA, listener.name),)
                call = self._stub.Session(metadata=named)
                by_socket: socket.socket | None = None
                try:
                    try:
                        answered = await call.initial_metadata()
                        if listener is not None and steps.METADATA in dict(answered):
                            by_socket = listener.accept()
                    finally:
                        if listener is not None:
                            listener.close()
                    self._info = codec.decode_info(answer)
                    self._adapters = codec.decode_adapters(answer.adapters)
                    self._outgoing = asyncio.Queue()
                    self._seen = None
                    self._connected = True
                    attempt = 0
                    if not opened.done():
                        opened.set_result(None)
                    else:
                        log.info("found the model server at %s again", self._target)
                    await self._serve(call, by_socket)
                finally:
                    call.cancel()
            except grpc.aio.AioRpcError as error:
                log.debug("session with %s: %s", self._target, error.details())
            except Exception as error:
                # A defect here must not leave streams that wait for ever; say so and end it.
                log.error("the session with the model server failed", exc_info=error)
                if not opened.done():
                    opened.set_exception(error)
                    return
            finally:
                lost = self._connected
                self._connected = False
                self._end_streams(GONE)
            if lost:
                log.error("lost the model server at %s", self._target)
            await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
            attempt += 1

    async def _serve(self, call: Any, by_socket: socket.socket | None) -> None:
        """Write and read until the session ends."""
        writer = asyncio.create_task(self._write(call, self._outgoing), name="engine writer")
        reader = steps.Reader(self._take)
        transport: asyncio.BaseTransport | None = None
        try:
            if by_socket is not None:
                loop = asyncio.get_running_loop()
                transport, _ = await loop.create_unix_connection(lambda: reader, sock=by_socket)
            async for message in call:
                self._take(message)
            if transport is not None:
                await reader.ended  # what was sent before the call ended has come
        finally:
            if transport is not None:
                transport.close()
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer

    def _take(self, message: pb.StepMessage) -> None:
        self._load = codec.decode_load(message)
        self._deliver(codec.decode_step(message))

    @staticmethod
    async def _write(call: Any, outgoing: asyncio.Queue[pb.ClientMessage]) -> None:
        try:
            while True:
                await call.write(await outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the session is over; the reader learns why

    def _deliver(self, outputs: StepOutputs) -> None:
        """Give each stream its tokens and wake those that wait."""
        streams = self._streams
        touched: set[_Stream] = set()
        for started in outputs.started:
            stream = streams.get(started.request_id)
            if stream is not None:
                stream._gathered().started = started
                touched.add(stream)
        for run in outputs.prompt_logprobs:
            stream = streams.get(run.request_id)
            if stream is not None:
                stream._gathered().prompt_logprobs.append(run)
                touched.add(stream)
        for request_id, token_id, logprob, top_ids, top_logprobs in zip(
            outputs.request_ids,
            outputs.token_ids,
            outputs.logprobs,
            outputs.top_ids,
            outputs.top_logprobs,
            strict=True,
        ):
            stream = streams.get(request_id)
            if stream is None:
                continue
            batch = stream._batch
            if batch is None:
                stream._batch = TokenBatch([token_id], [logprob], [top_ids], [top_logprobs])
            else:
                batch.token_ids.append(token_id)
                batch.logprobs.append(logprob)
                batch.top_ids.append(top_ids)
                batch.top_logprobs.append(top_logprobs)
            touched.add(stream)
        for finished in outputs.finished:
            stream = streams.pop(finished.request_id, None)
            if stream is not None:
                if finished.reason is FinishReason.CANCELLED:  # not by us: _cancel forgot those
                    finished = replace(finished, reason=FinishReason.ERROR, error=STOPPING)
                stream._gathered().finished = finished
                touched.add(stream)
        for stream in touched:
            stream._wake()

    def _end_streams(self, cause: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream._gathered().finished = Finished(request_id, FinishReason.ERROR, cause)
            stream._wake()

    def _cancel(self, request_id: int, stream: _Stream) -> None:
        """Forget the stream and tell the engine, unless the request has ended already."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if self._connected:
                self._outgoing.put_nowait(codec.encode_cancel(request_id))


def fetch_info(target: str, timeout: float, tls: TlsFiles | None = None) -> EngineInfo:
    """Ask an engine for its info from synchronous code.

    Raises:
        ShardError: it did not answer within ``timeout`` seconds.
    """
    with Endpoint.parse(target, tls).channel() as channel:
        try:
            stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
            answer = stub.Info(pb.InfoRequest(), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ShardError(f"no model server answered at {target}: {error.details()}") from error
    return codec.decode_info(answer)
