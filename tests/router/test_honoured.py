"""Parameters of other servers that the /v1 routes honour with the same meaning."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from tests.router.fakes import END_ID, FakeEngine
from tests.router.sse import events
from tests.unit.text import tiny
from tgi_cli.router.api.response_input import response_chat
from tgi_cli.router.api.schemas.responses import ResponsesRequest
from tgi_cli.router.http.bodies import wrong_types
from tgi_cli.router.state import RouterState
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.tokenizer import Tokenizer

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "the fox"},
    RESPONSES: {"input": "hi"},
}
ROUTES = pytest.mark.parametrize("route", list(BODIES))
V1 = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"watermark_gamma": 0.25, "watermark_delta": 3.0}


async def text_of(client: httpx.AsyncClient, route: str, **fields: Any) -> tuple[str, Any]:
    """The text of the first choice, streamed or not, and all that was answered."""
    answer = await client.post(route, json=BODIES[route] | fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        found = answer.json()
        if route == RESPONSES:
            return found["output"][0]["content"][0]["text"], found
        choice = found["choices"][0]
        return choice["text"] if route == COMPLETIONS else choice["message"]["content"], found
    chunks = [event for event in events(answer.text) if event != "[DONE]"]
    if route == RESPONSES:
        return "".join(c["delta"] for c in chunks if c["type"].endswith("text.delta")), chunks
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if route == COMPLETIONS:
        return "".join(choice["text"] for choice in choices), chunks
    return "".join(choice["delta"].get("content") or "" for choice in choices), chunks


@ROUTES
async def test_parameters_reach_the_sampler(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    fields = {"repeat_penalty": 1.25, "min_new_tokens": 2, "allowed_token_ids": [7, 5, 7],
              "watermark": True, "typical_p": 0.5}  # fmt: skip
    await text_of(client, route, **fields)
    sampling = engine.requests[0].sampling
    assert sampling.repetition_penalty == 1.25
    assert sampling.min_new_tokens == 2
    assert sampling.allowed_token_ids == (7, 5)
    assert (sampling.watermark, sampling.watermark_gamma) == (True, 0.25)
    assert (sampling.watermark_delta, sampling.typical_p) == (3.0, 0.5)


@ROUTES
async def test_do_sample_means_what_it_does_in_transformers(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    for fields in ({"do_sample": False}, {"do_sample": True}, {"do_sample": False, "top_k": 3}):
        await text_of(client, route, **fields)
    assert [request.sampling.greedy for request in engine.requests] == [True, False, False]


@ROUTES
@pytest.mark.parametrize(
    ("fields", "form", "param"),
    [
        ({"grammar": {"type": "regex", "value": "ab"}}, {"regex": "ab"}, "grammar"),
        ({"grammar": {"type": "json", "value": {"type": "null"}}}, {"json": {"type": "null"}},
         "grammar"),
        ({"grammar": 'root ::= "ab"'}, {"lark": 'root ::= "ab"'}, "grammar"),
        ({"json_schema": {"type": "null"}}, {"json": {"type": "null"}}, "json_schema"),
        ({"json_schema": '{"type": "null"}'}, {"json": '{"type": "null"}'}, "json_schema"),
        ({"regex": "ab"}, {"regex": "ab"}, "regex"),
        ({"ebnf": 'root ::= "ab"'}, {"lark": 'root ::= "ab"'}, "ebnf"),
    ],
)  # fmt: skip
async def test_all_forms_of_grammars_are_accepted(
    client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch, route: str,
    fields: dict[str, Any], form: dict[str, Any], param: str,
) -> None:  # fmt: skip
    seen: list[tuple[dict[str, Any], str]] = []

    async def compiled(grammar: Any) -> str:
        seen.append((msgspec.json.decode(grammar.form), grammar.param))
        return ""

    assert state.generator.grammars is not None
    monkeypatch.setattr(state.generator.grammars, "compile", compiled)
    await text_of(client, route, **fields)
    (found,) = seen
    found[0].pop("before", None)
    assert found == (form, param)


@V1
async def test_missing_schema_is_refused(client: httpx.AsyncClient, route: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True}}
    answer = await client.post(route, json=BODIES[route] | {"response_format": form})
    assert answer.status_code in (400, 422)
    assert "`json_schema` has no `schema`" in answer.json()["error"]["message"]


@ROUTES
async def test_adapter_id_selects_the_adapter(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    engine.load_names("one", "two")
    for fields in ({"adapter_id": "two"}, {"model": "one", "adapter_id": "one"}, {"model": "one"},
                   {"adapter_id": ""}, {"model": "tgi", "adapter_id": None}):  # fmt: skip
        await text_of(client, route, **fields)
    assert engine.used == ["two", "one", "one", "", ""]
    answer = await client.post(route, json=BODIES[route] | {"model": "one", "adapter_id": "two"})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["param"] == "adapter_id"


@ROUTES
@STREAM
async def test_include_stop_str_in_output_retains_the_stop_string(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
) -> None:
    asked = {"stop": " wor", "stream": stream}
    assert (await text_of(client, route, **asked))[0] == "hello"
    kept, found = await text_of(client, route, include_stop_str_in_output=True, **asked)
    assert kept == "hello wor"
    if route != RESPONSES:
        last = found[-1] if stream else found
        assert last["choices"][0]["finish_reason"] == "stop"


@V1
async def test_stop_string_in_the_last_token_is_the_finish_reason(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    """TGI says length on its own routes."""
    (ids,) = engine.reply_with("hello world")
    fields = {"stop": "ld", "include_stop_str_in_output": True, "max_tokens": len(ids) - 1}
    text, found = await text_of(client, route, **fields)
    assert (text, found["choices"][0]["finish_reason"]) == ("hello world", "stop")


@ROUTES
@STREAM
async def test_skip_special_tokens_false_shows_special_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
) -> None:
    special = engine.tokenizer.encode(tiny.BOS, False)[0]
    word = engine.tokenizer.encode("hello", False)
    engine.play([special, *word, END_ID])
    shown = tiny.BOS + "hello"
    assert (await text_of(client, route, stream=stream))[0] == "hello"
    found, _ = await text_of(client, route, stream=stream, skip_special_tokens=False)
    assert found == shown, "what ends the text is no part of it"
    more = {"skip_special_tokens": False, "include_stop_str_in_output": True, "stream": stream}
    assert (await text_of(client, route, **more))[0] == shown + tiny.EOS


@V1
async def test_add_special_tokens_controls_the_encoding(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    for value in (None, True, False):
        await text_of(client, route, add_special_tokens=value)
    plain, added, bare = (request.prompt_ids for request in engine.requests)
    assert len(added) == len(bare) + 1
    assert plain == (bare if route == CHAT else added)


@ROUTES
@pytest.mark.parametrize("name", ["truncate_prompt_tokens", "truncate"])
async def test_truncation_uses_the_last_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, name: str
) -> None:
    await text_of(client, route)
    await text_of(client, route, **{name: 2})
    whole, cut = (request.prompt_ids for request in engine.requests)
    assert cut == whole[-2:]


@V1
async def test_truncation_of_minus_one_leaves_space_for_the_answer(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    """As much as the length that is asked for allows."""
    long = "x y z " * 40
    body = {"prompt": long} if route == COMPLETIONS else {
        "messages": [{"role": "user", "content": long}]
    }  # fmt: skip
    answer = await client.post(route, json=body | {"max_tokens": 10})
    assert answer.status_code in (400, 422)
    for limit in ({}, {"max_tokens": 10}):
        asked = body | limit | {"truncate_prompt_tokens": -1}
        assert (await client.post(route, json=asked)).status_code == 200
    assert [len(request.prompt_ids) for request in engine.requests] == [63, 54]


async def test_truncated_ids_are_not_all_checked(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": [[5] * 500_000 + [6, 7]], "truncate": 3, "echo": True}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    assert engine.requests[0].prompt_ids == (5, 6, 7)
    shown = engine.tokenizer.decode([5, 6, 7], skip_special_tokens=False)
    assert answer.json()["choices"][0]["text"] == shown + "hello world"


@V1
@STREAM
async def test_return_token_ids_adds_them(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
) -> None:
    (ids,) = engine.reply_with("hello world")
    engine.step = 2
    _, found = await text_of(client, route, return_token_ids=True, stream=stream)
    parts = found if stream else [found]
    given: list[int] = []
    prompts: list[list[int]] = []
    for part in parts:
        choice = part["choices"][0]
        given += choice.get("token_ids", [])
        prompts += [each["prompt_token_ids"] for each in (part, choice)
                    if "prompt_token_ids" in each]  # fmt: skip
    assert given == ids
    assert prompts == [list(engine.requests[0].prompt_ids)]
    _, plain = await text_of(client, route, stream=stream)
    assert "token_ids" not in str(plain)


@V1
@STREAM
async def test_return_tokens_as_token_ids_replaces_texts(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
) -> None:
    (ids,) = engine.reply_with("hello world")
    report: dict[str, Any] = {"logprobs": 2}
    if route == CHAT:
        report = {"logprobs": True, "top_logprobs": 2}
    asked = report | {"return_tokens_as_token_ids": True, "stream": stream}
    text, found = await text_of(client, route, **asked)
    assert text == "hello world"
    reports = [part["choices"][0]["logprobs"] for part in (found if stream else [found])]
    tokens: list[str] = []
    for each in reports:
        if each and route == CHAT:
            tokens += [entry["token"] for entry in each["content"]]
            assert all(t["token"].startswith("token_id:")
                       for entry in each["content"] for t in entry["top_logprobs"])  # fmt: skip
        elif each:
            tokens += each["tokens"]
            assert all(key.startswith("token_id:") for top in each["top_logprobs"] for key in top)
    assert tokens == [f"token_id:{index}" for index in ids]


@V1
async def test_continuous_usage_is_in_every_chunk(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    (ids,) = engine.reply_with("hello world")
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = await text_of(client, route, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == len(ids)
    assert chunks[-1]["choices"] == []
    prompt = len(engine.requests[0].prompt_ids)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}


@V1
@pytest.mark.parametrize(("options", "counted"), [(None, None), ({"include_usage": False}, 0)])
async def test_usage_is_absent_unless_requested(
    client: httpx.AsyncClient, route: str, options: Any, counted: int | None
) -> None:
    """TGI's clients of completions expect it with the last chunk, unless it is switched off."""
    _, chunks = await text_of(client, route, stream=True, stream_options=options)
    expected = counted if counted is not None else int(route == COMPLETIONS)
    assert sum(chunk["usage"] is not None for chunk in chunks) == expected


