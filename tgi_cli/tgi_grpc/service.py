"""TGI's own services, generate.v3 and generate.v2: the caller requests every step.

    ================  =========================================================================
    rpc               here
    ================  =========================================================================
    Info              reports that prompts are chunked, no prefix cache (the engine has one, but the
                      caller need not account for it), and the most drafts of a request in a step:
                      none unless the user has set ``--speculate``, for not every caller expects
                      several tokens in a Generation
    ServiceDiscovery  the one socket to call: the first shard behind it leads all others
    Warmup            sets the limits of later requests, as requested or as the engine has them;
                      the engine has run its worst steps already, so the batch is not run
    Prefill           adds a batch, joined with a cached one if one is named. Blocks and slots
                      that the caller planned are ignored: the engine allocates, at once, all
                      that a request may ever need
    Decode            one step over the batches, which become the first of them. A Generation has
                      one token, or with drafts those that the step has verified, too
    FilterBatch       keeps the named requests, in that order
    ClearCache        drops a batch, or all batches of this version of the services
    Health            succeeds as long as the engine's loop runs
    ================  =========================================================================

A stop sequence ends a request where it is complete, even within a token. Errors are statuses that
name the request or the batch: INVALID_ARGUMENT, NOT_FOUND (a batch), ALREADY_EXISTS (a batch's
id), RESOURCE_EXHAUSTED (rows, blocks, adapter slots, or too many callers), FAILED_PRECONDITION (the
model has no tokenizer), INTERNAL (a step failed: its batches are gone) and UNAVAILABLE. All but the
last two leave the batches unchanged.

A Decode costs its caller 0.5 ms over the step itself at 1 sequence and 0.8 ms at 32, on one 2025
server core per process: 0.3 ms are Python's gRPC, as an empty call shows, and 6 us a sequence
turning its token to text. The device is idle meanwhile, which is why the project's own router does
not drive single steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import grpc

from tgi_cli.engine.messages import AdvanceError, AdvanceFault, EngineInfo, GenerationRequest
from tgi_cli.errors import TgiError
from tgi_cli.rpc.status import shorten
from tgi_cli.tgi_grpc.batches import BatchRequest, StepFailure, chunk_of, write_batch, write_step
from tgi_cli.tgi_grpc.requests import RequestReader
from tgi_cli.tgi_grpc.step_client import CallError, Code, StepClient

_CODES = {
    AdvanceFault.INVALID: Code.INVALID_ARGUMENT,
    AdvanceFault.NO_CAPACITY: Code.RESOURCE_EXHAUSTED,
    AdvanceFault.ENDED: Code.UNAVAILABLE,
    AdvanceFault.FAILED: Code.INTERNAL,
}


def _call(
    method: Callable[[GenerateService, Any, int], Any],
) -> Callable[[GenerateService, Any, grpc.ServicerContext], Any]:
    """Turn a method into an rpc: its errors become statuses, and it gets its start time in ns."""

    @functools.wraps(method)
    def answer(self: GenerateService, request: Any, context: grpc.ServicerContext) -> Any:
        began = time.monotonic_ns()
        try:
            with self._client.turn():
                return method(self, request, began)
        except CallError as error:
            code, cause = error.code, str(error)
        context.abort(code, shorten(cause))

    return answer


class GenerateService:
    """One version of the services, with its own batches.

    Args:
        messages: The generated module of the version.
        client: Runs the engine's steps.
        info: The engine's effective settings.
        reader: Translates requests.
        url: Address of the services.
    """

    def __init__(
        self,
        messages: ModuleType,
        client: StepClient,
        info: EngineInfo,
        reader: RequestReader,
        url: str,
    ) -> None:
        self._messages: Any = messages
        self._client = client
        self._info = info
        self._reader = reader
        self._url = url
        self._limits = info
        """The engine's settings, with the limits that Warmup has set."""
        self._batches: dict[int, list[BatchRequest]] = {}
        self._chunks = hasattr(messages, "InputChunk")
        """Whether this is version 3."""

    # ------------------------------------------------------------------ rpcs without a step

    def Info(self, _request: Any, _context: grpc.ServicerContext) -> Any:
        info = self._info
        response = self._messages.InfoResponse(
            dtype=f"torch.{info.dtype}",
            device_type=info.device.partition(":")[0],
            speculate=info.speculate,
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
            self._client.check(new=False)
        except CallError as error:
            context.abort(error.code, shorten(str(error)))
        return self._messages.HealthResponse()

    # ------------------------------------------------------------------ batches

    @_call
    def Warmup(self, request: Any, _began: int) -> Any:
        own = self._info
        if self._chunks:
            max_input, total = request.max_input_tokens, request.max_total_tokens
        else:
            max_input, total = request.max_input_length, request.max_total_tokens
        total = total or own.max_total_tokens
        input_bound = min(total - 1, own.max_input_tokens)
        max_input = max_input or input_bound
        for name, value, bound, flag in (
            ("max_total_tokens", total, own.max_total_tokens, "--max-total-tokens"),
            ("max_input_tokens", max_input, input_bound, "--max-input-tokens"),
        ):
            if value > bound:
                raise CallError(
                    f"{name} {value} is more than {bound}, the limit of the model server: "
                    f"request less, or see its {flag}"
                )
        self._limits = replace(
            own,
            max_input_tokens=max_input,
            max_total_tokens=total,
            max_batch_prefill_tokens=request.max_prefill_tokens or own.max_batch_prefill_tokens,
        )
        supported = self._info.max_batch_total_tokens
        response = self._messages.WarmupResponse(max_supported_total_tokens=supported)
        if self._chunks:
            response.max_input_tokens = max_input
            response.max_total_tokens = total
        return response

    @_call
    def Prefill(self, request: Any, began: int) -> Any:
        self._client.check(new=True)
        batch_id = request.batch.id
        joined = self._chunks and request.HasField("cached_batch")
        cached = self._batch(request.cached_batch.id) if joined else []
        if not joined and batch_id in self._batches:
            raise CallError(
                f"batch {batch_id} is in use: clear it, or take another id", Code.ALREADY_EXISTS
            )
        if not request.batch.requests:
            raise CallError(f"batch {batch_id} has no requests")
        known = {member.request_id for member in cached}
        added: list[BatchRequest] = []
        upto = []
        for each in request.batch.requests:
            if each.id in known:
                raise CallError(f"request {each.id} is in the batch already")
            known.add(each.id)
            member = self._read(each)
            added.append(member)
            chunked = self._chunks and each.HasField("chunk_len")
            prompt = len(member.request.prompt_ids)
            upto.append(each.cache_len + each.chunk_len if chunked else prompt)
        new = [member.request for member in added]
        response = self._messages.PrefillResponse()
        named = request.cached_batch.id if joined else batch_id
        batch = cached + added
        if joined:
            response.concat_ns = time.monotonic_ns() - began
        self._step(response, [named], batch, began, new, upto, cached)
        return response

    @_call
    def Decode(self, request: Any, began: int) -> Any:
        ids = [batch.id for batch in request.batches]
        if not ids:
            raise CallError("no batch to decode")
        if len(set(ids)) < len(ids):
            raise CallError(f"batch {ids[0]} is named more than once")
        batch = [member for batch_id in ids for member in self._batch(batch_id)]
        seen: set[int] = set()
        for member in batch:
            if member.request_id in seen:
                cause = f"request {member.request_id} is in more than one of the batches"
                raise CallError(cause)
            seen.add(member.request_id)
        response = self._messages.DecodeResponse()
        if len(ids) > 1:
            response.concat_ns = time.monotonic_ns() - began
        self._step(response, ids, batch, began, held=batch)
        return response

    @_call
    def FilterBatch(self, request: Any, _began: int) -> Any:
        batch_id, filtered = request.batch_id, []
        left = {member.request_id: member for member in self._batch(batch_id)}
        if not request.request_ids:
            raise CallError(f"batch {batch_id}: nothing to keep; ClearCache drops it")
        missing = set(request.request_ids) - set(left)
        if missing:
            raise CallError(f"request {min(missing)} is not in batch {batch_id}")
        for request_id in dict.fromkeys(request.request_ids):
            filtered.append(left.pop(request_id))
        self._client.drop(member.engine_id for member in left.values())
        self._batches[batch_id] = filtered
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
        """Run a step, write its results, and store the unfinished requests as the first batch."""
        chunk = chunk_of(held, self._limits.max_batch_prefill_tokens)
        try:
            step = self._client.advance(chunk, new, upto, [member.engine_id for member in held])
        except AdvanceError as error:
            if error.fault in (AdvanceFault.FAILED, AdvanceFault.ENDED):
                for batch_id in ids:
                    self._batches.pop(batch_id, None)
            raise self._status(error, ids[0], batch) from error
        stepped = time.monotonic_ns()
        for batch_id in ids:
            self._batches.pop(batch_id, None)
        try:
            self._client.drop(write_step(response, batch, step))
        except StepFailure as error:
            self._client.drop(member.engine_id for member in batch)
            cause = f"request {error.member.request_id}: {error}"
            raise CallError(cause, Code.INTERNAL) from error
        left = [member for member in batch if not member.ended]
        if left:
            self._batches[ids[0]] = left
            self._describe(response, ids[0])
        now = time.monotonic_ns()
        response.forward_ns = step.forward_ns
        response.decode_ns = now - stepped
        response.total_ns = now - began

    @staticmethod
    def _status(error: AdvanceError, batch_id: int, batch: Iterable[BatchRequest]) -> CallError:
        failed = [member.request_id for member in batch if member.engine_id == error.request_id]
        about = f"request {failed[0]}" if failed else f"batch {batch_id}"
        if error.fault is AdvanceFault.FAILED:
            about = f"requests {', '.join(str(member.request_id) for member in batch)}"
        return CallError(f"{about}: {error.cause}", _CODES[error.fault])

    def _read(self, request: Any) -> BatchRequest:
        stops = request.stopping_parameters.stop_sequences
        try:
            read = self._reader.read(request, self._client.next_id(), self._limits)
            text = self._reader.model_text()
            return BatchRequest(request.id, read, text, stops, self._info.block_size)
        except ValueError as error:
            raise CallError(f"request {request.id}: {error}") from error
        except TgiError as error:  # no tokenizer, or no process that checks grammars
            cause = f"request {request.id}: {error.cause}"
            raise CallError(cause, Code.FAILED_PRECONDITION) from error

    def _batch(self, batch_id: int) -> list[BatchRequest]:
        batch = self._batches.get(batch_id)
        if batch is None:
            cause = f"batch {batch_id} does not exist: it has ended, was cleared, or never was"
            raise CallError(cause, Code.NOT_FOUND)
        return batch

    def _describe(self, response: Any, batch_id: int) -> None:
        batch = self._batches[batch_id]
        chunk = chunk_of(batch, self._limits.max_batch_prefill_tokens)
        write_batch(response.batch, batch_id, batch, chunk)

    def _forget(self, batch_id: int) -> None:
        self._client.drop(member.engine_id for member in self._batches.pop(batch_id, []))
