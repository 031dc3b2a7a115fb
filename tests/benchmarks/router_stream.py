"""Measure the router's cost of tokens and requests.

``python -m tests.benchmarks.router_stream [--streams 64 512] [--tokens 500] [--requests 4000]``

A router process, served as in production, uses a fake engine that emits one token per stream every
10 ms (as decoding does) or as fast as it can; for requests, one that responds at once. The client
reads sockets in this process without parsing. CPU time is that of the router process, so that other
load on the machine has little influence.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.router.fakes import FakeEngine
from tests.unit.text import tiny
from tgi_cli import logging as logs
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest, Started
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.http.sse import DIRECT_SEND
from tgi_cli.router.server import uvicorn_config
from tgi_cli.rpc.interface import TokenBatch
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.bundle import TextBundle

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "bytes alone": ("/bytes", {}),
    "native": ("/generate_stream", {"inputs": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}
WHOLE = {"native": "/generate", "chat": "/v1/chat/completions"}
STEP_SECONDS = 0.01
EVENT = (
    b'data: {"index":12,"token":{"id":34,"text":" quick","logprob":-1.234568,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)


class TickingStream:
    """Emits one token per tick, waiting on a future as the real client does."""

    def __init__(self, engine: TickingEngine, request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request
        self._waiter: asyncio.Future[None] | None = None
        self._ready = 0
        engine.streams.add(self)

    def tick(self) -> None:
        self._ready += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        self._engine.streams.discard(self)

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        request = self._request
        ids = self._engine.replies[0]
        started: Started | None = Started(request.request_id, 1000, 0)
        sent = 0
        while True:
            while not self._ready:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            count = min(self._ready, request.max_new_tokens - sent)
            self._ready = 0
            batch = TokenBatch([ids[n % len(ids)] for n in range(sent, sent + count)])
            batch.logprobs = [-1.2345678] * count
            batch.started, started = started, None
            sent += count
            if sent == request.max_new_tokens:
                batch.finished = Finished(request.request_id, FinishReason.LENGTH)
                self.cancel()
                yield batch
                return
            yield batch


async def send_bytes(request: Request) -> Response:
    """Send a constant event repeatedly: the cost of uvicorn, asyncio and sockets alone."""
    body = await request.json()
    wanted = GenerationRequest(
        request_id=0,
        prompt_ids=(1,),
        sampling=SamplingParams(),
        max_new_tokens=body["max_tokens"],
    )
    stream = request.app.state.router.client.submit(wanted)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        send = scope[DIRECT_SEND]
        async for batch in stream:
            events = EVENT * len(batch.token_ids)
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer  # type: ignore[return-value]


class TickingEngine(FakeEngine):
    """An engine in which all streams advance together, every step."""

    streams: set[TickingStream]

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> TickingStream:  # type: ignore[override]
        return TickingStream(self, request)

    async def run(self, seconds: float, wanted: int) -> None:
        while len(self.streams) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        due = time.perf_counter()
        while True:
            for stream in list(self.streams):
                stream.tick()
            due += seconds
            await asyncio.sleep(max(due - time.perf_counter(), 0))


def serve(
    listener: socket.socket, folder: str, streams: int, seconds: float | None, pipe: Connection
) -> None:
    """Run the router process; it reports its CPU seconds and its peak memory over ``pipe``.

    ``seconds`` is the time between tokens, or None if the engine returns whole responses at once.
    """

    async def main() -> None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: ASYNC230, SIM115 (the log is part of the cost)
        logs.setup("router", json_output=True)
        started = time.perf_counter()
        text = TextBundle.load(Path(folder))
        engine: Any = FakeEngine(text.tokenizer)
        if seconds is not None:
            engine = TickingEngine(text.tokenizer)
            engine.streams = set()
        engine.info = engine.info.__class__(
            **{name: getattr(engine.info, name) for name in engine.info.__slots__}
            | {"max_total_tokens": 100_000, "max_input_tokens": 99_999}
        )
        engine.replies[0] = text.tokenizer.encode("the quick brown fox jumps over", False)
        config = RouterConfig(
            model_path=Path(folder), model_id="m", engine_url="", max_concurrent_requests=4096
        )
        app = create_app(engine, text, config)
        app.router.routes.append(Route("/bytes", send_bytes, methods=["POST"]))
        server = uvicorn.Server(uvicorn_config(app, config))
        serving = asyncio.ensure_future(server._serve([listener]))
        gc.collect()
        gc.freeze()
        pipe.send(time.perf_counter() - started)
        loop = asyncio.get_running_loop()
        ticker = loop.create_future()
        if seconds is not None:
            ticker = asyncio.ensure_future(engine.run(seconds, streams))
        while True:
            await loop.run_in_executor(None, pipe.recv)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))
            if serving.done() or ticker.done():
                return

    uvloop.run(main())


async def read_streams(
    port: int, route: str, body: dict[str, Any], streams: int, tokens: int
) -> int:
    """Read all streams to their end; return the number of bytes read."""

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
        content = json.dumps({**body, **fields, "parameters": {"max_new_tokens": tokens}}).encode()
        writer.write(
            f"POST {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        size = 0
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        while chunk := await reader.read(1 << 16):
            size += len(chunk)
        writer.close()
        return size

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def send_requests(
    port: int, route: str, body: dict[str, Any], connections: int, count: int
) -> None:
    """Send ``count`` requests in total, one after the other on each connection."""
    fields = {"max_tokens": 1, "parameters": {"max_new_tokens": 1}}
    content = json.dumps({**body, **fields}).encode()
    request = (
        f"POST {route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )

    async def one(times: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(times):
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()

    await asyncio.gather(*(one(count // connections) for _ in range(connections)))


def measure(
    folder: str, streams: int, seconds: float | None, work: Callable[[int], Awaitable[object]]
) -> tuple[float, float, float]:
    """Return wall and CPU seconds of a router during ``work``, and its peak memory in MiB."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(listener, folder, streams, seconds, theirs), daemon=True
        )
        process.start()
        ours.recv()
        ours.send("cpu")
        before, _ = ours.recv()
        clock = time.perf_counter()
        uvloop.run(work(listener.getsockname()[1]))
        clock = time.perf_counter() - clock
        ours.send("cpu")
        after, peak = ours.recv()
        process.terminate()
        process.join()
    return clock, after - before, peak


