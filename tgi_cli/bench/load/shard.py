"""Drives a shard by its socket, as TGI's benchmark does: no router, no batching but its own.

A run is a Prefill of b requests, none of which ends before its last token, then a Decode after
the other until nothing of the batch is left. Requests carry neither blocks nor slots: a shard of
generate.v3 numbers blocks itself then, and nobody else may use it meanwhile. What uses only the
wire (``rpc/generate_v3.proto``) works with TGI's own shards as well as with ours.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import grpc

from tgi_cli.bench.events import (
    BatchDone,
    BatchRecord,
    BenchRequest,
    ClientHealth,
    StepFailed,
    StepProgress,
)
from tgi_cli.bench.load import frames
from tgi_cli.bench.load.frames import (
    BeginStep,
    EndOfRequests,
    FromGenerator,
    GeneratorEnded,
    GeneratorJob,
    GeneratorReady,
    IndexedRequest,
    RequestChunk,
)
from tgi_cli.errors import ShardError
from tgi_cli.tgi_grpc import generate_v3_pb2 as messages
from tgi_cli.tgi_grpc.generate_v3_pb2_grpc import TextGenerationServiceStub

_AHEAD = 512
_FAILURES = 2
"""Runs that fail one after the other, before the step is given up."""
_PROGRESS = 0.25
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class ShardGroup:
    """All shards behind one socket: each call goes to every one, and is as slow as the slowest.

    Args:
        address: path of the first one's socket, ``unix:`` in front or not.
        timeout, connect_timeout: seconds for a call, and for the first answer.

    Raises:
        ShardError: nothing answers there, or it does not speak generate.v3.
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
        # One shard may know its own socket by another path than ours.
        self._stubs = [first]
        if len(urls) > 1:
            self._stubs = [_stub(url) for url in urls]

    def call(self, name: str, request: Any) -> Any:
        """The first shard's answer, once all have one. Raises grpc.RpcError."""
        calls = [
            getattr(stub, name).future(request, timeout=self._timeout) for stub in self._stubs[1:]
        ]
        answer = getattr(self._stubs[0], name)(request, timeout=self._timeout)
        for call in calls:
            call.result()
        return answer


def _stub(address: str) -> Any:
    path = address.removeprefix("unix:")
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    channel = grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)
    return TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]


