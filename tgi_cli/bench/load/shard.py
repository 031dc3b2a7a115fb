"""Drives a shard by its socket, as TGI's benchmark does: without router and batching.

A run is a Prefill of a batch of requests, none of which ends before its last token, then one
Decode after another until the batch is empty. Requests carry neither blocks nor slots: a shard of
generate.v3 then numbers blocks itself, and may have no other user meanwhile. Only the wire
(``tgi_grpc/generate_v3.proto``) is used, so TGI's own shards work as well as ours.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from tgi_cli.bench.events import BatchDone, BatchRecord, BenchRequest
from tgi_cli.bench.load.frames import FromGenerator, GeneratorJob, IndexedRequest
from tgi_cli.bench.load.generator import LoadGenerator
from tgi_cli.bench.load.sender import SenderState, prompt_text, sampling_fields
from tgi_cli.errors import ShardError
from tgi_cli.rpc.services import make_stub
from tgi_cli.tgi_grpc import generate_v3_pb2 as messages

_REMEDY = "see the model server's log"
_WHOLE = 1 << 24
"""``truncate`` of prompts with images, whose tokens are not known here."""
_FAILURES = 2
"""Failed runs in a row after which the step is given up."""
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TGI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
"""TGI's sampling parameters, besides those whose default is 0."""

_Result = TypeVar("_Result")


class ShardGroup:
    """All shards behind one socket: each call goes to every one, and takes as long as the slowest.

    Args:
        address: Path of the first shard's socket, with or without ``unix:``.
        timeout, connect_timeout: Seconds for a call, and for the first response.

    Raises:
        ShardError: No response, or the server does not speak generate.v3.
    """

    def __init__(self, address: str, timeout: float, connect_timeout: float) -> None:
        self._timeout = timeout
        first = _stub(address)
        try:
            found = first.ServiceDiscovery(
                messages.ServiceDiscoveryRequest(), timeout=connect_timeout, wait_for_ready=True
            )
            urls = list(found.urls)
            self.info = first.Info(messages.InfoRequest(), timeout=connect_timeout)
        except grpc.RpcError as error:
            raise ShardError(
                f"no shard answers on {address}: {error_text(error)}",
                "name the socket of a running model server (--shard-uds-path), with its rank",
            ) from error
        # A single shard may know its own socket by another path than ours.
        self._stubs = [_stub(url) for url in urls] if len(urls) > 1 else [first]

    def call(self, name: str, request: Any) -> Any:
        """Call every shard and return the first one's response. Raises grpc.RpcError."""
        calls = [
            getattr(stub, name).future(request, timeout=self._timeout) for stub in self._stubs[1:]
        ]
        response = getattr(self._stubs[0], name)(request, timeout=self._timeout)
        for call in calls:
            call.result()
        return response


def _stub(address: str) -> Any:
    path = address.removeprefix("unix:")
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    channel = grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)
    return make_stub(messages, channel)


