"""Outputs of the engine's steps by request, buffered until the reader of the request takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tgi_cli.engine.messages import Finished, FinishReason, StepOutputs
from tgi_cli.rpc.interface import TokenBatch

STOPPING = "the model server is shutting down"
_STOPPED = (FinishReason.CANCELLED, FinishReason.DRAINING)


class OutputBuffer:
    """The outputs of one request that its reader has not taken yet."""

    __slots__ = ("batch",)

    def __init__(self) -> None:
        self.batch: TokenBatch | None = None

    def pending(self) -> TokenBatch:
        """The batch to add outputs to."""
        batch = self.batch
        if batch is None:
            batch = self.batch = TokenBatch()
        return batch


B = TypeVar("B", bound=OutputBuffer)


def split_by_request(outputs: StepOutputs, buffers: Mapping[int, B]) -> set[B]:
    """Add the outputs of a step to the buffers of their requests.

    Outputs of other requests are dropped. Returns the buffers that got any.
    """
    changed: set[B] = set()
    for started in outputs.started:
        buffer = buffers.get(started.request_id)
        if buffer is not None:
            buffer.pending().started = started
            changed.add(buffer)
    for run in outputs.prompt_logprobs:
        buffer = buffers.get(run.request_id)
        if buffer is not None:
            buffer.pending().prompt_logprobs.append(run)
            changed.add(buffer)
    for verified in outputs.drafts:
        buffer = buffers.get(verified.request_id)
        if buffer is not None:
            buffer.pending().drafts += (verified,)
            changed.add(buffer)
    for logits in outputs.logits:
        buffer = buffers.get(logits.request_id)
        if buffer is not None:
            buffer.pending().logits += (logits,)
            changed.add(buffer)
    for request_id, token_id, logprob, top_ids, top_logprobs in zip(
        outputs.request_ids,
        outputs.token_ids,
        outputs.logprobs,
        outputs.top_ids,
        outputs.top_logprobs,
        strict=True,
    ):
        buffer = buffers.get(request_id)
        if buffer is None:
            continue
        batch = buffer.batch
        if batch is None:
            buffer.batch = TokenBatch([token_id], [logprob], [top_ids], [top_logprobs])
        else:
            batch.token_ids.append(token_id)
            batch.logprobs.append(logprob)
            batch.top_ids.append(top_ids)
            batch.top_logprobs.append(top_logprobs)
        changed.add(buffer)
    for finished in outputs.finished:
        buffer = buffers.get(finished.request_id)
        if buffer is not None:
            buffer.pending().finished = finished
            changed.add(buffer)
    return changed


class RequestStream(OutputBuffer):
    """The tokens of one request: a :class:`tgi_cli.rpc.interface.TokenStream`."""

    __slots__ = ("_cancel", "_done", "_request_id", "_waiter")

    def __init__(self, request_id: int, cancel: Callable[[int, RequestStream], None]) -> None:
        super().__init__()
        self._request_id = request_id
        self._cancel = cancel
        self._waiter: asyncio.Future[None] | None = None
        self._done = False

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        while self.batch is None:
            if self._done:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch, self.batch = self.batch, None
        if batch.finished is not None:
            self._done = True
        return batch

    def cancel(self) -> None:
        self.batch = None
        self._done = True
        self.wake()
        self._cancel(self._request_id, self)

    def cancelled_by(self, cancel: Callable[[int, RequestStream], None]) -> None:
        """Call ``cancel`` from now on when the reader cancels it."""
        self._cancel = cancel

    def wake(self) -> None:
        """Resume the reader if it waits."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class RequestStreams:
    """The live streams, by request id.

    Args:
        cancelled: Called with the id of a live request that its reader has cancelled.
    """

    def __init__(self, cancelled: Callable[[int], None]) -> None:
        self._live: dict[int, RequestStream] = {}
        self._cancelled = cancelled

    def open(self, request_id: int) -> RequestStream:
        """Add a stream."""
        stream = self._live[request_id] = RequestStream(request_id, self._forget)
        return stream

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def take(self, request_id: int) -> RequestStream | None:
        """Remove a live stream and return it, for :meth:`adopt`."""
        return self._live.pop(request_id, None)

    def adopt(self, request_id: int, stream: RequestStream) -> None:
        """Add a stream that another engine's client has opened."""
        stream.cancelled_by(self._forget)
        self._live[request_id] = stream

    def deliver(self, outputs: StepOutputs) -> None:
        """Give each stream its outputs, and wake the readers that wait."""
        changed = split_by_request(outputs, self._live)
        for finished in outputs.finished:
            stream = self._live.pop(finished.request_id, None)
            # Requests that we cancelled are not live: the engine cancelled this one.
            if stream is not None and finished.reason in _STOPPED:
                error = replace(finished, reason=FinishReason.ERROR, error=STOPPING)
                stream.pending().finished = error
        for stream in changed:
            stream.wake()

    def end(self, cause: str) -> None:
        """End all streams with an error."""
        streams, self._live = self._live, {}
        for request_id, stream in streams.items():
            stream.pending().finished = Finished(request_id, FinishReason.ERROR, cause)
            stream.wake()

    def _forget(self, request_id: int, stream: RequestStream) -> None:
        """Drop a stream, unless another one has its id by now."""
        if self._live.get(request_id) is stream:
            del self._live[request_id]
            self._cancelled(request_id)