class _ShardStep:
    """One step on the shards."""

    def __init__(self, job: GeneratorJob, shards: ShardGroup, out: BinaryIO) -> None:
        self._job = job
        self._shards = shards
        self._out = out
        self._parameters = messages.NextTokenChooserParameters(**_chooser(job))
        self._done = 0
        self._failed = 0
        self._shown = -1.0
        self._rate = 0.0
        self._origin = 0.0
        self._items: queue.Queue[IndexedRequest | None] = queue.Queue(_AHEAD)
        self._begin: queue.Queue[float] = queue.Queue()
        self.halted = threading.Event()
        self.stopped = ""

    def feed(self, stream: BinaryIO) -> None:
        """Take frames in, in a thread."""
        while True:
            match frames.read(stream):
                case RequestChunk(items):
                    for item in items:
                        self._items.put(item)
                case EndOfRequests():
                    self._items.put(None)
                case BeginStep(origin):
                    self._begin.put(origin)
                case _:
                    self.halt()
                    return

    def halt(self) -> None:
        """Stop behind the call that runs."""
        self.halted.set()
        self._begin.put(0.0)
        with contextlib.suppress(queue.Full):  # then nobody waits for one
            self._items.put_nowait(None)

    def report(self, message: FromGenerator) -> None:
        """Write a frame."""
        self._out.write(frames.pack(message))

    def run(self) -> None:
        """All runs."""
        step, failures = self._job.step, 0
        self._origin = self._begin.get()
        self.halted.wait(max(0.0, -self._now()))
        end = float("inf") if step.seconds is None else step.seconds
        counted_from: float | None = None
        while (requests := self._batch(int(step.value))) and not self.halted.is_set():
            warmup = self._done < step.warmup
            if not warmup and counted_from is None:
                counted_from = self._now()
            if counted_from is not None and self._now() - counted_from >= end:
                return
            try:
                record = self._ran(requests, warmup)
            except grpc.RpcError as error:
                failures += 1
                self._failed += 1
                lost = error.code() == grpc.StatusCode.UNAVAILABLE
                cause = f"batch of {len(requests)}: {error_text(error)}"
                if lost or failures >= _FAILURES:
                    self.stopped = cause
                remedy = "see the model server's log" if lost else ""
                self.report(StepFailed(self._job.index, cause, remedy, lost))
                if self.stopped:
                    return
                self._shards.call("ClearCache", messages.ClearCacheRequest())
                continue
            failures = 0
            self._done += 1
            if record is not None:
                self.report(BatchDone(self._job.index, record))
            self._progress(0, last=True)

    def _batch(self, size: int) -> list[BenchRequest] | None:
        """The next requests; None: there are no more."""
        requests: list[BenchRequest] = []
        while len(requests) < size:
            item = self._items.get()
            if item is None:
                return None
            requests.append(item.request)
        return requests

    def _ran(self, requests: Sequence[BenchRequest], warmup: bool) -> BatchRecord | None:
        """One run; None: it was stopped. Raises grpc.RpcError."""
        batch = self._made(requests)
        began = time.perf_counter()
        answer = self._shards.call("Prefill", messages.PrefillRequest(batch=batch))
        now = time.perf_counter()
        prefill, decodes = now - began, []
        while answer.HasField("batch"):
            self._progress(len(requests) / (now - began))
            if self.halted.is_set():
                self._shards.call("ClearCache", messages.ClearCacheRequest())
                return None
            began = time.perf_counter()
            answer = self._shards.call("Decode", messages.DecodeRequest(batches=[answer.batch]))
            now = time.perf_counter()
            decodes.append(now - began)
        return BatchRecord(
            batch_size=len(requests),
            sequence_length=max(request.prompt_tokens for request in requests),
            decode_length=max(request.max_tokens for request in requests),
            prefill=prefill,
            decodes=decodes,
            warmup=warmup,
        )

    def _made(self, requests: Sequence[BenchRequest]) -> Any:
        """The batch, as TGI's benchmark makes it."""
        top = self._job.settings.sampling.top_n_tokens or 0
        made = [
            messages.Request(
                id=number,
                inputs=request.prompt,
                input_chunks=messages.Input(chunks=[messages.InputChunk(text=request.prompt)]),
                truncate=request.prompt_tokens,
                add_special_tokens=True,
                parameters=self._parameters,
                stopping_parameters=messages.StoppingCriteriaParameters(
                    max_new_tokens=request.max_tokens, ignore_eos_token=True
                ),
                top_n_tokens=top,
            )
            for number, request in enumerate(requests)
        ]
        most = max(request.prompt_tokens + request.max_tokens for request in requests)
        return messages.Batch(
            id=0, requests=made, size=len(requests), max_tokens=len(requests) * most
        )

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _progress(self, rate: float, last: bool = False) -> None:
        now = self._now()
        self._rate = rate or self._rate
        if now - self._shown < _PROGRESS and not last:
            return
        self._shown = now
        self.report(
            StepProgress(
                index=self._job.index,
                done=self._done,
                expected=self._job.expected,
                elapsed=now,
                in_flight=0 if last else int(self._job.step.value),
                errors=self._failed,
                tokens_per_second=self._rate,
            )
        )


def run(job: GeneratorJob, stream: BinaryIO, out: BinaryIO) -> None:
    """Run a job on the shard that it names. Raises ShardError."""
    shards = ShardGroup(job.target.address, job.settings.timeout, job.settings.connect_timeout)
    step = _ShardStep(job, shards, out)
    signal.signal(signal.SIGTERM, lambda *_: step.halt())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=step.feed, args=(stream,), daemon=True).start()
    step.report(GeneratorReady())
    try:
        shards.call("ClearCache", messages.ClearCacheRequest())
        step.run()
        shards.call("ClearCache", messages.ClearCacheRequest())
    except grpc.RpcError as error:
        if not step.stopped:
            step.stopped = error_text(error)
            cause = f"the shard on {job.target.address} failed: {step.stopped}"
            step.report(StepFailed(job.index, cause, "see the model server's log", True))
    except BrokenPipeError:  # nobody is there any more
        print("whoever started this is gone", file=sys.stderr)
        return
    step.report(GeneratorEnded(ClientHealth(), step.stopped))


def error_text(error: grpc.RpcError) -> str:
    """What a status says, in one line."""
    lines = str(error.details() or "").splitlines() or [""]
    return f"{error.code().name}: {lines[0]}".removesuffix(": ")


def _chooser(job: GeneratorJob) -> dict[str, Any]:
    """TGI's defaults where nothing was said."""
    said = job.settings.sampling
    return {
        "temperature": 1.0 if said.temperature is None else said.temperature,
        "top_k": said.top_k or 0,
        "top_p": 1.0 if said.top_p is None else said.top_p,
        "typical_p": 1.0 if said.typical_p is None else said.typical_p,
        "do_sample": said.do_sample,
        "seed": said.seed or 0,
        "repetition_penalty": 1.0 if said.repetition_penalty is None else said.repetition_penalty,
        "frequency_penalty": said.frequency_penalty or 0.0,
        "watermark": said.watermark,
    }
