"""TGI's own services, generate.v3 and generate.v2: their caller drives every step.

    ================  =========================================================================
    rpc               here
    ================  =========================================================================
    Info              says that the server chunks prompts, and that there is no prefix cache to
                      keep book of: there is one, of the engine's, which nobody need know of
    ServiceDiscovery  the one socket that has to be called: behind it, the first shard leads all
    Warmup            limits for the requests to come, as asked or as the engine has them; the
                      engine has run its worst steps before it was there to be asked. The batch
                      that comes along is not run
    Prefill           takes in a batch, joined with a cached one if one is named. Blocks and
                      slots that the caller planned are not looked at: the engine allocates, all
                      that a request may ever need, at once
    Decode            one step over the batches, which are one from then on, the first
    FilterBatch       keeps the requests named, in that order
    ClearCache        drops a batch, or all that came by this version of the services
    Health            as long as the engine's loop runs
    ================  =========================================================================

A stop sequence ends a request where it is complete, within a token as well. Errors are statuses
that name the request or the batch they are about: INVALID_ARGUMENT, NOT_FOUND (a batch),
ALREADY_EXISTS (a batch's id), RESOURCE_EXHAUSTED (rows, blocks, adapter slots, or too many
callers), FAILED_PRECONDITION (the model has no tokenizer), INTERNAL (a step failed: its batches
are gone) and UNAVAILABLE. Those before the last two leave the batches as they were.

A Decode costs its caller 0.5 ms over the step itself at 1 sequence and 0.8 ms at 32, on one 2025
server core per process: 0.3 ms are Python's gRPC, as an empty call shows, and 6 us a sequence
turning its token to text. The device stands still meanwhile: that is the price of being asked for
every step, and why the project's own router does not ask.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import grpc

from tgi_cli.engine.messages import AdvanceError, AdvanceFault, EngineInfo, GenerationRequest
from tgi_cli.errors import TgiError
from tgi_cli.rpc.status import shorten
from tgi_cli.tgi_grpc.batches import BatchRequest, StepFailure, chunk_of, write_batch, write_step
from tgi_cli.tgi_grpc.requests import Bounds, RequestReader
from tgi_cli.tgi_grpc.step_client import CallError, Code, StepClient

_CODES = {
    AdvanceFault.INVALID: Code.INVALID_ARGUMENT,
    AdvanceFault.NO_ROOM: Code.RESOURCE_EXHAUSTED,
    AdvanceFault.ENDED: Code.UNAVAILABLE,
    AdvanceFault.FAILED: Code.INTERNAL,
}


def _call(
    method: Callable[[GenerateService, Any, int], Any],
) -> Callable[[GenerateService, Any, grpc.ServicerContext], Any]:
    """An rpc whose errors become statuses; it gets the time at which it began, in ns."""

    @functools.wraps(method)
    def answer(self: GenerateService, request: Any, context: grpc.ServicerContext) -> Any:
        began = time.monotonic_ns()
        try:
            with self._driver.turn():
                return method(self, request, began)
        except CallError as error:
            code, cause = error.code, str(error)
        context.abort(code, shorten(cause))

    return answer


class GenerateService:
    """One version of the services. It has its own batches.

    Args:
        messages: the version's generated module.
        driver: to the engine.
        info: of the engine.
        reader: of requests.
        url: where it is served.
    """

    def __init__(
        self,
        messages: ModuleType,
        driver: StepClient,
        info: EngineInfo,
        reader: RequestReader,
        url: str,
    ) -> None:
        self._messages: Any = messages
        self._driver = driver
        self._info = info
        self._reader = reader
        self._url = url
        self._bounds = Bounds.of(info)
        self._batches: dict[int, list[BatchRequest]] = {}
        self._chunks = hasattr(messages, "InputChunk")
        """Whether this is version 3."""

    # ------------------------------------------------------------------ what does not wait

    def Info(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        info = self._info
        response = self._messages.InfoResponse(
            dtype=f"torch.{info.dtype}", device_type=info.device.partition(":")[0]
        )
        if self._chunks:
            response.support_chunking = True
            response.attention_impl = "paged"
            response.block_size = info.block_size
        return response

    def ServiceDiscovery(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        return self._messages.ServiceDiscoveryResponse(urls=[self._url])

    def Health(self, _request: Any, context: grpc.ServicerContext) -> Any:
        try:
            self._driver.check(new=False)
        except CallError as error:
            context.abort(error.code, shorten(str(error)))
        return self._messages.HealthResponse()

    # ------------------------------------------------------------------ batches

    @_call
    def Warmup(self, request: Any, _began: int) -> Any:
        own = Bounds.of(self._info)
        if self._chunks:
            asked_input, asked_total = request.max_input_tokens, request.max_total_tokens
        else:
            asked_input, asked_total = request.max_input_length, request.max_total_tokens
        total = asked_total or own.max_total_tokens
        most = asked_input or min(total - 1, own.max_input_tokens)
        for name, value, bound, flag in (
            ("max_total_tokens", total, own.max_total_tokens, "--max-total-tokens"),
            ("max_input_tokens", most, min(total - 1, own.max_input_tokens), "--max-input-tokens"),
        ):
            if value > bound:
                raise CallError(
                    Code.INVALID_ARGUMENT,
                    f"{name} {value} is more than {bound}, which the model server can promise: "
                    f"ask for less, or see its {flag}",
                )
        self._bounds = Bounds(
            max_input_tokens=most,
            max_total_tokens=total,
            max_prefill_tokens=request.max_prefill_tokens or own.max_prefill_tokens,
        )
        supported = self._info.max_batch_total_tokens
        response = self._messages.WarmupResponse(max_supported_total_tokens=supported)
        if self._chunks:
            response.max_input_tokens = most
            response.max_total_tokens = total
        return response

    @_call
    def Prefill(self, request: Any, began: int) -> Any:
        self._driver.check(new=True)
        batch_id = request.batch.id
        joined = self._chunks and request.HasField("cached_batch")
        cached = self._batch(request.cached_batch.id) if joined else []
        if not joined and batch_id in self._batches:
            raise CallError(
                Code.ALREADY_EXISTS, f"batch {batch_id} is in use: clear it, or take another id"
            )
        if not request.batch.requests:
            raise CallError(Code.INVALID_ARGUMENT, f"batch {batch_id} has no requests")
        known = {driven.request_id for driven in cached}
        asked: list[tuple[BatchRequest, GenerationRequest]] = []
        upto = []
        for each in request.batch.requests:
            if each.id in known:
                raise CallError(Code.INVALID_ARGUMENT, f"request {each.id} is in the batch already")
            known.add(each.id)
            driven, read = self._read(each)
            asked.append((driven, read))
            chunked = self._chunks and each.HasField("chunk_len")
            upto.append(each.cache_len + each.chunk_len if chunked else len(read.prompt_ids))
        new = [read for _, read in asked]
        response = self._messages.PrefillResponse()
        named = request.cached_batch.id if joined else batch_id
        batch = cached + [driven for driven, _ in asked]
        if joined:
            response.concat_ns = time.monotonic_ns() - began
        self._step(response, [named], batch, began, new, upto, cached)
        return response

    @_call
    def Decode(self, request: Any, began: int) -> Any:
        ids = [batch.id for batch in request.batches]
        if not ids:
            raise CallError(Code.INVALID_ARGUMENT, "there is no batch to decode")
        if len(set(ids)) < len(ids):
            raise CallError(Code.INVALID_ARGUMENT, f"batch {ids[0]} is named more than once")
        batch = [driven for batch_id in ids for driven in self._batch(batch_id)]
        seen: set[int] = set()
        for driven in batch:
            if driven.request_id in seen:
                cause = f"request {driven.request_id} is in more than one of the batches"
                raise CallError(Code.INVALID_ARGUMENT, cause)
            seen.add(driven.request_id)
        response = self._messages.DecodeResponse()
        if len(ids) > 1:
            response.concat_ns = time.monotonic_ns() - began
        self._step(response, ids, batch, began, held=batch)
        return response

    @_call
    def FilterBatch(self, request: Any, _began: int) -> Any:
        batch_id, kept = request.batch_id, []
        left = {driven.request_id: driven for driven in self._batch(batch_id)}
        if not request.request_ids:
            raise CallError(
                Code.INVALID_ARGUMENT, f"batch {batch_id}: nothing to keep; ClearCache drops it"
            )
        missing = set(request.request_ids) - set(left)
        if missing:
            raise CallError(
                Code.INVALID_ARGUMENT, f"request {min(missing)} is not in batch {batch_id}"
            )
        for request_id in dict.fromkeys(request.request_ids):
            kept.append(left.pop(request_id))
        self._driver.drop(driven.engine_id for driven in left.values())
        self._batches[batch_id] = kept
        response = self._messages.FilterBatchResponse()
        self._describe(response, batch_id)
        return response

    @_call
    def ClearCache(self, request: Any, _began: int) -> Any:
        ids = [request.id] if request.HasField("id") else list(self._batches)
        for batch_id in ids:
            self._forget(batch_id)
        return self._messages.ClearCacheResponse()

    # ------------------------------------------------------------------ steps

    def _step(
        self,
        response: Any,
        ids: Sequence[int],
        batch: list[BatchRequest],
        began: int,
        new: Iterable[GenerationRequest] = (),
        upto: Iterable[int] = (),
        held: Sequence[BatchRequest] = (),
    ) -> None:
        """Run one, write what it gave, and keep what is left of it as the first of the batches."""
        chunk = chunk_of(held, self._bounds.max_prefill_tokens)
        try:
            step = self._driver.advance(chunk, new, upto, [driven.engine_id for driven in held])
        except AdvanceError as error:
            if error.fault in (AdvanceFault.FAILED, AdvanceFault.ENDED):
                for batch_id in ids:
                    self._batches.pop(batch_id, None)
            raise self._status(error, ids[0], batch) from error
        stepped = time.monotonic_ns()
        for batch_id in ids:
            self._batches.pop(batch_id, None)
        try:
            self._driver.drop(write_step(response, batch, step))
        except StepFailure as error:
            self._driver.drop(driven.engine_id for driven in batch)
            cause = f"request {error.driven.request_id}: {error}"
            raise CallError(Code.INTERNAL, cause) from error
        left = [driven for driven in batch if not driven.ended]
        if left:
            self._batches[ids[0]] = left
            self._describe(response, ids[0])
        now = time.monotonic_ns()
        response.forward_ns = step.forward_ns
        response.decode_ns = now - stepped
        response.total_ns = now - began

    @staticmethod
    def _status(error: AdvanceError, batch_id: int, batch: Iterable[BatchRequest]) -> CallError:
        blamed = [d.request_id for d in batch if d.engine_id == error.request_id]
        about = f"request {blamed[0]}" if blamed else f"batch {batch_id}"
        if error.fault is AdvanceFault.FAILED:
            about = f"requests {', '.join(str(driven.request_id) for driven in batch)}"
        return CallError(_CODES[error.fault], f"{about}: {error.cause}")

    def _read(self, request: Any) -> tuple[BatchRequest, GenerationRequest]:
        stops = request.stopping_parameters.stop_sequences
        try:
            read = self._reader.read(request, self._driver.next_id(), self._bounds)
            text = self._reader.model_text()
            return BatchRequest(request.id, read, text, stops, self._info.block_size), read
        except ValueError as error:
            raise CallError(Code.INVALID_ARGUMENT, f"request {request.id}: {error}") from error
        except TgiError as error:  # no tokenizer, or no process that checks grammars
            cause = f"request {request.id}: {error.cause}"
            raise CallError(Code.FAILED_PRECONDITION, cause) from error

    def _batch(self, batch_id: int) -> list[BatchRequest]:
        batch = self._batches.get(batch_id)
        if batch is None:
            cause = f"batch {batch_id} is not here: it has ended or was cleared, or never was"
            raise CallError(Code.NOT_FOUND, cause)
        return batch

    def _describe(self, response: Any, batch_id: int) -> None:
        batch = self._batches[batch_id]
        chunk = chunk_of(batch, self._bounds.max_prefill_tokens)
        write_batch(response.batch, batch_id, batch, chunk)

    def _forget(self, batch_id: int) -> None:
        self._driver.drop(driven.engine_id for driven in self._batches.pop(batch_id, []))
