"""Stored responses: their bounds, retrieving and continuing them, and the background."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_response_tools import PATCH, WEATHER, called, rendered
from tests.router.test_tools import bundle, prompt_of
from tgi_cli.router.api import response_state
from tgi_cli.router.response_store import (
    ENTRY_BYTES,
    ITEM_BYTES,
    MOST_RESPONSES,
    Items,
    ResponseStore,
    StoredResponse,
)
from tgi_cli.router.state import RouterState
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/responses"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, context: list[Items] | None = None, output: int = 0) -> StoredResponse:
    return StoredResponse(
        name, lambda: b"{}", context or [], Items([b"x" * (output // 2)] * 2), [f"{name}-0"]
    )


OVERHEAD = ENTRY_BYTES + 8 + len(b"{}") + ITEM_BYTES + len("a-0")
"""Bytes of ``stored`` without context, beside its output."""


class TestStore:
    def test_bytes_are_bounded_and_the_oldest_goes_first(self) -> None:
        store = ResponseStore(3 * (OVERHEAD + 100), 60)
        for name in "abcd":
            assert store.add(stored(name, output=100))
        assert [name for name in "abcd" if store.get(name)] == ["b", "c", "d"]
        assert store.bytes == 3 * (OVERHEAD + 100)
        assert store.with_item("a-0") is None
        found = store.with_item("b-0")
        assert found is not None
        assert found.id == "b"

    def test_response_that_is_too_large_leaves_the_others(self) -> None:
        store = ResponseStore(2 * OVERHEAD, 60)
        assert store.add(stored("a"))
        assert not store.add(stored("b", output=2 * OVERHEAD))
        assert store.get("a") is not None
        assert store.get("b") is None

    def test_age_is_bounded(self) -> None:
        clock = Clock()
        store = ResponseStore(1 << 20, 60, clock)
        store.add(stored("a"))
        clock.now += 59
        store.add(stored("b"))
        assert store.get("a") is not None
        clock.now += 1
        assert store.get("a") is None
        assert store.get("b") is not None
        assert len(store) == 1

    def test_number_is_bounded(self) -> None:
        store = ResponseStore(1 << 30, 60)
        for index in range(MOST_RESPONSES + 3):
            store.add(stored(str(index)))
        assert len(store) == MOST_RESPONSES
        assert store.get("2") is None
        assert store.get("3") is not None

    def test_shared_items_count_once_and_as_long_as_they_are_used(self) -> None:
        store = ResponseStore(1 << 20, 60)
        first = stored("a", output=5000)
        store.add(first)
        store.add(stored("b", context=first.conversation, output=100))
        both = store.bytes
        assert both < 2 * 5000
        assert store.remove("a")
        assert store.bytes == both - OVERHEAD
        assert store.remove("b")
        assert store.bytes == 0
        assert not store.remove("b")

    async def test_running_responses_are_kept(self) -> None:
        store = ResponseStore(OVERHEAD + 100, 60)
        task = asyncio.ensure_future(asyncio.sleep(60))
        store.add(replace(stored("a"), running=task))
        store.add(stored("b"))
        store.add(stored("c"))
        assert store.get("a") is not None
        assert store.get("b") is None
        task.cancel()

    def test_items_of_others_cannot_be_taken_over(self) -> None:
        store = ResponseStore(1 << 20, 60)
        store.add(stored("a"))
        store.add(replace(stored("b"), item_ids=["a-0"]))
        found = store.with_item("a-0")
        assert found is not None
        assert found.id == "a"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("response_store"))


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
    return engine


@pytest.fixture
def ai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    stream = fields.get("stream", False)
    answer = await client.post(ROUTE, json={"model": "tgi", "input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = events(answer.text)[-1]["response"] if stream else answer.json()
    return found


async def get(client: httpx.AsyncClient, path: str, **query: Any) -> dict[str, Any]:
    answer = await client.get(f"{ROUTE}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_response_can_be_retrieved_and_deleted(
    client: httpx.AsyncClient, stream: bool
) -> None:
    found = await post(client, stream=stream, metadata={"a": "b"})
    assert found["store"] is True
    assert await get(client, found["id"]) == found
    answer = await client.delete(f"{ROUTE}/{found['id']}")
    assert answer.json() == {"id": found["id"], "object": "response", "deleted": True}
    for path in ("", "/input_items"):
        answer = await client.get(f"{ROUTE}/{found['id']}{path}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (
            f"'{found['id']}' not found. This server keeps responses for 3600" in error["message"]
        )
        assert error["type"] == "invalid_request_error"
    assert (await client.delete(f"{ROUTE}/{found['id']}")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_response_without_store_is_not_kept(client: httpx.AsyncClient, stream: bool) -> None:
    found = await post(client, stream=stream, store=False)
    assert found["store"] is False
    assert (await client.get(f"{ROUTE}/{found['id']}")).status_code == 404


async def test_failed_stream_is_kept(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure, engine.fail_after = "broken", 2
    found = await post(client, stream=True)
    assert found["status"] == "failed"
    assert await get(client, found["id"]) == found
    assert found["output"][0]["status"] == "incomplete"


async def test_conversation_is_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The items of all earlier turns are in front; instructions are not carried over."""
    arguments = {"city": "x"}
    engine.reply_with(f"<think>Hm.</think>\n\n{called('weather', arguments)}", "Rain.", "Bye.")
    first = await post(client, tools=[WEATHER], instructions="Be brief.")
    assert "Be brief." in prompt_of(engine)
    output = {
        "type": "function_call_output",
        "call_id": first["output"][1]["call_id"],
        "output": "rain",
    }
    second = await post(client, previous_response_id=first["id"], input=[output])
    assert second["previous_response_id"] == first["id"]
    conversation = (
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\nHm.{rendered('weather', arguments)}<|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of(engine) == conversation
    await client.delete(f"{ROUTE}/{first['id']}")
    await post(client, previous_response_id=second["id"], input="thanks", stream=True)
    assert prompt_of(engine) == (
        conversation + "Rain.<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_response_can_be_continued_without_input(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    first = await post(client)
    await post(client, previous_response_id=first["id"], input=None)
    assert prompt_of(engine).endswith("assistant\nhello world<|im_end|>\n<|im_start|>assistant\n")


async def test_items_can_be_referred_to(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    question = {"type": "message", "id": "msg_mine", "role": "user", "content": "mine"}
    first = await post(client, input=[question])
    ids = ["msg_mine", first["output"][0]["id"]]
    references = [{"type": "item_reference", "id": item_id} for item_id in ids]
    again = await post(client, input=[*references, {"role": "user", "content": "more"}])
    assert prompt_of(engine) == (
        "<|im_start|>user\nmine<|im_end|>\n<|im_start|>assistant\nhello world<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    listed = (await get(client, f"{again['id']}/input_items", order="asc"))["data"]
    assert [item["type"] for item in listed] == ["message"] * 3
    answer = await client.post(ROUTE, json={"input": [{"type": "item_reference", "id": "msg_0"}]})
    assert answer.status_code == 400
    assert "Item with id 'msg_0' not found. This server" in answer.json()["error"]["message"]


async def test_unknown_previous_response_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await client.post(ROUTE, json={"input": "hi", "previous_response_id": "resp_1"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"
    assert "for 3600 seconds" in error["message"]
    assert engine.requests == []


async def test_long_stored_conversations_are_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await post(client)
    monkeypatch.setattr(response_state, "MOST_CONVERSATION_BYTES", 100)
    answer = await client.post(ROUTE, json={"input": "x", "previous_response_id": first["id"]})
    assert answer.status_code == 400
    assert "more than 100" in answer.json()["error"]["message"]


async def test_long_stored_conversations_are_read_by_workers(
    client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await post(client)
    runs: list[str] = []
    run = state.workers.run

    async def spied(work: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(work.__name__)
        return await run(work, *args, **kwargs)

    monkeypatch.setattr(state.workers, "run", spied)
    await post(client, previous_response_id=first["id"])
    await get(client, f"{first['id']}/input_items")
    assert runs == []
    monkeypatch.setattr(response_state, "INLINE_BYTES", 10)
    monkeypatch.setattr("tgi_cli.router.api.stored_responses.INLINE_BYTES", 10)
    await post(client, previous_response_id=first["id"])
    await get(client, f"{first['id']}/input_items")
    assert runs == ["_turn", "_page"]
    await post(client, input=[{"role": "user", "content": "x"}] * 65)
    assert "own_items" in runs


async def test_input_items_are_listed_in_pages(client: httpx.AsyncClient) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]
    first = await post(client, input=items)
    second = await post(client, previous_response_id=first["id"], input="e")
    path = f"{second['id']}/input_items"
    page = await get(client, path, order="asc")
    assert (page["object"], page["has_more"]) == ("list", False)
    kinds = [item["type"] for item in page["data"]]
    assert kinds == ["message", "message", *(i["type"] for i in items[2:]), "message", "message"]
    ids = [item["id"] for item in page["data"]]
    assert [item_id.partition("_")[0] for item_id in ids] == [
        "msg",
        "msg",
        "fc",
        "fco",
        "msg",
        "msg",
    ]
    assert len(set(ids)) == 6
    assert ids[4] == first["output"][0]["id"]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert page["data"][1]["content"][0]["type"] == "output_text"
    assert (page["first_id"], page["last_id"]) == (ids[0], ids[5])
    newest = await get(client, path, limit=2)
    assert [item["id"] for item in newest["data"]] == [ids[5], ids[4]]
    assert newest["has_more"] is True
    rest = await get(client, path, limit=100, after=newest["last_id"])
    assert [item["id"] for item in rest["data"]] == ids[3::-1]
    assert rest["has_more"] is False
    end = await get(client, path, after=ids[0])
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_0"}]
)
async def test_invalid_pages_are_refused(client: httpx.AsyncClient, query: dict[str, Any]) -> None:
    found = await post(client)
    answer = await client.get(f"{ROUTE}/{found['id']}/input_items", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(query))


async def test_stream_of_a_stored_response_is_refused(client: httpx.AsyncClient) -> None:
    found = await post(client)
    answer = await client.get(f"{ROUTE}/{found['id']}", params={"stream": "true"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


class TestDisabled:
    @pytest.fixture(params=["response_store_bytes", "response_store_seconds"])
    def settings(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {request.param: 0}

    async def test_nothing_is_stored(self, client: httpx.AsyncClient) -> None:
        found = await post(client, store=True)
        assert found["store"] is False
        answer = await client.get(f"{ROUTE}/{found['id']}")
        assert answer.status_code == 404
        assert "stores no responses" in answer.json()["error"]["message"]

    async def test_background_is_refused(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(ROUTE, json={"input": "hi", "background": True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "background"


async def until(client: httpx.AsyncClient, response_id: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (found := await get(client, response_id))["status"] not in statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


class TestBackground:
    async def test_response_is_polled(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.gate = asyncio.Semaphore(0)
        begun = await post(client, background=True)
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        running = await until(client, begun["id"], "in_progress")
        assert running["completed_at"] is None
        for _ in range(50):
            engine.gate.release()
        found = await until(client, begun["id"], "completed")
        assert found["output"][0]["content"][0]["text"] == "hello world"
        assert found["usage"]["output_tokens"] > 0
        assert found["completed_at"] is not None
        again = await post(client, previous_response_id=begun["id"])
        assert again["status"] == "completed"
        assert "hello world" in prompt_of(engine)

    async def test_response_is_cancelled(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        begun = await post(client, background=True)
        path = f"{ROUTE}/{begun['id']}"
        answer = await client.post(ROUTE, json={"input": "x", "previous_response_id": begun["id"]})
        assert answer.status_code == 400
        assert "still in progress" in answer.json()["error"]["message"]
        found = (await client.post(f"{path}/cancel")).json()
        assert found["status"] == "cancelled"
        assert engine.cancelled == [engine.requests[0].request_id]
        assert state.admission.in_flight == 0
        assert (await client.post(f"{path}/cancel")).json() == found
        assert await get(client, begun["id"]) == found

    async def test_deleted_response_is_cancelled(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        begun = await post(client, background=True)
        assert (await client.delete(f"{ROUTE}/{begun['id']}")).json()["deleted"] is True
        assert engine.cancelled == [engine.requests[0].request_id]
        assert state.admission.in_flight == 0
        assert (await client.get(f"{ROUTE}/{begun['id']}")).status_code == 404

    async def test_failure_is_stored(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.failure = "broken"
        begun = await post(client, background=True)
        found = await until(client, begun["id"], "failed")
        assert found["error"]["code"] == "server_error"
        assert "broken" in found["error"]["message"]

    async def test_only_background_responses_can_be_cancelled(
        self, client: httpx.AsyncClient
    ) -> None:
        found = await post(client)
        answer = await client.post(f"{ROUTE}/{found['id']}/cancel")
        assert answer.status_code == 400
        assert (await client.post(f"{ROUTE}/resp_0/cancel")).status_code == 404

    @pytest.mark.parametrize("fields", [{"stream": True}, {"store": False}])
    async def test_impossible_combinations_are_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
    ) -> None:
        answer = await client.post(ROUTE, json={"input": "hi", "background": True, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "background"
        assert engine.requests == []


class TestInputTokens:
    PATH = f"{ROUTE}/input_tokens"

    async def count(self, client: httpx.AsyncClient, **fields: Any) -> int:
        answer = await client.post(self.PATH, json={"model": "tgi", **fields})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["object"] == "response.input_tokens"
        tokens: int = found["input_tokens"]
        return tokens

    async def test_count_is_that_of_the_response(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        fields: dict[str, Any] = {"input": "hi"}
        seen = set()
        for more in (
            {"instructions": "Be brief."},
            {"tools": [WEATHER, PATCH]},
            {"reasoning": {"effort": "low"}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ):
            fields |= more
            expected = (await post(client, **fields))["usage"]["input_tokens"]
            assert await self.count(client, **fields) == expected
            seen.add(expected)
        assert len(seen) == 3

    async def test_stored_conversation_is_counted(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        first = await post(client)
        count = await self.count(client, previous_response_id=first["id"], input="more")
        second = await post(client, previous_response_id=first["id"], input="more")
        assert count == second["usage"]["input_tokens"]
        assert len(engine.requests) == 2

    async def test_prompt_beyond_the_context_is_counted(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        most = engine.info.max_input_tokens
        assert await self.count(client, input="hi " * 3000, truncation="auto") > most

    @pytest.mark.parametrize("fields", [{}, {"input": "x", "conversation": "c"}])
    async def test_invalid_requests_are_refused(
        self, client: httpx.AsyncClient, fields: dict[str, Any]
    ) -> None:
        assert (await client.post(self.PATH, json=fields)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_overflow_has_the_code_that_agents_know(
    client: httpx.AsyncClient, stream: bool
) -> None:
    answer = await client.post(ROUTE, json={"input": "hi " * 3000, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input"
    assert "maximum context length is 2000 tokens" in error["message"]


async def test_aliases_without_v1(client: httpx.AsyncClient) -> None:
    found = await post(client)
    path = f"/responses/{found['id']}"
    assert (await client.get(path)).json() == found
    assert (await client.get(f"{path}/input_items")).json()["object"] == "list"
    assert (await client.post("/responses/input_tokens", json={"input": "x"})).status_code == 200
    assert (await client.delete(path)).status_code == 200
    assert (await client.get(path)).json()["error"]["param"] == "response_id"


async def test_openais_client_manages_responses(ai: openai.AsyncOpenAI) -> None:
    first = await ai.responses.create(model="tgi", input="hi")
    assert (await ai.responses.retrieve(first.id)).output_text == "hello world"
    second = await ai.responses.create(model="tgi", input="more", previous_response_id=first.id)
    listed = [item async for item in ai.responses.input_items.list(second.id, limit=1)]
    assert [item.type for item in listed] == ["message"] * 3
    count = await ai.responses.input_tokens.count(model="tgi", input="hi")
    assert first.usage is not None
    assert count.input_tokens == first.usage.input_tokens
    begun = await ai.responses.create(model="tgi", input="hi", background=True)
    async with asyncio.timeout(60):
        while (await ai.responses.retrieve(begun.id)).status != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await ai.responses.cancel(begun.id)).status == "completed"
    await ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await ai.responses.retrieve(first.id)
