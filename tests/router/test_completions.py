"""/v1/completions, as OpenAI's clients send and check it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.router.state import RouterState

ROUTE = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "prompt": "the fox", **fields}


async def test_complete_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post(ROUTE, json=body())
    found = answer.json()
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}
    ]
    assert found["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    assert found["usage"]["completion_tokens"] == len(engine.replies[0])
    assert answer.headers["x-compute-characters"] == "7"


async def test_several_prompts_answer_in_order(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    replies = engine.reply_with("one two three four", "a", "hello world")
    answer = await client.post(ROUTE, json=body(prompt=["x", "yy", "zzz"]))
    found = answer.json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == ["one two three four", "a", "hello world"]
    assert found["usage"]["completion_tokens"] == sum(map(len, replies))
    assert "x-compute-time" not in answer.headers
    assert answer.headers["x-compute-characters"] == "6"


@pytest.mark.parametrize("usage", [None, False, True])
async def test_several_prompts_can_be_streamed(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, usage: bool | None
) -> None:
    """Without a word of it the last chunk of a choice counts tokens, as TGI's does."""
    engine.reply_with("one two three four", "hi 🤗")
    fields = body(prompt=["x", "y"], stream=True, stream_options={"include_usage": usage})
    *chunks, done = events((await client.post(ROUTE, json=fields)).text)
    assert done == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] > 0
    texts = ["", ""]
    reasons: list[list[str | None]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
        ends = choice["finish_reason"] is not None
        assert (chunk["usage"] is not None) == (ends and usage is None)
    assert texts == ["one two three four", "hi 🤗"]
    assert all(found[-1] == "stop" and set(found[:-1]) == {None} for found in reasons)
    assert state.admission.in_flight == 0


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_prompts_can_be_token_ids(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any
) -> None:
    assert (await client.post(ROUTE, json=body(prompt=prompt))).status_code == 200
    assert engine.requests[0].prompt_ids == (5, 6, 7)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_prepends_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    ids = engine.tokenizer.encode("the fox ", False)
    for prompt in ("the fox ", ids):
        answer = await client.post(ROUTE, json=body(prompt=prompt, echo=True, stream=stream))
        if stream:
            *chunks, _ = events(answer.text)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == "the fox hello world"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 2])
async def test_logprobs_are_reported(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, count: int
) -> None:
    (ids,) = engine.reply_with("hello world")
    answer = await client.post(ROUTE, json=body(logprobs=count, stream=stream))
    if stream:
        *chunks, _ = events(answer.text)
        found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    else:
        found = [answer.json()["choices"][0]["logprobs"]]
    tokens = [token for part in found for token in part["tokens"]]
    offsets = [offset for part in found for offset in part["text_offset"]]
    assert len(tokens) == len(ids)
    for token, offset in zip(tokens[:-1], offsets, strict=False):
        assert "hello world"[offset:].startswith(token)
    assert all(value == -0.1 for part in found for value in part["token_logprobs"])
    if count:
        assert all(len(top) >= count for part in found for top in part["top_logprobs"])
    else:
        tops = [top for part in found for top in part["top_logprobs"]]
        assert tops == [{token: -0.1} for token in tokens]


async def test_stop_strings_and_length_end_the_text(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    found = (await client.post(ROUTE, json=body(stop=" wor"))).json()["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("hello", "stop")
    found = (await client.post(ROUTE, json=body(max_tokens=1))).json()["choices"][0]
    assert found["finish_reason"] == "length"


async def test_ignore_eos_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(ROUTE, json=body(ignore_eos=True))
    assert engine.requests[0].ignore_eos


@pytest.mark.parametrize(
    ("fields", "error_type", "words"),
    [
        ({"prompt": ""}, "validation", "cannot be empty"),
        ({"prompt": []}, "validation", "cannot be empty"),
        ({"prompt": [[]]}, "validation", "cannot be empty"),
        ({"prompt": ["a", ""]}, "validation", "cannot be empty"),
        ({"prompt": ["a"] * 5}, "batch size exceeded", "of 4, which the server's --max-client"),
        ({"stop": ["a"] * 5}, "validation", "up to 4 stop sequences, as the server's --max-stop"),
        ({"prompt": [400]}, "validation", "token ids"),
        ({"prompt": [-1]}, "validation", "token ids"),
        ({"prompt": [1.5]}, "validation", "`prompt` must be"),
        ({"prompt": [True]}, "validation", "`prompt` must be"),
        ({"suffix": "x"}, "validation", "no tokens for filling in the middle"),
        ({"best_of": 2, "n": 3}, "validation", "`best_of` must be >= `n`"),
        ({"best_of": 2, "stream": True}, "validation", "`best_of` > `n` is not supported when"),
        ({"prompt": ["a"] * 4, "n": 33}, "validation", "132 sequences in one request"),
        ({"n": 0}, "validation", "`n` must be"),
        ({"max_tokens": 0}, "validation", "`max_tokens` must be"),
        ({"logprobs": 21}, "validation", "`logprobs` must be"),
    ],
)
async def test_invalid_requests_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict, error_type: str, words: str
) -> None:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 400
    assert answer.json()["error_type"] == error_type
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.tgi_pain(5)
async def test_optional_fields_may_be_null(client: httpx.AsyncClient) -> None:
    names = ("suffix", "max_tokens", "temperature", "top_p", "n", "stream", "logprobs", "echo",
             "stop", "presence_penalty", "frequency_penalty", "best_of", "logit_bias", "user",
             "seed", "stream_options")  # fmt: skip
    answer = await client.post(ROUTE, json=body(**dict.fromkeys(names)))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failure_fails_the_request_and_frees_all(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, stream: bool
) -> None:
    engine.failure, engine.fail_after = "out of blocks", 2
    answer = await client.post(ROUTE, json=body(prompt=["x", "y"], stream=stream))
    if stream:
        *_, error, done = events(answer.text)
        assert done == "[DONE]"
    else:
        assert answer.status_code == 500
        error = answer.json()
    assert error["error"]["message"] == "Request failed during generation: out of blocks"
    assert state.admission.in_flight == 0
    assert not state.generator.live
