"""Compare HTTP clients of load generators: ``python -m tests.benchmarks.load_generator``.

A server in a process of its own sends each of S streams an event every G milliseconds, each in a
separate write; the client records when events arrive and parses them. Clients: ours
(``bench/load/http.py``, httptools over asyncio and uvloop), httpx, and aiohttp if installed. The
table shows expected and received events per second, the client's CPU time per event, the lag of
its event loop (p99), and the median and p99 of the gaps that it recorded. With a gap of 0 the
server sends as fast as it can, and events per second are the limit of client and server.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import uvloop

from tgi_cli.bench.load.client_lag import LagMonitor, percentile
from tgi_cli.bench.load.http import ConnectionPool, request_head
from tgi_cli.bench.load.streams import StreamedResponse

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_END = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(gap: float, events: int) -> None:
    """Serve streams, whose events are spread over the gap, and print the port."""
    started = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal started
        started += 1
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            writer.close()
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(_HEAD)
        due = time.perf_counter() + gap * (started % 64) / 64
        data = chunk(_EVENT)
        for _ in range(events):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(data)
            if not gap:
                await writer.drain()
        writer.write(chunk(_END) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


# ------------------------------------------------------------------ clients

Streams = Callable[[str, int], Awaitable[list[list[float]]]]
BODY = json.dumps({"model": "m", "prompt": "x" * 400, "max_tokens": 8, "stream": True}).encode()


async def ours(url: str, streams: int) -> list[list[float]]:
    pool = ConnectionPool(url)
    framed = b"%b%d\r\n\r\n%b" % (request_head(url, "/v1/completions", {}), len(BODY), BODY)

    async def read() -> list[float]:
        answer = StreamedResponse()
        await pool.send(framed, answer, lambda: None)
        answer.complete()
        assert answer.error is None, answer.detail
        return answer.arrivals

    return await asyncio.gather(*(read() for _ in range(streams)))


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Chunk).decode


def arrived(line: bytes, arrivals: list[float]) -> None:
    now = time.perf_counter()
    payload = line.removeprefix(b"data:").strip()
    if line.startswith(b"data:") and payload != b"[DONE]" and _decode(payload).choices[0].text:
        arrivals.append(now)


async def httpx_client(url: str, streams: int) -> list[list[float]]:
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:

        async def read() -> list[float]:
            arrivals: list[float] = []
            headers = {"content-type": "application/json"}
            async with client.stream(
                "POST", f"{url}/v1/completions", content=BODY, headers=headers
            ) as response:
                async for line in response.aiter_lines():
                    arrived(line.encode(), arrivals)
            return arrivals

        return await asyncio.gather(*(read() for _ in range(streams)))


async def aiohttp_client(url: str, streams: int) -> list[list[float]]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def read() -> list[float]:
            arrivals: list[float] = []
            headers = {"content-type": "application/json"}
            async with session.post(
                f"{url}/v1/completions", data=BODY, headers=headers
            ) as response:
                async for line in response.content:
                    arrived(line, arrivals)
            return arrivals

        return await asyncio.gather(*(read() for _ in range(streams)))


CLIENTS: dict[str, Streams] = {"ours": ours, "httpx": httpx_client, "aiohttp": aiohttp_client}


async def measure(client: str, url: str, streams: int) -> dict[str, float]:
    monitor = LagMonitor()
    monitor.start()
    began, cpu = time.perf_counter(), time.process_time()
    arrivals = await CLIENTS[client](url, streams)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    load = monitor.stop([])
    gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times)]
    events = sum(map(len, arrivals))
    return {
        "events": events,
        "rate": events / seconds,
        "cpu_us": cpu / events * 1e6,
        "share": cpu / seconds,
        "lag": load.lag_p99,
        "median": percentile(gaps, 0.5),
        "p99": percentile(gaps, 0.99),
    }


# ------------------------------------------------------------------ the table


def run(client: str, streams: int, gap: float, events: int) -> dict[str, float]:
    module = [sys.executable, "-m", "tests.benchmarks.load_generator"]
    plan = ["--gap", str(gap), "--events", str(events)]
    server = subprocess.Popen([*module, "--serve", *plan], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        done = subprocess.run(
            [*module, "--client", client, "--url", url, "--streams", str(streams)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        )
        found: dict[str, float] = json.loads(done.stdout)
        return found
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--gap", type=float, nargs="+", default=[40.0, 0.0], help="milliseconds")
    parser.add_argument("--events", type=int, default=200, help="events of each stream")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.gap[0] / 1e3, options.events))
        return
    if options.client:
        print(json.dumps(uvloop.run(measure(options.client, options.url, options.streams[0]))))
        return
    print(f"{os.cpu_count()} cores\n")
    print(
        "| streams | gap ms | expected/s | client | events/s | CPU us/event | of a core "
        "| loop lag p99 ms | gap median ms | gap p99 ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    clients = [name for name in CLIENTS if name == "ours" or importlib.util.find_spec(name)]
    for gap in options.gap:
        for streams in options.streams:
            expected = f"{streams / gap * 1e3:.0f}" if gap else "-"
            for client in clients:
                found = run(client, streams, gap, options.events)
                print(
                    f"| {streams} | {gap:g} | {expected} | {client} | {found['rate']:.0f} "
                    f"| {found['cpu_us']:.1f} | {found['share']:.0%} | {found['lag'] * 1e3:.1f} "
                    f"| {found['median'] * 1e3:.2f} | {found['p99'] * 1e3:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
