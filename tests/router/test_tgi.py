"""TGI's own routes, field by field."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import httpx
import pytest

from tests.router.fakes import END_ID, FakeEngine
from tests.router.sse import events
from tests.unit.text import tiny
from tgi_cli.router.generation.validation import fit_length
from tgi_cli.router.http.errors import ApiError
from tgi_cli.router.state import RouterState

HEADERS_WHOLE = {
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-prompt-tokens",
    "x-generated-tokens",
}


async def test_generate_answers_the_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/generate", json={"inputs": "the fox"})
    assert answer.status_code == 200
    assert answer.json() == {"generated_text": "hello world"}


async def test_generate_has_timing_headers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await client.post("/generate", json={"inputs": "the fox"})
    assert set(answer.headers) >= HEADERS_WHOLE
    for name in HEADERS_WHOLE - {"x-compute-type", "x-compute-time"}:
        assert answer.headers[name].isdigit(), name
    assert 0 < float(answer.headers["x-compute-time"]) < 60
    assert answer.headers["x-compute-characters"] == "7"
    assert answer.headers["x-prompt-tokens"] == str(len(engine.requests[0].prompt_ids))
    assert answer.headers["x-generated-tokens"] == str(len(engine.replies[0]))
    assert answer.headers["x-queue-time"] == "2"


async def test_details_describe_the_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    (ids,) = engine.reply_with("hi 🤗")
    parameters = {"details": True, "do_sample": True, "seed": 7}
    answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
    details = answer.json()["details"]
    assert answer.json()["generated_text"] == "hi 🤗"
    assert set(details) == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == len(ids)
    assert details["seed"] == 7
    assert details["prefill"] == []
    assert [token["id"] for token in details["tokens"]] == ids
    assert "".join(token["text"] for token in details["tokens"]) == "hi 🤗" + tiny.EOS
    assert [token["special"] for token in details["tokens"]] == [False] * (len(ids) - 1) + [True]
    assert details["tokens"][0]["logprob"] == -0.1


async def test_top_n_tokens_are_in_the_details(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    parameters = {"details": True, "top_n_tokens": 3}
    answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
    details = answer.json()["details"]
    assert len(details["top_tokens"]) == len(details["tokens"])
    assert all(len(top) == 3 for top in details["top_tokens"])
    assert set(details["top_tokens"][0][0]) == {"id", "text", "logprob", "special"}
    assert engine.requests[0].sampling.top_logprobs == 3


@pytest.mark.parametrize(
    ("body", "greedy", "temperature"),
    [
        ({}, False, 1.0),
        ({"parameters": {}}, True, 0.0),
        ({"parameters": {"do_sample": True}}, False, 1.0),
        ({"parameters": {"temperature": 1.0}}, True, 0.0),
        ({"parameters": {"temperature": 0.5}}, False, 0.5),
        ({"parameters": {"top_k": 5}}, False, 1.0),
        ({"parameters": {"top_p": 0.9}}, False, 1.0),
        ({"parameters": {"typical_p": 0.9}}, False, 1.0),
        ({"parameters": {"repetition_penalty": 1.3}}, True, 0.0),
        ({"parameters": {"temperature": None, "top_p": None, "seed": None}}, True, 0.0),
    ],
)
async def test_samples_when_tgi_does(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict, greedy: bool, temperature: float
) -> None:
    body.setdefault("parameters", None)
    if body["parameters"] is None:
        del body["parameters"]
    assert (await client.post("/generate", json={"inputs": "x", **body})).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.greedy, sampling.temperature) == (greedy, temperature)


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parameters = {
        "temperature": 0.7,
        "top_k": 11,
        "top_p": 0.8,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "seed": (1 << 64) - 1,
        "max_new_tokens": 5,
        "best_of": 1,
        "frequency_penalty": 0.0,
        "watermark": False,
        "grammar": None,
        "unknown": {"ignored": True},
    }
    answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert answer.status_code == 200
    request = engine.requests[0]
    assert request.sampling.temperature == 0.7
    assert request.sampling.top_k == 11
    assert request.sampling.top_p == 0.8
    assert request.sampling.typical_p == 0.9
    assert request.sampling.repetition_penalty == 1.2
    assert request.sampling.seed == (1 << 64) - 1
    assert request.max_new_tokens == 5
    assert request.stop_token_ids == {END_ID}


async def test_seeds_are_used_and_reported(client: httpx.AsyncClient) -> None:
    """Drawn and reported when sampling, absent when greedy."""
    sampled = {"inputs": "x", "parameters": {"do_sample": True, "details": True}}
    seeds = {
        (await client.post("/generate", json=sampled)).json()["details"]["seed"] for _ in range(8)
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    greedy = {"inputs": "x", "parameters": {"details": True, "seed": 3}}
    assert (await client.post("/generate", json=greedy)).json()["details"]["seed"] is None


async def test_max_new_tokens_fills_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post("/generate", json={"inputs": "the fox"})
    request = engine.requests[0]
    assert len(request.prompt_ids) + request.max_new_tokens == engine.info.max_total_tokens


async def test_truncate_keeps_the_end(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = "the quick brown fox jumps"
    await client.post("/generate", json={"inputs": text, "parameters": {"truncate": 2}})
    assert list(engine.requests[0].prompt_ids) == engine.tokenizer.encode(text)[-2:]


async def test_length_limit_is_the_finish_reason(client: httpx.AsyncClient) -> None:
    parameters = {"max_new_tokens": 2, "details": True}
    answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert answer.json()["details"]["finish_reason"] == "length"
    assert answer.json()["details"]["generated_tokens"] == 2


async def test_return_full_text_prepends_the_prompt(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Say: ", "parameters": {"return_full_text": True}}
    assert (await client.post("/generate", json=body)).json() == {
        "generated_text": "Say: hello world"
    }


@pytest.mark.parametrize("step", [1, 3])
async def test_stop_string_remains_in_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, step: int
) -> None:
    """The stop string spans tokens; nothing follows it, and the sequence is cancelled."""
    engine.reply_with("read_json(path): return")
    engine.step = step
    parameters = {"stop": ["n(pa"], "details": True}
    answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert answer.json()["generated_text"] == "read_json(pa"
    details = answer.json()["details"]
    assert details["finish_reason"] == "stop_sequence"
    assert len(details["tokens"]) == details["generated_tokens"]
    assert engine.cancelled == [1]


async def test_stop_string_in_the_last_token_is_reported_as_length(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    (ids,) = engine.reply_with("hello world")
    count = len(ids) - 1
    parameters = {"stop": ["world"], "max_new_tokens": count, "details": True}
    answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert answer.json()["generated_text"] == "hello world"
    assert answer.json()["details"]["finish_reason"] == "length"


async def test_incomplete_character_becomes_a_replacement_character(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.play(engine.tokenizer.encode("a🤗", False)[:-1])
    answer = await client.post("/generate", json={"inputs": "x"})
    assert answer.json()["generated_text"] == "a\ufffd"


@pytest.mark.parametrize("step", [1, 4])
async def test_stream_has_one_event_per_token(
    client: httpx.AsyncClient, engine: FakeEngine, step: int
) -> None:
    (ids,) = engine.reply_with("hi 🤗!")
    engine.step = step
    answer = await client.post("/generate_stream", json={"inputs": "ab"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-compute-characters"] == "2"
    assert "x-compute-type" in answer.headers
    found = events(answer.text)
    assert [event["index"] for event in found] == list(range(1, len(ids) + 1))
    assert [event["token"]["id"] for event in found] == ids
    assert all(set(event) == {"index", "token", "generated_text", "details"} for event in found)
    assert [event["generated_text"] for event in found] == [None] * (len(ids) - 1) + ["hi 🤗!"]
    assert "".join(event["token"]["text"] for event in found) == "hi 🤗!" + tiny.EOS
    assert found[-1]["token"] == {"id": 1, "text": tiny.EOS, "logprob": -0.1, "special": True}
    assert found[-1]["details"] is None


async def test_stream_ends_with_details(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parameters = {"details": True, "do_sample": True, "seed": 5, "top_n_tokens": 2}
    body = {"inputs": "ab", "parameters": parameters}
    found = events((await client.post("/generate_stream", json=body)).text)
    assert found[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": len(found),
        "seed": 5,
        "input_length": len(engine.requests[0].prompt_ids),
    }
    assert all(event["details"] is None for event in found[:-1])
    assert all(len(event["top_tokens"]) == 2 for event in found)


async def test_stream_ends_at_a_stop_string_with_the_full_text(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with("one two three")
    parameters = {"stop": ["tw"], "return_full_text": True}
    body = {"inputs": "Count: ", "parameters": parameters}
    found = events((await client.post("/generate_stream", json=body)).text)
    assert found[-1]["generated_text"] == "Count: one tw"


async def test_compat_answers_an_array_with_the_prompt(client: httpx.AsyncClient) -> None:
    answer = await client.post("/", json={"inputs": "Say: "})
    assert answer.json() == [{"generated_text": "Say: hello world"}]
    assert set(answer.headers) >= HEADERS_WHOLE
    body = {"inputs": "Say: ", "parameters": {"return_full_text": False}}
    assert (await client.post("/", json=body)).json() == [{"generated_text": "hello world"}]


async def test_compat_streams(client: httpx.AsyncClient) -> None:
    found = events((await client.post("/", json={"inputs": "Say: ", "stream": True})).text)
    assert found[-1]["generated_text"] == "Say: hello world"


async def test_sequences_leave_the_limit_when_they_end(
    client: httpx.AsyncClient, state: RouterState
) -> None:
    await client.post("/generate", json={"inputs": "x"})
    await client.post("/generate_stream", json={"inputs": "x"})
    assert state.admission.in_flight == 0
    assert not state.generator.live


async def test_long_prompts_are_tokenized_off_the_loop(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    text = "the quick brown fox " * 300
    body = {"inputs": text, "parameters": {"truncate": 8}}
    assert (await client.post("/generate", json=body)).status_code == 200
    assert list(engine.requests[0].prompt_ids) == engine.tokenizer.encode(text)[-8:]


def test_max_new_tokens_beyond_the_context_is_cut_as_in_tgi(engine: FakeEngine) -> None:
    """TGI validates 1024 new tokens at most; with room for them, more ends at the context."""
    info = replace(engine.info, max_total_tokens=4096, max_input_tokens=4095)
    assert fit_length(96, 100_000, info) == 4000
    assert fit_length(96, 4000, info) == 4000
    assert fit_length(96, None, info) == 4000
    with pytest.raises(ApiError, match="4000 `inputs` tokens and 100000 `max_new_tokens`"):
        fit_length(4000, 100_000, info)


@pytest.mark.parametrize("step", [1, 3, 50])
async def test_full_text_in_each_event(
    client: httpx.AsyncClient, engine: FakeEngine, step: int
) -> None:
    (ids,) = engine.reply_with("hi 🤗 there")
    engine.step = step
    body = {"inputs": "ab", "parameters": {"full_text": True, "details": True}}
    found = events((await client.post("/generate_stream", json=body)).text)
    texts = [event["token"]["text"] for event in found]
    assert [event["token"]["id"] for event in found] == ids
    assert texts[0] == "h"
    assert texts[-1] == "hi 🤗 there" == found[-1]["generated_text"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert all(event["generated_text"] is None for event in found[:-1])


async def test_full_text_ends_where_the_stop_string_does(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with("one two three")
    parameters = {"full_text": True, "stop": ["tw"], "return_full_text": True}
    body = {"inputs": "Count: ", "stream": True, "parameters": parameters}
    found = events((await client.post("/", json=body)).text)
    assert found[-1]["token"]["text"] == "one tw"
    assert found[-1]["generated_text"] == "Count: one tw"


async def test_markdown_image_in_the_prompt_is_text(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """To a model of text a prompt is text, whatever it is about."""
    text = "Explain ![](x.png)"
    assert (await client.post("/generate", json={"inputs": text})).status_code == 200
    assert list(engine.requests[0].prompt_ids) == engine.tokenizer.encode(text)
