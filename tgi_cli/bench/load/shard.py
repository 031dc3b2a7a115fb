"""Drives a shard by its socket, as TGI's benchmark does: without router and batching.

A run is a Prefill of a batch of requests, none of which ends before its last token, then one
Decode after another until the batch is empty. Requests carry neither blocks nor slots: a shard of
generate.v3 then numbers blocks itself, and may have no other user meanwhile. Only the wire
(``tgi_grpc/generate_v3.proto``) is used, so TGI's own shards work as well as ours.
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
from tgi_cli.bench.load.generator import PROGRESS_SECONDS
from tgi_cli.bench.load.sender import sampling_fields
from tgi_cli.errors import ShardError
from tgi_cli.rpc.services import make_stub
from tgi_cli.tgi_grpc import generate_v3_pb2 as messages

_AHEAD = 512
_FAILURES = 2
"""Failed runs in a row after which the step is given up."""
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TGI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
"""TGI's sampling parameters, besides those whose default is 0."""


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

    def clear_cache(self) -> None:
        """Drop all batches. Raises grpc.RpcError."""
        self.call("ClearCache", messages.ClearCacheRequest())


def _stub(address: str) -> Any:
    path = address.removeprefix("unix:")
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    channel = grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)
    return make_stub(messages, channel)


class _ShardStep:
    """One step on the shards."""

    def __init__(self, job: frames.GeneratorJob, shards: ShardGroup, out: BinaryIO) -> None:
        self._job = job
        self._shards = shards
        self._out = out
        sampling = sampling_fields(job.settings.sampling)
        self._top_tokens = sampling.pop("top_n_tokens", 0)
        self._parameters = messages.NextTokenChooserParameters(**_TGI_DEFAULTS | sampling)
        self._done = 0
        self._failed = 0
        self._reported = -1.0
        self._rate = 0.0
        self._origin = 0.0
        self._items: queue.Queue[frames.IndexedRequest | None] = queue.Queue(_AHEAD)
        self._begin: queue.Queue[float] = queue.Queue()
        self._halted = threading.Event()
        self.stopped = ""

    def feed(self, stream: BinaryIO) -> None:
        """Read frames until the parent process is gone."""
        while True:
            match frames.read(stream):
                case frames.RequestChunk(items):
                    for item in items:
                        self._items.put(item)
                case frames.EndOfRequests():
                    self._items.put(None)
                case frames.BeginStep(origin):
                    self._begin.put(origin)
                case _:
                    self.halt()
                    return

    def halt(self) -> None:
        """Stop after the running call."""
        self._halted.set()
        self._begin.put(0.0)
        with contextlib.suppress(queue.Full):  # then nothing waits for an item
            self._items.put_nowait(None)

    def report(self, message: frames.FromGenerator) -> None:
        """Write a frame."""
        self._out.write(frames.pack(message))

    def run(self) -> None:
        """Do all runs."""
        step, failures = self._job.step, 0
        self._origin = self._begin.get()
        self._halted.wait(max(0.0, -self._now()))
        counted_from: float | None = None
        while (requests := self._batch(int(step.value))) and not self._halted.is_set():
            warmup = self._done < step.warmup
            if not warmup and counted_from is None:
                counted_from = self._now()
            elapsed = 0.0 if counted_from is None else self._now() - counted_from
            if step.seconds is not None and elapsed >= step.seconds:
                return
            try:
                record = self._run_batch(requests, warmup)
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
                self._shards.clear_cache()
                continue
            failures = 0
            self._done += 1
            if record is not None:
                self.report(BatchDone(self._job.index, record))
            self._progress(0, last=True)

    def _batch(self, size: int) -> list[BenchRequest] | None:
        """The next requests, or None after the last."""
        requests: list[BenchRequest] = []
        while len(requests) < size:
            item = self._items.get()
            if item is None:
                return None
            requests.append(item.request)
        return requests

    def _run_batch(self, requests: Sequence[BenchRequest], warmup: bool) -> BatchRecord | None:
        """Do one run; return None if it was stopped. Raises grpc.RpcError."""
        batch = self._message(requests)
        began = time.perf_counter()
        response = self._shards.call("Prefill", messages.PrefillRequest(batch=batch))
        now = time.perf_counter()
        prefill, decodes = now - began, []
        while response.HasField("batch"):
            self._progress(len(requests) / (now - began))
            if self._halted.is_set():
                self._shards.clear_cache()
                return None
            began = time.perf_counter()
            request = messages.DecodeRequest(batches=[response.batch])
            response = self._shards.call("Decode", request)
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

    def _message(self, requests: Sequence[BenchRequest]) -> Any:
        """The batch, as TGI's benchmark builds it."""
        batch = [
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
                top_n_tokens=self._top_tokens,
            )
            for number, request in enumerate(requests)
        ]
        longest = max(request.prompt_tokens + request.max_tokens for request in requests)
        size = len(requests)
        return messages.Batch(id=0, requests=batch, size=size, max_tokens=size * longest)

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _progress(self, rate: float, last: bool = False) -> None:
        now = self._now()
        self._rate = rate or self._rate
        if now - self._reported < PROGRESS_SECONDS and not last:
            return
        self._reported = now
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


def run(job: frames.GeneratorJob, stream: BinaryIO, out: BinaryIO) -> None:
    """Run a job on its shard. Raises ShardError."""
    shards = ShardGroup(job.target.address, job.settings.timeout, job.settings.connect_timeout)
    step = _ShardStep(job, shards, out)
    signal.signal(signal.SIGTERM, lambda *_: step.halt())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=step.feed, args=(stream,), daemon=True).start()
    step.report(frames.GeneratorReady())
    try:
        shards.clear_cache()
        step.run()
        shards.clear_cache()
    except grpc.RpcError as error:
        if not step.stopped:
            step.stopped = error_text(error)
            cause = f"the shard on {job.target.address} failed: {step.stopped}"
            step.report(StepFailed(job.index, cause, "see the model server's log", True))
    except BrokenPipeError:
        print("the parent process is gone", file=sys.stderr)
        return
    step.report(frames.GeneratorEnded(ClientHealth(), step.stopped))


def error_text(error: grpc.RpcError) -> str:
    """A status and the first line of its message."""
    lines = str(error.details() or "").splitlines() or [""]
    return f"{error.code().name}: {lines[0]}".removesuffix(": ")
