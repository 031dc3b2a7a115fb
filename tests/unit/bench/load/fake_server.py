"""Servers that do what a test tells them: an ASGI app, served in a thread, on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tests.tools.certificate_authority import CertificateFiles


@dataclass
class Call:
    """One request as the server got it, and when it sent each event with tokens."""

    path: str
    headers: dict[str, str]
    body: Any
    at: float
    sent: list[float] = field(default_factory=list)


class Reply:
    """What a handler answers with."""

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        self._send = send

    async def start(self, status: int = 200, content_type: str = "text/event-stream") -> None:
        headers = [(b"content-type", content_type.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, text: str) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def event(self, value: Any) -> None:
        data = value if isinstance(value, str) else json.dumps(value)
        await self.write(f"data: {data}\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, value: Any, content_type: str = "application/json") -> None:
        await self.start(status, content_type)
        await self.write(value if isinstance(value, str) else json.dumps(value))
        await self.end()


Handler = Callable[[Call, Reply], Awaitable[None]]


@dataclass
class FakeServer:
    """``handler`` answers each request; ``calls`` has them all, ``most`` how many ran at once."""

    handler: Handler
    calls: list[Call] = field(default_factory=list)
    url: str = ""
    running: int = 0
    most: int = 0
    metrics: str = ""
    """What it says at /metrics; empty: there is no such route."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/metrics":
            await Reply(send).whole(200 if self.metrics else 404, self.metrics, "text/plain")
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        call = Call(scope["path"], headers, json.loads(body or b"null"), time.perf_counter())
        self.calls.append(call)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.handler(call, Reply(send))
        finally:
            self.running -= 1

    @contextlib.contextmanager
    def serving(self, certificates: CertificateFiles | None = None) -> Iterator[FakeServer]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        scheme = "http" if certificates is None else "https"
        self.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self,
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=1,
            http="h11",
            ssl_certfile=certificates.cert if certificates else None,
            ssl_keyfile=certificates.key if certificates else None,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(10)
            listener.close()


class Died(Exception):
    """Ends the connection in the middle of an answer."""


def completions(
    tokens: int = 4,
    gap: float = 0.0,
    *,
    per_event: int = 1,
    usage: bool = True,
    refuse_usage: bool = False,
    keep_alive: bool = False,
    prompt_tokens: int = 4,
) -> Handler:
    """OpenAI's text completions and chats: ``tokens`` words, ``per_event`` of them at a time."""

    async def handle(call: Call, reply: Reply) -> None:
        chat = call.path == "/v1/chat/completions"
        if refuse_usage and "stream_options" in call.body:
            await reply.whole(400, {"error": {"message": "unknown field stream_options"}})
            return
        await reply.start()
        if chat:
            await reply.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for first in range(0, tokens, per_event):
            if keep_alive:
                await reply.write(":\n\n")
            await asyncio.sleep(gap)
            call.sent.append(time.perf_counter())
            text = " word" * min(per_event, tokens - first)
            part = {"delta": {"content": text}} if chat else {"text": text}
            await reply.event({"choices": [{**part, "finish_reason": None}]})
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        await reply.event({"choices": [{**last, "finish_reason": "length"}]})
        if usage and "stream_options" in call.body:
            counted = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
            await reply.event({"choices": [], "usage": counted})
        await reply.event("[DONE]")
        await reply.end()

    return handle


def native(tokens: int = 4, gap: float = 0.0) -> Handler:
    """TGI's /generate_stream."""

    async def handle(call: Call, reply: Reply) -> None:
        assert call.path == "/generate_stream"
        await reply.start()
        for number in range(1, tokens + 1):
            await asyncio.sleep(gap)
            event: dict[str, Any] = {
                "index": number,
                "token": {"id": number, "text": " word", "logprob": -1.0, "special": False},
                "generated_text": None,
                "details": None,
            }
            if number == tokens:
                event["generated_text"] = " word" * tokens
                event["details"] = {
                    "finish_reason": "length",
                    "generated_tokens": tokens,
                    "seed": None,
                    "input_length": 9,
                }
            await reply.event(event)
        await reply.end()

    return handle