@V1
async def test_top_n_tokens_reports_logprobs(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    _, found = await text_of(client, route, top_n_tokens=2)
    assert engine.requests[0].sampling.top_logprobs == 2
    report = found["choices"][0]["logprobs"]
    tops = report["top_logprobs"] if route == COMPLETIONS else [
        entry["top_logprobs"] for entry in report["content"]
    ]  # fmt: skip
    assert all(len(top) >= 2 for top in tops)


@V1
async def test_up_to_twenty_logprobs_are_reported(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    """``--max-top-n-tokens`` bounds TGI's routes alone."""
    fields = {"logprobs": 20} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    await text_of(client, route, **fields)
    assert engine.requests[0].sampling.top_logprobs == 20
    body = {"inputs": "x", "parameters": {"top_n_tokens": 6}}
    assert (await client.post("/generate", json=body)).status_code == 422


@STREAM
async def test_echo_prepends_the_last_message_of_a_chat(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    """As vLLM: the last message, where the answer goes on from it."""
    user = {"role": "user", "content": "hi"}
    begun = {"role": "assistant", "content": "well, "}
    asked: dict[str, Any] = {"echo": True, "stream": stream}
    assert (await text_of(client, CHAT, messages=[user, begun], **asked))[0] == "well, hello world"
    assert (await text_of(client, CHAT, messages=[user], **asked))[0] == "hello world"
    asked["add_generation_prompt"] = False
    assert (await text_of(client, CHAT, messages=[user], **asked))[0] == "hihello world"


async def test_client_of_huggingface_inference_is_served(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """@huggingface/inference spreads TGI's parameters over the body of a completion."""
    body = {
        **{"model": "tgi", "prompt": "the fox", "max_new_tokens": 3, "do_sample": False},
        **{"return_full_text": True, "details": False, "stop": ["."], "truncate": 2},
        **{"repetition_penalty": 1.1, "grammar": {"type": "regex", "value": "[a-z ]+"}},
    }
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert (request.max_new_tokens, request.sampling.greedy) == (3, True)
    assert len(request.prompt_ids) == 2
    assert request.grammar
    assert answer.json()["choices"][0]["text"].startswith(engine.tokenizer.decode(
        request.prompt_ids))  # fmt: skip


class TestResponses:
    @STREAM
    @pytest.mark.parametrize("step", [1, 3, 100])
    async def test_responses_report_logprobs(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool, step: int
    ) -> None:
        (ids,) = engine.reply_with("hello world")
        engine.step = step
        fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "stream": stream}
        _, found = await text_of(client, RESPONSES, **fields)
        whole = found[-1]["response"] if stream else found
        report = whole["output"][0]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in report) == "hello world"
        assert len(report) == len(ids) - 1, "the end is no part of the text"
        assert all(len(entry["top_logprobs"]) == 2 for entry in report)
        assert bytes(byte for entry in report for byte in entry["bytes"]) == b"hello world"
        if stream:
            kinds: dict[str, list[Any]] = {}
            for event in found:
                kinds.setdefault(event["type"], []).append(event)
            deltas = kinds["response.output_text.delta"]
            assert [entry for event in deltas for entry in event["logprobs"]] == report
            assert kinds["response.output_text.done"][0]["logprobs"] == report
            assert kinds["response.content_part.done"][0]["part"]["logprobs"] == report

    @pytest.mark.parametrize(
        ("fields", "count"),
        [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 1}, 4),
         ({"include": ["message.output_text.logprobs"]}, 4)],
    )  # fmt: skip
    async def test_logprobs_come_only_on_request(
        self, client: httpx.AsyncClient, fields: dict[str, Any], count: int
    ) -> None:
        _, found = await text_of(client, RESPONSES, **fields)
        assert len(found["output"][0]["content"][0]["logprobs"]) == count


