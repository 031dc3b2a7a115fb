"""Long texts and conversations do not delay the tokens of other requests."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tgi_cli.router.api import messages
from tgi_cli.router.generation import chat_prompt
from tgi_cli.router.generation.chat_prompt import INLINE_MESSAGES
from tgi_cli.router.state import RouterState
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import INLINE_CHARACTERS


@pytest.fixture
def threads(state: RouterState, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What was done to texts, and whether on the event loop."""
    seen: list[tuple[str, bool]] = []
    loop = threading.current_thread()

    def watch(holder: Any, name: str) -> None:
        done = getattr(holder, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, threading.current_thread() is loop))
            return done(*args, **kwargs)

        monkeypatch.setattr(holder, name, watched)

    watch(chat_prompt, "_draft")
    watch(messages, "chat_request")
    watch(Tokenizer, "encode")
    watch(Tokenizer, "spans")
    return seen


def chat(messages: int, content: str = "x") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * messages}


def count(blocks: int, parts: int = 0) -> dict[str, Any]:
    """A prompt to count, whose message has blocks, or a result of parts."""
    block: dict[str, Any] = {"type": "text", "text": "x"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block] * parts}
    content = [block] * blocks if blocks else [result]
    return {"model": "tgi", "messages": [{"role": "user", "content": content}]}


COUNT = "/v1/messages/count_tokens"


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("/chat_tokenize", chat(1), [("_draft", True), ("spans", True)]),
        ("/chat_tokenize", chat(INLINE_MESSAGES + 1), [("_draft", False), ("spans", True)]),
        ("/chat_tokenize", chat(1, "x" * INLINE_CHARACTERS), [("_draft", True), ("spans", False)]),
        ("/v1/chat/completions", chat(1), [("_draft", True), ("encode", True)]),
        (COUNT, count(1), [("chat_request", True), ("_draft", True), ("encode", True)]),
        (COUNT, count(INLINE_MESSAGES), [("chat_request", False)]),
        (COUNT, count(0, INLINE_MESSAGES), [("chat_request", False)]),
        ("/generate", {"inputs": "x"}, [("encode", True)]),
        ("/tokenize", {"inputs": "x" * (INLINE_CHARACTERS + 1)}, [("spans", False)]),
    ],
    ids=["short", "many", "long", "chat", "message", "blocks", "parts", "text", "long text"],
)
async def test_long_work_is_done_by_workers(
    client: httpx.AsyncClient,
    threads: list[tuple[str, bool]],
    route: str,
    body: dict[str, Any],
    expected: list[tuple[str, bool]],
) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert [found for found in threads if found in expected or not found[1]] == expected


async def test_errors_in_workers_are_answered_the_same(client: httpx.AsyncClient) -> None:
    long, short = chat(INLINE_MESSAGES + 1), chat(1)
    for body in (long, short):
        body["messages"] = [*body["messages"], {"role": "user", "content": [{"type": "video"}]}]
    answers = [await client.post("/v1/chat/completions", json=body) for body in (long, short)]
    assert answers[0].status_code == answers[1].status_code == 400
    assert answers[0].json() == answers[1].json()
