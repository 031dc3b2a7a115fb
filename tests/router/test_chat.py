"""/v1/chat/completions, as OpenAI's clients send and check it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.unit.text import tiny
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "messages": USER, **fields}


async def test_complete_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(ROUTE, json=body())
    assert answer.status_code == 200
    found = answer.json()
    assert found["id"].startswith("chatcmpl-")
    assert found["object"] == "chat.completion"
    assert found["model"] == "acme/tiny"
    assert found["system_fingerprint"].endswith("-native")
    assert isinstance(found["created"], int)
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt, completion = len(engine.requests[0].prompt_ids), len(engine.replies[0])
    assert found["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert "x-compute-time" in answer.headers


async def test_prompt_is_the_rendered_template(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    assert (await client.post(ROUTE, json=body(messages=messages))).status_code == 200
    text = engine.tokenizer.decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text == (
        f"{tiny.BOS}<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_last_message_of_the_assistant_is_continued(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure, "}]
    await client.post(ROUTE, json=body(messages=messages))
    text = engine.tokenizer.decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nSure, ")


@pytest.mark.parametrize("usage", [False, True])
async def test_stream_has_role_first_and_finish_reason_last(
    client: httpx.AsyncClient, engine: FakeEngine, usage: bool
) -> None:
    engine.reply_with("hi 🤗!")
    options = {"include_usage": True} if usage else None
    answer = await client.post(ROUTE, json=body(stream=True, stream_options=options))
    assert answer.headers["content-type"] == "text/event-stream"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(engine.replies[0])
        assert last["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "hi 🤗!"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(choice["logprobs"] is None for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["n(pa", ["nothing", "n(pa"]])
async def test_stop_strings_are_cut_off(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, stop: Any
) -> None:
    engine.reply_with("read_json(path): return")
    answer = await client.post(ROUTE, json=body(stop=stop, stream=stream))
    if stream:
        *chunks, _ = events(answer.text)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("read_jso", "stop")
    assert engine.cancelled == [1]


async def test_length_limit_is_the_finish_reason(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 9}):
        found = (await client.post(ROUTE, json=body(**limit))).json()
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_reported(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    (ids,) = engine.reply_with("a🤗")
    answer = await client.post(ROUTE, json=body(logprobs=True, top_logprobs=2, stream=stream))
    if stream:
        *chunks, _ = events(answer.text)
        content = [
            entry
            for chunk in chunks
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
    else:
        content = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(ids)
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == "a🤗"
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["token"] == "a"
    assert content[0]["logprob"] == -0.1


@pytest.mark.tgi_pain(5)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"greedy": False, "temperature": 1.0, "top_p": 1.0}),
        ({"temperature": 0}, {"greedy": True}),
        ({"temperature": 0.3, "top_p": 1}, {"temperature": 0.3, "top_p": 1.0}),
        ({"frequency_penalty": 0.5, "presence_penalty": -1}, {
            "frequency_penalty": 0.5, "presence_penalty": -1.0, "repetition_penalty": 1.0}),
        ({"seed": -1}, {"seed": (1 << 64) - 1}),
        ({"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1}, {
            "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1}),
        ({"stop": None, "stream_options": None, "logit_bias": {}, "n": 1, "tools": [],
          "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me",
          "logprobs": None, "top_logprobs": None, "metadata": {}}, {"greedy": False}),
        ({"logit_bias": None, "response_format": None, "tool_choice": None, "tools": None,
          "temperature": None, "stream": None, "stop": []}, {"greedy": False}),
    ],
)  # fmt: skip
async def test_parameters_of_clients_are_accepted(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict, expected: dict
) -> None:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 200, answer.text
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


async def test_other_model_names_are_echoed(client: httpx.AsyncClient) -> None:
    assert (await client.post(ROUTE, json=body(model="gpt-9"))).json()["model"] == "gpt-9"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"logit_bias": {"400": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 500: 1}}, "logit_bias"),
        ({"logit_bias": [1.0]}, "logit_bias[0]"),
        ({"bad_words": ["a", " "]}, "bad_words"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 64}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]}, "messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_parameter(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict, param: str, stream: bool
) -> None:
    answer = await client.post(ROUTE, json=body(stream=stream, **fields))
    assert answer.status_code == 400
    found = answer.json()
    assert found["error_type"] == "validation"
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == "invalid_request_error"
    assert found["error"]["param"] == param
    assert not found["error"]["message"].startswith("Input validation error: "), "TGI's prefix"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            None,
            "the model has no chat template (it may be a base model): use /v1/completions, or "
            "start the server with --chat-template",
        ),
        ("{{ raise_exception('no such role') }}", "no such role"),
    ],
)
async def test_template_errors(
    engine: FakeEngine, config: RouterConfig, tmp_path: Any, template: str | None, words: str
) -> None:
    text = TextBundle.load(tiny.write_model(tmp_path, template))
    transport = httpx.ASGITransport(create_app(engine, text, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answer = await client.post(ROUTE, json=body())
        native = await client.post("/chat_tokenize", json=body())
    assert answer.status_code == 400
    assert answer.json()["error_type"] == "template_error"
    assert answer.json()["error"]["message"] == f"Template error: {words}"
    tgis = words if template else "template not found"
    assert native.json() == {"error": f"Template error: {tgis}", "error_type": "template_error"}