ROOM: dict[str, tuple[dict[str, Any], str]] = {
    "/generate": ({"inputs": "a b", "parameters": {}}, "max_new_tokens"),
    "/generate_stream": ({"inputs": "a b", "parameters": {}}, "max_new_tokens"),
    "/": ({"inputs": "a b", "parameters": {}}, "max_new_tokens"),
    "/invocations": ({"inputs": "a b", "parameters": {}}, "max_new_tokens"),
    "/vertex": ({"instances": [{"inputs": "a b", "parameters": {}}]}, "max_new_tokens"),
    CHAT: (BODIES[CHAT], "max_completion_tokens"),
    COMPLETIONS: (BODIES[COMPLETIONS], "max_tokens"),
    RESPONSES: (BODIES[RESPONSES], "max_output_tokens"),
}


@pytest.mark.parametrize("asked", [1900, 10**6, (1 << 31) - 1])
@pytest.mark.parametrize("route", list(ROOM))
async def test_lengths_beyond_the_context_are_cut_to_it(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, route: str, asked: int
) -> None:
    """As TGI 3, with room for 1024 tokens: the text ends at the context's end, as ``length``."""
    engine.info = replace(engine.info, max_input_tokens=1499, max_total_tokens=1500)
    state.generator.take(engine.info)
    engine.play([5] * 2000)
    body, name = ROOM[route]
    body = msgspec.json.decode(msgspec.json.encode(body))
    holder = body["instances"][0] if "instances" in body else body
    holder.get("parameters", holder)[name] = asked
    if "parameters" in holder:
        holder["parameters"]["details"] = True
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert request.max_new_tokens == 1500 - len(request.prompt_ids)
    if route == RESPONSES:
        assert answer.json()["incomplete_details"] == {"reason": "max_output_tokens"}
    elif route != "/vertex":
        assert '"finish_reason":"length"' in answer.text.replace(" ", "")


