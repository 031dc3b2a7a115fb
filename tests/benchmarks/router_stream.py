"""What a token costs the router: ``python -m tests.benchmarks.router_stream [streams] [tokens]``.

A router process of its own over an engine that emits one token per stream every 10 ms (as
decoding does) or as fast as it can; the client reads sockets in this process and parses nothing.
CPU time comes from the operating system, so that the load of the machine does not enter.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn
import uvloop

from tests.router.fakes import FakeEngine
from tests.unit.text import tiny
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest, Started
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.rpc.interface import TokenBatch
from tgi_cli.text.bundle import TextBundle

ROUTES = {
    "native": ("/generate_stream", {"inputs": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
}
STEP_SECONDS = 0.01


class TickingStream:
    """Hands out one token whenever the ticker says so, as the real client does: a future."""

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


class TickingEngine(FakeEngine):
    """All streams advance together, every step."""

    streams: set[TickingStream]

    def submit(self, request: GenerationRequest) -> TickingStream:  # type: ignore[override]
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
    listener: socket.socket, folder: str, streams: int, seconds: float, pipe: Connection
) -> None:
    """The router's process; reports its CPU seconds and its peak memory."""

    async def main() -> None:
        started = time.perf_counter()
        text = TextBundle.load(Path(folder))
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
        server = uvicorn.Server(
            uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
        )
        serving = asyncio.ensure_future(server._serve([listener]))
        pipe.send(time.perf_counter() - started)
        ticker = asyncio.ensure_future(engine.run(seconds, streams))
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(None, pipe.recv)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))
            if serving.done() or ticker.done():
                return

    uvloop.run(main())


async def drive(port: int, route: str, body: dict, streams: int, tokens: int) -> int:
    """Read all streams to their end; bytes read."""

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
        while chunk := await reader.read(1 << 16):
            size += len(chunk)
        writer.close()
        return size

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


def main() -> None:
    """Print one line per route and pace."""
    streams, tokens = (int(argument) for argument in (*sys.argv[1:], "64", "500")[:2])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_model(Path(folder))
        print("| route | pace | streams | events/s | CPU us/event | peak MiB |")
        print("|---|---|---|---|---|---|")
        for name, (route, body) in ROUTES.items():
            for pace, seconds in (("10 ms", STEP_SECONDS), ("burst", 0.0)):
                with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=serve, args=(listener, folder, streams, seconds, theirs), daemon=True
                    )
                    process.start()
                    ours.recv()
                    port = listener.getsockname()[1]
                    ours.send("cpu")
                    before, _ = ours.recv()
                    clock = time.perf_counter()
                    uvloop.run(drive(port, route, body, streams, tokens))
                    clock = time.perf_counter() - clock
                    ours.send("cpu")
                    after, peak = ours.recv()
                    process.terminate()
                    process.join()
                events = streams * tokens
                cost = (after - before) / events * 1e6
                print(
                    f"| {name} | {pace} | {streams} | {events / clock:,.0f} | {cost:.1f} "
                    f"| {peak:.0f} |"
                )


if __name__ == "__main__":
    main()
