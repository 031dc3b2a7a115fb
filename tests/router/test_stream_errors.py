"""A stream that fails has exactly one event of the error, and ends."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events

CHAT = [{"role": "user", "content": "hi"}]
STREAMS = [
    ("/generate_stream", {"inputs": "hi"}),
    ("/", {"inputs": "hi", "stream": True}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/completions", {"prompt": ["hi", "you"], "n": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
    ("/v1/chat/completions", {"messages": CHAT, "n": 3, "stream": True}),
    ("/v1/responses", {"input": "hi", "stream": True}),
    ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": CHAT, "stream": True}),
]


def is_error(event: Any) -> bool:
    """Whether an event of any API says that the stream has failed."""
    if not isinstance(event, dict):
        return False
    failed = event.get("type") in ("error", "response.failed")
    return failed or bool(event.get("error"))


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("route", "body"), STREAMS)
async def test_a_lost_engine_is_one_event(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any], after: int
) -> None:
    engine.failure, engine.fail_after = "the model server is gone", after
    answer = await client.post(route, json=body)
    found = [event for event in events(answer.text) if event != "[DONE]"]
    assert [event for event in found if is_error(event)] == found[-1:]
    assert answer.text.count("the model server is gone") == 1
    assert answer.text.count("[DONE]") == (route in ("/v1/completions", "/v1/chat/completions"))