class TestCost:
    """What a request costs before and while it is answered."""

    @pytest.mark.parametrize("prompt", [[[1]] * 30_000, ["a", None], [[1.5]] * 5])
    async def test_prompts_are_counted_before_they_are_decoded(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, prompt: list[Any]
    ) -> None:
        def ids(*_: Any) -> None:
            raise wrong_types("looked at")

        monkeypatch.setattr("tgi_cli.router.api.completions._ids", ids)
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert answer.status_code in (400, 422)
        expected = "looked at" if len(prompt) <= 4 else "maximum allowed batch size of 4"
        assert expected in answer.json()["error"]["message"]

    async def test_ids_beyond_the_context_are_refused_before_checking_them(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check_ids(*_: Any) -> None:
            raise AssertionError("looked at")

        monkeypatch.setattr("tgi_cli.router.api.completions.check_ids", check_ids)
        answer = await client.post(COMPLETIONS, json={"prompt": [5] * 100_000, "max_tokens": 1})
        assert answer.status_code in (400, 422)
        assert "100000" in answer.json()["error"]["message"]

    @STREAM
    async def test_long_prompt_reports_are_rendered_by_workers(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, stream: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        engine.info = replace(engine.info, max_input_tokens=2999, max_total_tokens=3000)
        state.generator.take(engine.info)
        loop, seen = threading.get_ident(), []
        push = Detokenizer.push

        def spied(self: Detokenizer, token_id: int) -> str:
            seen.append(threading.get_ident() == loop)
            return push(self, token_id)

        monkeypatch.setattr(Detokenizer, "push", spied)
        byte = next(
            i for i in range(engine.tokenizer.vocab_size)
            if engine.tokenizer.token_bytes(i) == b"\x97"
        )  # fmt: skip
        body = {"prompt": [[byte] * 2000] * 2, "echo": True, "logprobs": 2, "max_tokens": 0}
        answer = await client.post(COMPLETIONS, json=body | {"stream": stream})
        assert answer.status_code == 200
        assert seen.count(False) >= 4000
        parts = events(answer.text)[:-1] if stream else [answer.json()]
        choices = [choice for part in parts for choice in part["choices"]]
        for index in range(2):
            reports = [c["logprobs"] for c in choices if c["index"] == index]
            assert sum(len(report["tokens"]) for report in reports) == 2000
            tops = [top for report in reports for top in report["top_logprobs"]]
            assert tops[0] is None
            assert len(tops) == 2000

    @pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
    async def test_long_answer_reports_are_rendered_by_workers(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, route: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        engine.info = replace(engine.info, max_input_tokens=2999, max_total_tokens=3000)
        state.generator.take(engine.info)
        engine.play([5] * 500)
        runs: list[Any] = []
        run = state.workers.run

        async def spied(work: Any, *args: Any) -> Any:
            runs.append(work)
            return await run(work, *args)

        monkeypatch.setattr(state.workers, "run", spied)
        asked: dict[str, Any] = {"logprobs": 20}
        if route == CHAT:
            asked = {"logprobs": True, "top_logprobs": 20}
        _, found = await text_of(client, route, max_tokens=500, **asked)
        assert len(runs) == 1
        report = found["choices"][0]["logprobs"]
        assert len(report["content"] if route == CHAT else report["top_logprobs"]) == 500

    async def test_bad_words_are_tokenized_by_workers(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, seen = threading.get_ident(), []

        def encode(
            self: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True
        ) -> list[list[int]]:
            seen.append((len(texts), threading.get_ident() == loop))
            return batch(self, texts, add_special_tokens)

        batch = Tokenizer.encode_batch
        monkeypatch.setattr(Tokenizer, "encode_batch", encode)
        words = [f"w{place}" for place in range(200)]
        for route in (CHAT, COMPLETIONS):
            await text_of(client, route, bad_words=words)
        assert [inline for count, inline in seen if count > 3] == [False, False]
        assert len(engine.requests[0].sampling.bad_words) >= 200

    async def test_long_inputs_are_translated_by_workers(
        self, client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs: list[Any] = []
        run = state.workers.run

        async def spied(work: Any, *args: Any, **kwargs: Any) -> Any:
            runs.append(work)
            return await run(work, *args, **kwargs)

        monkeypatch.setattr(state.workers, "run", spied)
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        for count in (10, 1000):
            await client.post(RESPONSES, json={"input": [call] * count})
        assert runs.count(response_chat) == 1

    def test_consecutive_calls_are_one_message(self) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        request = ResponsesRequest(input="")
        (message,) = response_chat(request, [call] * 1000).request.messages
        assert len(message.tool_calls or ()) == 1000
