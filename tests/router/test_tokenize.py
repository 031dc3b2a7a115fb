"""/tokenize and /chat_tokenize."""

from __future__ import annotations

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.unit.text import tiny
from tgi_cli.text.workers import INLINE_CHARACTERS


async def test_tokens_have_their_spans(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = "the fox é 🤗"
    answer = await client.post("/tokenize", json={"inputs": text, "parameters": {"top_k": 3}})
    assert answer.status_code == 200
    tokens = answer.json()
    assert [token["id"] for token in tokens] == engine.tokenizer.encode(text)
    assert all(set(token) == {"id", "text", "start", "stop"} for token in tokens)
    assert tokens[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in tokens)
    assert [token["text"] for token in tokens[1:3]] == ["the", " fox"]
    assert engine.requests == []


async def test_long_texts_are_tokenized_off_the_loop(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    text = "the fox " * INLINE_CHARACTERS
    answer = await client.post("/tokenize", json={"inputs": text})
    assert [token["id"] for token in answer.json()] == engine.tokenizer.encode(text)


async def test_conversation_is_rendered_and_tokenized(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The very prompt that a chat would be given."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = (await client.post("/chat_tokenize", json=chat)).json()
    assert set(answer) == {"tokenize_response", "templated_text"}
    assert tiny.START in answer["templated_text"]
    await client.post("/v1/chat/completions", json=chat)
    ids = [token["id"] for token in answer["tokenize_response"]]
    assert tuple(ids) == engine.requests[0].prompt_ids
    assert (
        "".join(token["text"] for token in answer["tokenize_response"])
        == (answer["templated_text"])
    )


@pytest.mark.parametrize(
    ("route", "body", "error_type"),
    [
        ("/chat_tokenize", {"messages": []}, "validation"),
        (
            "/chat_tokenize",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                    }
                ]
            },
            "validation",
        ),
    ],
)
async def test_invalid_requests_are_refused(
    client: httpx.AsyncClient, route: str, body: dict, error_type: str
) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code == 422
    assert answer.json()["error_type"] == error_type
    assert set(answer.json()) == {"error", "error_type"}
