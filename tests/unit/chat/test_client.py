"""Servers that answer, refuse, are busy, or die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest

from tests.tools.chat_server import ChatServer, Reply, delta, error_reply, text_reply
from tgi_cli.chat.client import ChatClient, as_url
from tgi_cli.chat.errors import ChatInputError, ChatServerError

BODY: dict[str, Any] = {"model": "acme/chat", "messages": [{"role": "user", "content": "hi"}]}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer().serving() as server:
        yield server


async def answer(server: ChatServer, body: dict[str, Any] = BODY) -> tuple[str, list[float]]:
    """The text of an answer, and the pauses before it."""
    pauses: list[float] = []
    async with ChatClient(server.url) as client:
        parts = [p async for p in client.answer(body, lambda s, error: pauses.append(s))]
    return "".join(part.content for part in parts), pauses


async def refusal(server: ChatServer, body: dict[str, Any] = BODY) -> ChatServerError:
    with pytest.raises(ChatServerError) as raised:
        await answer(server, body)
    return raised.value


async def test_an_answer(server: ChatServer) -> None:
    server.script = [text_reply("Hel", "lo")]
    assert await answer(server) == ("Hello", [])
    assert server.requests == [{**BODY, "stream": True, "stream_options": {"include_usage": True}}]


@pytest.mark.parametrize("prefix", ["/v1", "/api/v1", "/v1beta/openai", ""])
async def test_the_models_of_a_url_with_any_prefix(server: ChatServer, prefix: str) -> None:
    server.prefix = prefix
    server.script = [text_reply("yes")]
    for suffix in {"", "/"} if prefix else {""}:
        async with ChatClient(server.url + prefix + suffix) as client:
            assert await client.models() == ["acme/chat"]
            assert [p.content async for p in client.answer(BODY, lambda s, e: None)][1] == "yes"


async def test_adapters_are_not_models_to_choose_from(server: ChatServer) -> None:
    server.cards = [{"id": "base"}, {"id": "adapter", "parent": "base"}, {"id": 3}]
    async with ChatClient(server.url) as client:
        assert await client.models() == ["base"]
        assert await client.models(adapters=True) == ["base", "adapter"]
    server.cards = None
    async with ChatClient(server.url) as client:
        assert await client.models() == []


async def test_a_server_that_loads_its_model_is_waited_for(server: ChatServer) -> None:
    loading = error_reply(503, "Loading model", **{"retry-after": "0"})
    server.loading = [loading, loading]
    reasons: list[str] = []
    async with ChatClient(server.url) as client:
        names = await client.models(on_pause=lambda seconds, error: reasons.append(error.cause))
        assert names == ["acme/chat"]
        assert reasons == ["the server is busy (status 503): Loading model"] * 2
        server.loading = [loading] * 4
        with pytest.raises(ChatServerError, match="Loading model"):
            await client.models()
        server.loading = [error_reply(500, "broken")]
        with pytest.raises(ChatServerError, match="broken"):
            await client.models()


async def test_parameters_have_the_names_of_the_server(server: ChatServer) -> None:
    server.cards = [{"id": "acme/chat", "owned_by": "llamacpp"}]
    server.script = [text_reply("fine")]
    async with ChatClient(server.url) as client:
        await client.models()
        body = {**BODY, "repetition_penalty": 1.1, "thinking_token_budget": 0}
        assert [p async for p in client.answer(body, lambda s, e: None)]
    asked = server.requests[-1]
    assert (asked["repeat_penalty"], asked["thinking_budget_tokens"]) == (1.1, 0)
    assert not {"repetition_penalty", "thinking_token_budget"} & asked.keys()


async def test_the_key_is_sent_and_asked_for(server: ChatServer) -> None:
    server.key = "sk-1"
    async with ChatClient(server.url, "sk-1") as client:
        assert await client.models() == ["acme/chat"]
    async with ChatClient(server.url) as client:
        with pytest.raises(ChatServerError, match="status 401: no such key") as raised:
            await client.models()
    assert "--api-key" in raised.value.remedy
    assert server.authorizations == ["Bearer sk-1", None]


async def test_a_busy_server_is_asked_again_when_it_says(server: ChatServer) -> None:
    soon = formatdate(time.time() + 1, usegmt=True)
    server.script = [
        error_reply(429, "slow down", **{"retry-after": "0"}),
        error_reply(503, "loading", **{"retry-after": soon}),
        text_reply("now"),
    ]
    text, pauses = await answer(server)
    assert text == "now"
    assert pauses[0] == 0
    assert 0 <= pauses[1] <= 1


async def test_a_server_that_is_busy_for_long_is_not_waited_for(server: ChatServer) -> None:
    server.script = [error_reply(429, "quota", **{"retry-after": "3600"})]
    error = await refusal(server)
    assert (error.status, error.retry_after, len(server.requests)) == (429, 3600, 1)
    assert "busy (status 429): quota" in error.cause


async def test_a_server_that_stays_busy(server: ChatServer) -> None:
    server.script = [error_reply(503, "still", **{"retry-after": "0"})]
    assert (await refusal(server)).status == 503
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("reply", "cause", "remedy"),
    [
        (error_reply(404, "no model x"), "no model x", "/model"),
        (Reply(404, "<html>"), "<html>", "/model"),
        (Reply(404, {}), "no chat completions", "URL"),
        (Reply(422, {"error": "inputs tokens + max_new_tokens must be <= 4", "error_type": "v"}),
         "must be <= 4", ""),
        (Reply(400, {"detail": "Field required"}), "Field required", ""),
        (Reply(500, {}), "returned status 500", ""),
        (Reply(200, {"choices": [], "error": {"message": "gone"}}), "server failed: gone", ""),
    ],
)  # fmt: skip
async def test_refusals(server: ChatServer, reply: Reply, cause: str, remedy: str) -> None:
    server.script = [reply]
    error = await refusal(server)
    assert cause in error.cause
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (422, "content of type `image_url` is not supported by this model"),
        (400, "acme/chat is not a multimodal model"),
        (500, "image input is not supported - hint: you may need to provide the mmproj"),
        (400, "messages[0]: unknown variant `image_url`, expected `text`"),
    ],
)
async def test_a_model_that_does_not_see(server: ChatServer, status: int, message: str) -> None:
    server.script = [error_reply(status, message)]
    body = {**BODY, "messages": [{"role": "user", "content": IMAGE}]}
    error = await refusal(server, body)
    assert error.cause == message
    assert "vision-language model" in error.remedy
    assert "vision-language model" not in (await refusal(server)).remedy


async def test_servers_without_fields_of_openai_s(server: ChatServer) -> None:
    server.script = [
        error_reply(400, "Unknown field: stream_options"),
        error_reply(400, "Use 'max_completion_tokens' instead."),
        text_reply("fine"),
    ]
    assert (await answer(server, {**BODY, "max_tokens": 3}))[0] == "fine"
    assert server.requests[-1] == {**BODY, "stream": True, "max_completion_tokens": 3}


async def test_an_answer_that_is_not_streamed(server: ChatServer) -> None:
    server.script = [Reply(200, {"choices": [{"message": {"content": "whole"}}]})]
    assert (await answer(server))[0] == "whole"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(body=delta(content="Hel"), cut=True), "was lost while it answered"),
        (Reply(body=delta(content="Hel")), "ended the answer early"),
        (Reply(200, b"hello", {"content-type": "text/html"}), "returned text/html"),
    ],
)
async def test_servers_that_die(server: ChatServer, reply: Reply, words: str) -> None:
    server.script = [reply]
    assert words in (await refusal(server)).cause


async def test_no_server() -> None:
    async with ChatClient("http://127.0.0.1:1") as client:
        with pytest.raises(ChatServerError, match="is unavailable"):
            await client.models()
    with pytest.raises(ChatInputError, match="not the URL"):
        ChatClient("http://")


@pytest.mark.parametrize(
    ("target", "url"),
    [
        ("http://host:1/v1", "http://host:1/v1"),
        ("localhost:3000", "http://localhost:3000"),
        ("10.0.0.1:80/v1", "http://10.0.0.1:80/v1"),
        ("acme/chat", None),
        ("./model", None),
        ("acme/chat:latest", None),
        ("", None),
    ],
)
def test_targets(target: str, url: str | None) -> None:
    assert as_url(target) == url


@pytest.mark.parametrize(
    "url", ["http://host", "http://host/v1/", "http://host/v1/chat/completions"]
)
async def test_a_pasted_url_of_chats_is_that_of_their_server(url: str) -> None:
    async with ChatClient(url) as client:
        assert client.url == "http://host/v1"
