"""Routes of vLLM, SGLang and llama.cpp, beside those of OpenAI and TGI."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

import tgi_cli
from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.tools.event_loop_gap import loop_gap
from tgi_cli.router.api.openapi import endpoints_of
from tgi_cli.router.app import ROUTES
from tgi_cli.router.bounds import DETOKENIZED_IDS
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import INLINE_CHARACTERS

USER: list[dict[str, Any]] = [{"role": "user", "content": "the fox"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": USER},
    "/completions": {"prompt": "the fox"},
    "/responses": {"input": "the fox"},
}
FLEETING = {"id", "created", "created_at"}


def lasting(value: Any) -> Any:
    """The value without what differs from answer to answer."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if key not in FLEETING | {
            "item_id"}}  # fmt: skip
    return [lasting(item) for item in value] if isinstance(value, list) else value


class TestWithoutV1:
    @pytest.mark.parametrize("path", BODIES)
    async def test_paths_without_v1_answer_the_same(
        self, client: httpx.AsyncClient, path: str
    ) -> None:
        whole = [await client.post(prefix + path, json=BODIES[path]) for prefix in ("", "/v1")]
        assert [answer.status_code for answer in whole] == [200, 200]
        assert lasting(whole[0].json()) == lasting(whole[1].json())
        body = {**BODIES[path], "stream": True}
        streams = [(await client.post(prefix + path, json=body)).text for prefix in ("", "/v1")]
        assert lasting(events(streams[0])) == lasting(events(streams[1])) != []

    async def test_models_are_listed_without_v1(self, client: httpx.AsyncClient) -> None:
        for path in ("/models", "/models/acme/tiny"):
            short, long = [await client.get(prefix + path) for prefix in ("", "/v1")]
            assert short.status_code == 200
            assert short.json() == long.json()

    async def test_unknown_adapter_is_404(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("one")
        for path in ("/completions", "/chat/completions", "/responses", "/tokenize", "/detokenize"):
            body = BODIES.get(path, {"prompt": "x", "tokens": [1]}) | {"model": "two"}
            answer = await client.post(path, json=body)
            assert answer.status_code == 404, path
            assert "two" in answer.text

    @pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
    async def test_embeddings_are_refused(self, client: httpx.AsyncClient, path: str) -> None:
        answer = await client.post(path, json={"input": "x", "model": "y"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == (
            "The model `acme/tiny` generates text: this server makes no embeddings"
        )
        assert (error["param"], error["code"]) == ("model", "unsupported_value")

    async def test_access_log_has_the_route(
        self, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "tgi_cli.router.observability.access_log")
        await client.post("/chat/completions", json=BODIES["/chat/completions"])
        await client.get("/models/acme/tiny")
        await client.post("/detokenize", json={"tokens": [1]})
        routes = [getattr(record, "route", "") for record in caplog.records]
        assert routes == ["/chat/completions", "/models/{model:path}", "/detokenize"]

    def test_all_aliases_are_documented(self) -> None:
        operations = {at: found.operation for at, found in endpoints_of(ROUTES).items()}
        for (method, path), operation in operations.items():
            if path.startswith("/v1/") and "lora" not in path:
                assert operations[method, path.removeprefix("/v1")] == operation


async def test_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": tgi_cli.__version__}


async def test_ping_answers_get_and_post(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 200
    engine.is_healthy = False
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 503


class TestTokenize:
    async def test_vllms_prompt_is_tokenized(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        ids = engine.tokenizer.encode("the fox é")
        answer = await client.post("/tokenize", json={"model": "m", "prompt": "the fox é"})
        assert answer.status_code == 200
        expected = {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": None}
        assert answer.json() == expected
        bare = {"prompt": "the fox é", "add_special_tokens": False, "return_token_strs": True}
        found = (await client.post("/tokenize", json=bare)).json()
        assert found["tokens"] == ids[1:] == engine.tokenizer.encode("the fox é", False)
        vocabulary = engine.tokenizer.backend.id_to_token
        assert found["token_strs"] == [vocabulary(index) for index in ids[1:]]
        assert found["token_strs"][1] == "Ġfox"

    async def test_vllms_messages_are_rendered_and_tokenized(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """What a chat would be given."""
        found = (await client.post("/tokenize", json={"messages": USER})).json()
        await client.post("/v1/chat/completions", json={"messages": USER})
        assert tuple(found["tokens"]) == engine.requests[0].prompt_ids
        assert found["count"] == len(found["tokens"])
        bare = {"messages": USER, "add_generation_prompt": False}
        shorter = (await client.post("/tokenize", json=bare)).json()
        assert shorter["count"] < found["count"]
        assert found["tokens"][: shorter["count"]] == shorter["tokens"]
        special = {"messages": USER, "add_special_tokens": True}
        longer = (await client.post("/tokenize", json=special)).json()
        assert longer["tokens"][1:] == found["tokens"]

    async def test_final_message_is_continued_only_on_request(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body: dict[str, Any] = {"messages": [*USER, {"role": "assistant", "content": "Hm"}]}
        ended = (await client.post("/tokenize", json=body)).json()
        body |= {"continue_final_message": True, "add_generation_prompt": False}
        going_on = (await client.post("/tokenize", json=body)).json()
        assert going_on["count"] < ended["count"]
        assert engine.tokenizer.decode(going_on["tokens"], False).endswith("Hm")

    async def test_llamacpps_content_is_tokenized(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """llama.cpp's, which adds no special tokens unless it is asked to."""
        text = "the fox 🤗"
        ids = engine.tokenizer.encode(text, False)
        assert (await client.post("/tokenize", json={"content": text})).json() == {"tokens": ids}
        special = {"content": text, "add_special": True}
        assert (await client.post("/tokenize", json=special)).json()["tokens"][1:] == ids
        pieces = (
            await client.post("/tokenize", json={"content": text, "with_pieces": True})
        ).json()
        assert [token["id"] for token in pieces["tokens"]] == ids
        spelt = b"".join(
            bytes(token["piece"]) if isinstance(token["piece"], list) else token["piece"].encode()
            for token in pieces["tokens"]
        )
        assert spelt == text.encode()
        assert any(isinstance(token["piece"], list) for token in pieces["tokens"])

    async def test_inputs_takes_precedence(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"inputs": "the fox", "prompt": 5, "messages": 5, "content": 5}
        answer = await client.post("/tokenize", json=body)
        assert [token["id"] for token in answer.json()] == engine.tokenizer.encode("the fox")

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({}, "missing required field `inputs`"),
            ({"prompt": ["a"]}, "Expected `str`"),
            ({"prompt": "x", "add_special_tokens": "no"}, "Expected `bool | null`"),
            ({"messages": []}, "`messages` cannot be empty"),
            ({"messages": [{}]}, "missing required field `role`"),
            ({"messages": USER, "chat_template": "{{ 1 }}"}, "`chat_template`"),
            ({"messages": USER, "chat_template_kwargs": {"eos_token": "x"}}, "eos_token"),
            ({"content": [1]}, "Expected `str`"),
            ({"content": "x", "parse_special": False}, "`parse_special`"),
        ],
    )
    async def test_tokenize_errors_have_tgis_form(
        self, client: httpx.AsyncClient, body: dict[str, Any], words: str
    ) -> None:
        answer = await client.post("/tokenize", json=body)
        assert answer.status_code == 422
        assert words in answer.text
        if answer.headers["content-type"] == "application/json":
            assert set(answer.json()) == {"error", "error_type"}


class TestDetokenize:
    async def test_detokenize_answers_under_both_names(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        text = "the quick 🤗 <|im_start|>fox"
        ids = engine.tokenizer.encode(text, False)
        answer = await client.post("/detokenize", json={"model": "m", "tokens": ids})
        assert answer.status_code == 200
        assert answer.json() == {"prompt": text, "content": text}
        assert (await client.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""

    async def test_detokenize_inverts_tokenize(self, client: httpx.AsyncClient) -> None:
        text = 'the "quick"\n\t\\ fox é'
        for body in ({"content": text}, {"prompt": text, "add_special_tokens": False}):
            tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
            answer = await client.post("/detokenize", json={"tokens": tokens})
            assert answer.json()["content"] == text

    @pytest.mark.parametrize(
        ("tokens", "param", "code"),
        [
            ([10**6], "tokens", "invalid_value"),
            ([-1], "tokens[0]", "integer_below_min_value"),
            ([5, 1 << 32], "tokens[1]", "integer_above_max_value"),
            ([5, 1 << 80], "tokens[1]", "integer_above_max_value"),
            ([1.5], "tokens[0]", "invalid_type"),
            (["the"], "tokens[0]", "invalid_type"),
            ("the", "tokens", "invalid_type"),
            (None, "tokens", "invalid_type"),
            ([5] * (DETOKENIZED_IDS + 1), "tokens", "array_above_max_length"),
        ],
    )
    async def test_invalid_token_ids_are_refused(
        self, client: httpx.AsyncClient, tokens: Any, param: str, code: str
    ) -> None:
        answer = await client.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "the fox"}),
        ("/tokenize", {"content": "the fox"}),
    ],
)
async def test_long_texts_are_handled_off_the_event_loop(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    threads: list[int] = []
    real = Tokenizer.spans

    def noted(self: Tokenizer, *args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "spans", noted)
    for asked in (body, dict.fromkeys(body, "the fox " * INLINE_CHARACTERS)):
        assert (await client.post(path, json=asked)).status_code == 200
    here = threading.get_ident()
    assert threads[0] == here
    assert len(threads) > 1
    assert here not in threads[1:]


async def test_tokens_of_a_long_text_are_those_of_the_tokenizer(
    client: httpx.AsyncClient, text: TextBundle
) -> None:
    long = "".join(f"the {number} fox, " for number in range(20_000))
    ids = text.tokenizer.encode(long, add_special_tokens=True)
    names = [text.tokenizer.backend.id_to_token(index) for index in ids]
    answer = (
        await client.post("/tokenize", json={"prompt": long, "return_token_strs": True})
    ).json()
    assert (answer["count"], answer["tokens"], answer["token_strs"]) == (len(ids), ids, names)
    content = (await client.post("/tokenize", json={"content": long, "add_special": True})).json()
    assert content["tokens"] == ids


async def test_largest_detokenization_blocks_the_event_loop_under_50_ms(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    ids = [10 + place % 200 for place in range(DETOKENIZED_IDS)]
    async with loop_gap() as gap:
        answer = await client.post("/detokenize", json={"tokens": ids})
    assert gap.turns > 5, "the loop goes on meanwhile"
    assert answer.json()["prompt"] == engine.tokenizer.decode(ids, False)
    assert gap.work < 0.5, "ten times the budget"