def main() -> None:
    """Print one line per route and token rate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--tokens", type=int, default=500, help="tokens per stream with 64 streams")
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_model(Path(folder))
        print("| route | pace | streams | events/s | CPU us/event | peak MiB |")
        print("|---|---|---|---|---|---|")
        for streams in options.streams:
            tokens = max(options.tokens * 64 // streams, 200)
            for name, (route, body) in ROUTES.items():
                for pace, seconds in (("10 ms", STEP_SECONDS), ("burst", 0.0)):
                    work = partial(
                        read_streams, route=route, body=body, streams=streams, tokens=tokens
                    )
                    wall, cpu, peak = measure(folder, streams, seconds, work)
                    events = streams * tokens
                    print(
                        f"| {name} | {pace} | {streams} | {events / wall:,.0f} "
                        f"| {cpu / events * 1e6:.1f} | {peak:.0f} |",
                        flush=True,
                    )
        print("\n| route | connections | requests/s | CPU us/request | peak MiB |")
        print("|---|---|---|---|---|")
        for streams in options.streams:
            for name, route in WHOLE.items():
                body = ROUTES[name][1]
                count = options.requests // streams * streams
                work = partial(
                    send_requests, route=route, body=body, connections=streams, count=count
                )
                wall, cpu, peak = measure(folder, streams, None, work)
                print(
                    f"| {name} | {streams} | {count / wall:,.0f} | {cpu / count * 1e6:.0f} "
                    f"| {peak:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
