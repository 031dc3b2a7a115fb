"""A client that disconnects frees its sequence at once, in any state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tgi_cli.router.http import sse
from tgi_cli.router.state import RouterState

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CASES = [
    ("/generate", {"inputs": "hi"}),
    ("/generate_stream", {"inputs": "hi"}),
    ("/", {"inputs": "hi"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/messages", CHAT | {"model": "tgi", "max_tokens": 20}),
    ("/v1/messages", CHAT | {"model": "tgi", "max_tokens": 20, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 1, "best_of": 3}),
    ("/v1/chat/completions", CHAT | {"n": 3}),
    ("/v1/chat/completions", CHAT | {"n": 3, "stream": True}),
    ("/generate", {"inputs": "hi", "parameters": {"best_of": 2, "top_k": 5}}),
    ("/invocations", {"inputs": "hi"}),
    ("/invocations", CHAT | {"n": 2}),
    ("/invocations", {"prompt": ["a", "b"], "stream": True}),
    ("/vertex", {"instances": [{"inputs": "a"}, CHAT]}),
    (
        "/v2/models/m/infer",
        {"inputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}]},
    ),
]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def request(url: str, route: str, body: dict) -> asyncio.StreamWriter:
    """Send a request and hand out the connection, unread."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    writer.write(
        f"POST {route} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    await writer.drain()
    return writer


@pytest.mark.parametrize(("route", "body"), CASES)
@pytest.mark.parametrize("tokens", [0, 2])
async def test_closing_the_connection_cancels_generation(
    url: str, engine: FakeEngine, state: RouterState, route: str, body: dict, tokens: int
) -> None:
    asked = body.get("parameters", body)
    count = len(body.get("prompt", "x")) * asked.get("best_of", asked.get("n", 1))
    if "instances" in body or route.startswith("/v2"):
        count = 2
    engine.gate = asyncio.Semaphore(tokens * count)
    writer = await request(url, route, body)
    await until(lambda: len(engine.requests) == count and engine.gate.locked())
    writer.close()
    await until(lambda: len(engine.cancelled) == count)
    await until(lambda: state.admission.in_flight == 0)
    assert state.metrics.failures.counts["dropped"] == count
    assert not state.generator.live


async def test_connected_clients_are_not_cancelled(
    url: str, engine: FakeEngine, state: RouterState
) -> None:
    """Two requests on one connection: the watcher of the first must not swallow the second."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for route, body in CASES * 2:
            assert (await client.post(route, json=body)).status_code == 200
    assert engine.cancelled == []
    assert state.metrics.failures.counts["dropped"] == 0


async def test_silent_streams_get_keep_alive_comments(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    engine.gate = asyncio.Semaphore(1)
    seen = b""
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/generate_stream", json={"inputs": "hi"}) as answer,
    ):
        async for chunk in answer.aiter_bytes():
            seen += chunk
            if seen.count(b"\n\n:\n\n") + seen.count(b":\n\n:\n\n") >= 2:
                for _ in range(20):
                    engine.gate.release()
    frames = seen.split(b"\n\n")
    assert frames.count(b":") >= 2
    assert sum(frame.startswith(b"data: ") for frame in frames) == len(engine.replies[0])


@pytest.mark.parametrize("route", ["/generate_stream", "/v1/chat/completions"])
async def test_tokens_of_one_batch_are_sent_in_one_write(
    app: object, engine: FakeEngine, route: str
) -> None:
    engine.reply_with("the quick brown fox")
    engine.step = 100
    body = json.dumps({"inputs": "hi", "stream": True, **CHAT}).encode()
    sent = []

    async def receive() -> dict:
        if not sent:
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        return {}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": route, "root_path": "",
        "raw_path": route.encode(), "scheme": "http", "query_string": b"", "server": ("x", 80),
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
    }  # fmt: skip
    await app(scope, receive, send)  # type: ignore[operator]
    written = [message for message in sent if message.get("body")]
    tokens = [message for message in written if b"[DONE]" not in message["body"]]
    assert len(tokens) == 1
    assert tokens[0]["body"].count(b"data: ") >= 2
