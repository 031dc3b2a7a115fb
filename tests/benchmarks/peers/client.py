"""A cheap client for OpenAI's completions, since it runs on the servers' cores."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httptools
import httpx
import uvloop

from tests.benchmarks.peers.contestant import (
    START_TIMEOUT,
    Failure,
    Running,
    Wave,
    last_line,
)

HOST = "127.0.0.1"


class Server(Running):
    """A process that serves ``/health`` and ``/v1/completions``."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        log: Path,
        port: int,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(process, log)
        self._port = port
        self.url = f"http://{HOST}:{port}"
        self._body = {"temperature": 0, "ignore_eos": True, "stream": True, **(body or {})}
        self._body["stream_options"] = {"include_usage": True}
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + START_TIMEOUT
        with httpx.Client(base_url=f"http://{HOST}:{self._port}", timeout=5) as client:
            while time.monotonic() < until:
                if self.process.poll() is not None:
                    raise Failure(f"it exited at startup: {last_line(self.log)}")
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
        raise Failure(f"not ready after {START_TIMEOUT:.0f} s: {last_line(self.log)}")

    def wave(self, prompts: Sequence[Sequence[int]], new: int, timeout: float) -> Wave:
        requests = [self._request(prompt, new) for prompt in prompts]
        try:
            start, streams = uvloop.run(asyncio.wait_for(_exchange(self._port, requests), timeout))
        except TimeoutError:
            raise Failure(f"a wave took more than {timeout:.0f} s") from None
        except (OSError, httptools.HttpParserError) as error:
            raise Failure(f"{error}: {last_line(self.log)}") from error
        spans = [stream.span(new) for stream in streams]
        first = tuple(begin - start for begin, _ in spans)
        last = tuple(end - start for _, end in spans)
        return Wave(max(last), first, last)

    def _request(self, prompt: Sequence[int], new: int) -> bytes:
        body = {**self._body, "prompt": list(prompt), "max_tokens": new}
        return completions_request(f"{HOST}:{self._port}", body)


def completions_request(host: str, body: Mapping[str, Any]) -> bytes:
    """A request for completions, to send as it is.

    Args:
        host: with its port.
        body: the content, before it is encoded.
    """
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


class Stream(asyncio.Protocol):
    """A request and its response with arrival times; events are parsed after the wave."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._ended = ended
        self._parser = httptools.HttpResponseParser(self)
        self.parts: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the connection closed before the end of the response"))

    def on_body(self, body: bytes) -> None:
        self.parts.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        self._end(None)
        self._transport.close()

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def span(self, new: int) -> tuple[float, float]:
        """Return the arrival times of the first and the last token.

        Raises:
            Failure: the response is an error or does not have ``new`` tokens.
        """
        if self._parser.get_status_code() != 200:
            text = b"".join(part for _, part in self.parts).decode(errors="replace")
            raise Failure(f"status {self._parser.get_status_code()}: {text[:200]}")
        times: list[float] = []
        tokens = 0
        for moment, event in events(self.parts):
            if event.get("error"):
                raise Failure(f"an error in the stream: {str(event['error'])[:200]}")
            if event.get("choices"):
                times.append(moment)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if tokens != new or not times:
            raise Failure(f"{tokens} tokens instead of {new}")
        return times[0], times[-1]


def events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the server-sent events of a body received in ``parts``, with their arrival times."""
    rest = b""
    for moment, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield moment, json.loads(data)


async def _exchange(port: int, requests: Sequence[bytes]) -> tuple[float, list[Stream]]:
    """Send all requests at once; return the start time and the streams."""
    loop = asyncio.get_running_loop()

    async def send(request: bytes) -> Stream:
        ended: asyncio.Future[None] = loop.create_future()
        _, stream = await loop.create_connection(lambda: Stream(request, ended), HOST, port)
        await ended
        return stream

    start = time.perf_counter()
    return start, await asyncio.gather(*(send(request) for request in requests))
