"""The token streams of one client: what arrives gathers until somebody asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from tgi_cli.engine.messages import Finished, FinishReason, StepOutputs
from tgi_cli.rpc.interface import TokenBatch

STOPPING = "the model server is shutting down"


class Stream:
    """The tokens of one request: a :class:`tgi_cli.rpc.interface.TokenStream`."""

    __slots__ = ("_batch", "_cancel", "_done", "_request_id", "_waiter")

    def __init__(self, request_id: int, cancel: Callable[[int, Stream], None]) -> None:
        self._request_id = request_id
        self._cancel = cancel
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
        self._cancel(self._request_id, self)

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


class Streams:
    """Those that are live, by request id.

    Args:
        cancelled: told of a live one that its reader has cancelled; it is forgotten by then.
    """

    def __init__(self, cancelled: Callable[[int], None]) -> None:
        self._live: dict[int, Stream] = {}
        self._cancelled = cancelled

    def open(self, request_id: int) -> Stream:
        """A new one."""
        stream = self._live[request_id] = Stream(request_id, self._forget)
        return stream

    def deliver(self, outputs: StepOutputs) -> None:
        """Give each stream its tokens and wake those that wait."""
        streams = self._live
        touched: set[Stream] = set()
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
                if finished.reason is FinishReason.CANCELLED:  # not by us: those are forgotten
                    finished = replace(finished, reason=FinishReason.ERROR, error=STOPPING)
                stream._gathered().finished = finished
                touched.add(stream)
        for stream in touched:
            stream._wake()

    def end(self, cause: str) -> None:
        """End all with an error."""
        streams, self._live = self._live, {}
        for request_id, stream in streams.items():
            stream._gathered().finished = Finished(request_id, FinishReason.ERROR, cause)
            stream._wake()

    def _forget(self, request_id: int, stream: Stream) -> None:
        """Unless its request has ended already, and another has its id."""
        if self._live.get(request_id) is stream:
            del self._live[request_id]
            self._cancelled(request_id)
