"""A server of OpenAI's completions that only waits: so long to the first token, so long for each.

Time runs by a schedule from when a request came, so that what a token takes does not add up with
what the machine takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "stub/model"


@dataclass
class Stub:
    """How it behaves, and what it has seen.

    Attributes:
        prefill, token: seconds.
        places: requests answered at once; the others wait.
        requests, tokens: served so far.
        failing: every so manieth request is refused with 503; 0: none.
    """

    prefill: float = 0.02
    token: float = 0.005
    places: int = 1000
    requests: int = 0
    tokens: int = 0
    failing: int = 0
    url: str = ""

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions and /v1/chat/completions."""
        body = json.loads(await request.body())
        self.requests += 1
        if self.failing and self.requests % self.failing == 0:
            return JSONResponse({"error": {"message": "overloaded"}}, status_code=503)
        chat = "messages" in body
        count = int(body.get("max_tokens", 16))
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(
            self._events(chat, count, usage, time.monotonic()), media_type="text/event-stream"
        )

    async def _events(
        self, chat: bool, count: int, usage: bool, began: float
    ) -> AsyncIterator[str]:
        async with self._free:
            began = max(began, time.monotonic() - 0.001)
            for number in range(count):
                due = began + self.prefill + number * self.token
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                text = " the"
                choice = {"delta": {"content": text}} if chat else {"text": text}
                end = {"finish_reason": "length" if number == count - 1 else None, "index": 0}
                self.tokens += 1
                yield _event({"id": "x", "model": MODEL, "choices": [choice | end]})
            if usage:
                counts = {"prompt_tokens": 7, "completion_tokens": count}
                yield _event({"id": "x", "model": MODEL, "choices": [], "usage": counts})
            yield "data: [DONE]\n\n"

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(self, request: Request) -> Response:
        """GET /health."""
        return Response()

    @contextlib.contextmanager
    def serving(self) -> Iterator[Stub]:
        """It listens on a free port of 127.0.0.1, in a thread, until the block ends."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._free = asyncio.Semaphore(self.places)
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
            listener.close()
            assert not thread.is_alive()


def _event(value: dict[str, object]) -> str:
    return f"data: {json.dumps(value)}\n\n"
