"""Requests of the payload limit's size hold nothing up, and no more memory than their answers.

What is asserted is where the work is done and in which portions; times are far above those
measured, which docs/operations.md has.
"""

from __future__ import annotations

import json
import threading
import tracemalloc
from functools import cache
from typing import Any

import httpx
import msgspec
import pytest

from tests.router.fakes import FakeEngine
from tests.tools.event_loop_gap import loop_gap
from tgi_cli.process import pool_child
from tgi_cli.router.api import kserve, tgi, vertex
from tgi_cli.router.state import RouterState
from tgi_cli.text import windowed_encoding
from tgi_cli.text.spans import Spans
from tgi_cli.text.tokenizer import Tokenizer

LONG = "the quick brown fox jumps over the lazy dog. " * 30_000
"""1.35 MB."""
SECONDS = 0.5
"""Ten times the budget, for machines that are busy."""


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Characters of each call of the tokenizer on a long text, and whether on the loop."""
    seen: list[tuple[int, bool]] = []
    loop = threading.get_ident()
    spans = Tokenizer.spans

    def watched(self: Tokenizer, text: str, add_special_tokens: bool = True) -> Spans:
        seen.append((len(text), threading.get_ident() == loop))
        return spans(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "spans", watched)
    return seen


class TestTokenize:
    async def test_long_text_is_tokenized_in_windows_off_the_loop(
        self, client: httpx.AsyncClient, state: RouterState, encoded: list[tuple[int, bool]]
    ) -> None:
        async with (
            loop_gap() as gap,
            client.stream("POST", "/tokenize", json={"inputs": LONG}) as answer,
        ):
            assert answer.status_code == 200
            assert "content-length" not in answer.headers, "it is sent while it is found"
            text = await answer.aread()
        assert (
            max(characters for characters, _ in encoded) <= 2 * windowed_encoding.WINDOW_CHARACTERS
        )
        assert not any(here for _, here in encoded)
        assert gap.work < SECONDS
        found = msgspec.json.decode(text)
        whole = list(state.text.tokenizer.spans(LONG))
        assert [(token["id"], token["start"], token["stop"]) for token in found] == whole
        assert all(token["text"] == LONG[token["start"] : token["stop"]] for token in found[:999])

    async def test_long_conversation_is_tokenized_off_the_loop(
        self, client: httpx.AsyncClient
    ) -> None:
        body = {"messages": [{"role": "user", "content": LONG}]}
        answer = (await client.post("/chat_tokenize", json=body)).json()
        assert list(answer) == ["tokenize_response", "templated_text"]
        assert LONG[:-1] in answer["templated_text"]
        assert answer["tokenize_response"][-1]["stop"] == len(answer["templated_text"])

    @pytest.mark.parametrize("short", ["", "x", "hello world " * 300])
    async def test_short_texts_are_tokenized_on_the_loop(
        self, client: httpx.AsyncClient, state: RouterState, short: str
    ) -> None:
        answer = await client.post("/tokenize", json={"inputs": short})
        assert int(answer.headers["content-length"]) == len(answer.content)
        found = [(token["id"], token["start"], token["stop"]) for token in answer.json()]
        assert found == list(state.text.tokenizer.spans(short))


class TestPrompts:
    @pytest.mark.parametrize(
        ("route", "body"),
        [
            ("/generate", {"inputs": LONG}),
            ("/v1/completions", {"prompt": LONG}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ],
    )
    async def test_too_long_prompts_are_not_encoded_to_the_end(
        self,
        client: httpx.AsyncClient,
        encoded: list[tuple[int, bool]],
        route: str,
        body: dict[str, Any],
    ) -> None:
        async with loop_gap() as gap:
            answer = await client.post(route, json=body)
        assert answer.status_code in (400, 422)
        assert "at least" in answer.text, "how many there are is not known"
        assert (
            sum(characters for characters, _ in encoded) < 10 * windowed_encoding.WINDOW_CHARACTERS
        )
        assert gap.work < SECONDS

    async def test_truncated_prompts_retain_their_end(
        self,
        client: httpx.AsyncClient,
        state: RouterState,
        engine: FakeEngine,
        encoded: list[tuple[int, bool]],
    ) -> None:
        body = {"inputs": LONG, "parameters": {"truncate": 50, "max_new_tokens": 2}}
        assert (await client.post("/generate", json=body)).status_code == 200
        whole = state.text.tokenizer.encode(LONG)
        assert engine.requests[-1].prompt_ids == tuple(whole[-50:])
        assert (
            max(characters for characters, _ in encoded) <= 2 * windowed_encoding.WINDOW_CHARACTERS
        )
        assert not any(here for _, here in encoded)

    async def test_prompt_tokens_are_rendered_off_the_loop(
        self, client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[bool] = []
        loop, surface = threading.get_ident(), state.text.tokenizer.surface

        @cache
        def watched(token_id: int) -> str:
            seen.append(threading.get_ident() == loop)
            return surface(token_id)

        monkeypatch.setattr(state.text.tokenizer, "surface", watched)
        monkeypatch.setattr(tgi, "_INLINE_TOKENS", 5)
        words = "the quick brown fox jumps over the lazy dog"
        body = {
            "inputs": words,
            "parameters": {"max_new_tokens": 1, "details": True, "decoder_input_details": True},
        }
        answers = [(await client.post("/generate", json=body)).json() for _ in range(2)]
        assert answers[0]["details"]["prefill"] == answers[1]["details"]["prefill"]
        shown = {token["id"] for token in answers[0]["details"]["prefill"]}
        assert len(shown) >= 10
        assert seen.count(False) == len(shown), "each once, whoever asks"
        assert seen.count(True) <= 2, "the last token of the answer, which is special"


class TestLargeBodies:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": 8_000_000}

    async def test_long_chats_pass_the_template_without_json(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose decoder holds the interpreter lock until all of a text is read."""
        seen: list[int] = []
        loads = json.loads

        def watched(text: Any, **options: Any) -> Any:
            seen.append(len(text))
            return loads(text, **options)

        monkeypatch.setattr(pool_child.json, "loads", watched)
        body = {"messages": [{"role": "user", "content": LONG * 3}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "at least" in answer.text
        assert 0 < max(seen) < 1000


class TestPlatforms:
    async def test_instances_are_counted_before_they_are_decoded(
        self, client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(*_: Any) -> None:
            raise AssertionError

        monkeypatch.setattr(vertex, "_instance", never)
        async with loop_gap() as gap:
            few, many = [
                await client.post("/vertex", json={"instances": [{"inputs": "a"}] * count})
                for count in (state.admission.limit + 1, 40_000)
            ]
        assert few.status_code == many.status_code == 422
        assert f"the {state.admission.limit} that run at once" in few.text
        assert "length <= 4096" in many.text
        assert gap.work < SECONDS
        assert state.admission.in_flight == 0

    async def test_instances_that_are_not_objects_are_not_buffered(
        self, client: httpx.AsyncClient
    ) -> None:
        body = b'{"instances":[' + b"1," * 600_000 + b"1]}"
        headers = {"content-type": "application/json"}
        tracemalloc.start()
        try:
            answer = await client.post("/vertex", content=body, headers=headers)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert answer.status_code == 422
        assert "instances[0]" in answer.text
        assert peak < 20 << 20

    async def test_tensors_are_counted_before_they_are_decoded(
        self, client: httpx.AsyncClient, state: RouterState
    ) -> None:
        tensor = {"name": "a", "shape": [1], "datatype": "BYTES", "data": ["a"]}
        many = {**tensor, "data": ["a"] * (state.admission.limit + 1)}
        for inputs in ([tensor] * (state.admission.limit + 1), [many]):
            answer = await client.post("/v2/models/m/infer", json={"inputs": inputs})
            assert answer.status_code == 422
            assert "run at once" in answer.text

    async def test_many_bytes_are_decoded_and_encoded_in_slices(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[bool] = []
        loop = threading.get_ident()
        for name in ("_read", "_written"):
            done = getattr(kserve, name)

            def watched(data: bytes, done: Any = done) -> Any:
                seen.append(threading.get_ident() == loop)
                return done(data)

            monkeypatch.setattr(kserve, name, watched)
        text = "é" * 200 + "x" * 399_600
        data = list(text.encode())
        parameters = {"return_full_text": True, "truncate": 10, "max_new_tokens": 2}
        body = {
            "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": data}],
            "parameters": parameters,
        }
        sent = msgspec.json.encode(body).replace(b"120,120,", b"120 ,\n\t120, ", 100)
        headers = {"content-type": "application/json"}
        tracemalloc.start()
        answer = await client.post("/v2/models/m/infer", content=sent, headers=headers)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found = bytes(answer.json()["outputs"][0]["data"]).decode()
        assert found.startswith(text)
        assert seen == [False, False]
        assert peak < 32_000_000

    @pytest.mark.parametrize(
        "data",
        ["[[1],[2]]", '["a,b",1]', "[1,null]", "{}", "[1.5]", "[-1]", '[1,"a"]', "1", "null"],
    )
    async def test_other_data_is_refused(self, client: httpx.AsyncClient, data: str) -> None:
        body = b'{"inputs":[{"name":"a","shape":[1],"datatype":"BYTES","data":%b}]}' % data.encode()
        headers = {"content-type": "application/json"}
        answer = await client.post("/v2/models/m/infer", content=body, headers=headers)
        assert answer.status_code == 422
        assert "must be texts, or the bytes of one" in answer.text
