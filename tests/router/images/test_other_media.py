"""Videos and sound are refused by the name of their part, on every API that takes images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle

SOURCE = {"type": "base64", "media_type": "video/mp4", "data": "AAAA"}
PARTS: dict[str, dict[str, Any]] = {
    "video_url": {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
    "video": {"type": "video", "video": "https://example.org/a.mp4"},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "audio_url": {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    "audio": {"type": "audio", "audio": {"id": "audio_1"}},
}
"""As clients of OpenAI, vLLM, Qwen and MindIE write them."""
BLOCKS = {kind: {"type": kind, "source": SOURCE} for kind in ("video", "audio", "input_audio")}
TEXT = {"type": "text", "text": "What is this?"}


def chat(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [TEXT, part]}]}


def response(part: Any) -> dict[str, Any]:
    content = [{"type": "input_text", "text": "What?"}, part]
    return {"input": [{"role": "user", "content": content}]}


def message(block: Any) -> dict[str, Any]:
    content = [TEXT, block]
    return {"model": "tgi", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}


def result(block: Any) -> dict[str, Any]:
    """In what a tool has returned."""
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [found]},
    ]
    return {"model": "tgi", "max_tokens": 5, "messages": messages}


ROUTES: list[tuple[str, Callable[[Any], dict[str, Any]], dict[str, dict[str, Any]]]] = [
    ("/v1/chat/completions", chat, PARTS),
    ("/chat_tokenize", chat, PARTS),
    ("/tokenize", chat, PARTS),
    ("/invocations", chat, PARTS),
    ("/vertex", lambda part: {"instances": [chat(part)]}, PARTS),
    ("/v1/responses", response, PARTS),
    ("/v1/responses/input_tokens", response, PARTS),
    ("/v1/messages", message, BLOCKS),
    ("/v1/messages", result, BLOCKS),
    ("/v1/messages/count_tokens", message, BLOCKS),
    ("/generate", lambda part: {"inputs": [TEXT, part]}, PARTS),
    ("/generate_stream", lambda part: {"inputs": [TEXT, part]}, PARTS),
    ("/", lambda part: {"inputs": [TEXT, part]}, PARTS),
]


async def check(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for route, body, parts in ROUTES:
        for kind, part in parts.items():
            answer = await client.post(route, json=body(part))
            place = f"{route}, {kind}: {answer.text}"
            # Streams of TGI's API have errors as events.
            assert answer.status_code in ((200,) if "stream" in route else (400, 422)), place
            assert "not supported" in answer.text, place
            assert kind in answer.text, place
    assert engine.requests == []


async def test_of_a_model_that_sees(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await check(client, engine)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:video/mp4;base64,AAAA", "video/mp4 is no media type of an image"),
        ("data:audio/wav;base64,AAAA", "audio/wav is no media type of an image"),
    ],
)
async def test_in_the_place_of_an_image(
    client: httpx.AsyncClient, engine: FakeEngine, url: str, words: str
) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    for route, body in (
        ("/v1/chat/completions", chat(part)),
        ("/generate", {"inputs": f"![]({url})"}),
        ("/generate", {"inputs": [part]}),
    ):
        answer = await client.post(route, json=body)
        assert answer.status_code in (400, 422)
        assert words in answer.text
    assert engine.requests == []


class TestModelOfText:
    @pytest.fixture
    def app(self, engine: FakeEngine, text: TextBundle, config: RouterConfig) -> Starlette:
        return create_app(engine, text, config)

    async def test_of_a_model_of_text(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await check(client, engine)