class ShardGenerator(LoadGenerator):
    """Runs the batches of a job on its shard.

    One thread makes all calls, so that none overlaps the last one of a step that was stopped.

    Raises:
        ShardError: As :class:`ShardGroup` raises it.
    """

    def __init__(self, job: GeneratorJob, report: Callable[[FromGenerator], None]) -> None:
        super().__init__(job, report, SenderState())
        settings = job.settings
        self._shards = ShardGroup(job.target.address, settings.timeout, settings.connect_timeout)
        self._thread = ThreadPoolExecutor(1)
        sampling = sampling_fields(settings.sampling)
        self._top_tokens = sampling.pop("top_n_tokens", 0)
        self._parameters = messages.NextTokenChooserParameters(**_TGI_DEFAULTS | sampling)
        self._failures = 0
        self._cancelled = False

    async def run(self, origin: float) -> None:
        """Run until the step is over, and leave no batch on the shard."""
        try:
            await self._on_thread(self._clear_cache)
            await super().run(origin)
            await self._on_thread(self._clear_cache)
        except grpc.RpcError as error:
            if not self.stopped:
                self.stopped = f"the shard on {self._job.target.address} failed: "
                self.stopped += error_text(error)
                self._fail(self.stopped, _REMEDY, fatal=True)

    async def _on_thread(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _run_batch(self, items: Sequence[IndexedRequest], warmup: bool) -> None:
        requests = [item.request for item in items]
        self._count_time_from(self._sender.now(), warmup)
        counters = self._sender.counters
        counters.in_flight = len(requests)
        self._cancelled = False
        try:
            record = await self._on_thread(self._prefill_and_decode, requests, warmup)
        except grpc.RpcError as error:
            self._failures += 1
            counters.kinds["shard"] += 1
            lost = error.code() == grpc.StatusCode.UNAVAILABLE
            cause = f"batch of {len(requests)}: {error_text(error)}"
            self._fail(cause, _REMEDY if lost else "", fatal=lost)
            if lost or self._failures >= _FAILURES:
                self.stopped = cause
            else:
                await self._on_thread(self._clear_cache)
        else:
            self._failures = 0
            self._report(BatchDone(self._job.index, record))
        finally:
            self._cancelled = True  # ends the batch that still runs if this task is cancelled
            counters.in_flight = 0

    def _prefill_and_decode(self, requests: Sequence[BenchRequest], warmup: bool) -> BatchRecord:
        """Do one run, on a thread that does nothing else. Raises grpc.RpcError."""
        batch = self._message(requests)
        response, prefill = self._timed("Prefill", messages.PrefillRequest(batch=batch))
        decodes = []
        while response.HasField("batch") and not self._cancelled:
            request = messages.DecodeRequest(batches=[response.batch])
            response, seconds = self._timed("Decode", request)
            decodes.append(seconds)
        return BatchRecord(
            batch_size=len(requests),
            sequence_length=max(request.prompt_tokens for request in requests),
            decode_length=max(request.max_tokens for request in requests),
            prefill=prefill,
            decodes=decodes,
            warmup=warmup,
        )

    def _timed(self, name: str, request: Any) -> tuple[Any, float]:
        """Call the shards; return the response and the seconds it took. Raises grpc.RpcError."""
        began = time.perf_counter()
        response = self._shards.call(name, request)
        seconds = time.perf_counter() - began
        self._sender.counters.tokens += self._sender.counters.in_flight
        return response, seconds

    def _clear_cache(self) -> None:
        self._shards.call("ClearCache", messages.ClearCacheRequest())

    def _message(self, requests: Sequence[BenchRequest]) -> Any:
        """The batch, as TGI's benchmark builds it."""
        batch = [
            messages.Request(
                id=number,
                inputs=prompt_text(request),
                input_chunks=messages.Input(chunks=_chunks(request)),
                truncate=_WHOLE if request.images else request.prompt_tokens,
                add_special_tokens=True,
                parameters=self._parameters,
                stopping_parameters=messages.StoppingCriteriaParameters(
                    max_new_tokens=request.max_tokens, ignore_eos_token=True
                ),
                top_n_tokens=self._top_tokens,
            )
            for number, request in enumerate(requests)
        ]
        longest = max(request.prompt_tokens + request.max_tokens for request in requests)
        size = len(requests)
        return messages.Batch(id=0, requests=batch, size=size, max_tokens=size * longest)


def _chunks(request: BenchRequest) -> list[Any]:
    """The images and the text of a prompt."""
    chunks = []
    for url in request.images:
        head, _, data = url.partition(";base64,")
        image = messages.Image(data=base64.b64decode(data), mimetype=head.removeprefix("data:"))
        chunks.append(messages.InputChunk(image=image))
    return [*chunks, messages.InputChunk(text=request.prompt)]


def error_text(error: grpc.RpcError) -> str:
    """A status and the first line of its message."""
    lines = str(error.details() or "").splitlines() or [""]
    return f"{error.code().name}: {lines[0]}".removesuffix(": ")
