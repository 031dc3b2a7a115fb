"""Speculative decoding as clients see it: predictions, usage, logs, and streams token by token."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.router.state import RouterState
from tgi_cli.text.workers import INLINE_CHARACTERS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "the fox"},
}
ROUTES = pytest.mark.parametrize("route", list(BODIES))
STREAM = pytest.mark.parametrize("stream", [False, True])
TEXT = "the quick brown fox jumps over the lazy dog"


def prediction(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


class TestPrediction:
    @ROUTES
    @pytest.mark.parametrize(
        "content",
        [TEXT, [{"type": "text", "text": TEXT[:12]}, {"type": "text", "text": TEXT[12:]}]],
    )
    async def test_reaches_the_engine_as_tokens(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, content: Any
    ) -> None:
        answer = await client.post(route, json=BODIES[route] | prediction(content))
        assert answer.status_code == 200
        (request,) = engine.requests
        assert request.prediction == tuple(engine.tokenizer.encode(TEXT, False))

    async def test_is_optional(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for fields in ({}, {"prediction": None}, prediction(""), prediction([])):
            assert (await client.post(CHAT, json=BODIES[CHAT] | fields)).status_code == 200
        assert {request.prediction for request in engine.requests} == {()}

    async def test_is_shared_by_all_samples_beside_everything_else(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """OpenAI refuses several samples, log-probabilities, penalties and lengths with it."""
        fields = {
            "n": 3,
            "seed": 1,
            "logprobs": True,
            "top_logprobs": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "max_completion_tokens": 9,
        }
        answer = await client.post(CHAT, json=BODIES[CHAT] | fields | prediction(TEXT))
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 3
        expected = tuple(engine.tokenizer.encode(TEXT, False))
        assert [request.prediction for request in engine.requests] == [expected] * 3

    async def test_is_cut_to_what_an_answer_may_have(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        text = "quick brown fox " * 100
        await client.post(CHAT, json=BODIES[CHAT] | prediction(text))
        (request,) = engine.requests
        expected = engine.tokenizer.encode(text, False)[: engine.info.max_total_tokens]
        assert len(expected) == engine.info.max_total_tokens
        assert request.prediction == tuple(expected)

    async def test_has_no_tokens_beyond_the_vocabulary(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        ids = engine.tokenizer.encode(TEXT, False)
        engine.restart(vocab_size=max(ids))
        state.generator.take(engine.info)
        await client.post(CHAT, json=BODIES[CHAT] | prediction(TEXT))
        (request,) = engine.requests
        assert request.prediction == tuple(i for i in ids if i < max(ids))
        assert len(request.prediction) < len(ids)

    async def test_a_long_one_is_tokenized_off_the_event_loop(
        self,
        client: httpx.AsyncClient,
        state: RouterState,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        workers, ran = state.workers, []
        run = workers.run

        async def recorded(work: Any, *args: Any, **kwargs: Any) -> Any:
            ran.append(args)
            return await run(work, *args, **kwargs)

        monkeypatch.setattr(workers, "run", recorded)
        await client.post(CHAT, json=BODIES[CHAT] | prediction("a b" * 10))
        assert not ran
        text = "fox " * INLINE_CHARACTERS
        await client.post(CHAT, json=BODIES[CHAT] | prediction(text))
        assert ran

    @ROUTES
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"type": "document", "content": "x"}, "`prediction.type` must be `content`"),
            ({"type": "content", "content": [{"type": "image_url"}]}, "type `image_url`"),
            ({"type": "content", "content": [{"type": "text"}]}, "type `text`"),
            ({"type": "content"}, "content"),
            ({"type": "content", "content": 3}, "content"),
            ("text", "prediction"),
        ],
    )
    async def test_an_invalid_one_is_refused(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        route: str,
        given: Any,
        words: str,
    ) -> None:
        answer = await client.post(route, json=BODIES[route] | {"prediction": given})
        assert answer.status_code in (400, 422)
        assert words in answer.json()["error"]["message"]
        assert engine.requests == []

    async def test_a_restarted_engine_with_less_memory_gets_less_of_it(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        encode = state.workers.encode

        async def restarting(text: str, *args: Any, **kwargs: Any) -> list[int]:
            ids = await encode(text, *args, **kwargs)
            if text.startswith(TEXT):
                engine.restart(max_total_tokens=32, max_input_tokens=31)
                state.generator.take(engine.info)
            return ids

        monkeypatch.setattr(state.workers, "encode", restarting)
        body = {"prompt": "hi", "max_tokens": 3} | prediction(TEXT * 4)
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        (request,) = engine.requests
        assert len(request.prediction) == 32


class TestUsage:
    @ROUTES
    @STREAM
    async def test_counts_what_of_the_prediction_was_right(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
    ) -> None:
        engine.play([11, 12, 13, 14, 15, 16])
        engine.step, engine.drafted = 3, 4
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        body = BODIES[route] | options | {"max_tokens": 6}
        for fields, expected in ((prediction(TEXT), (4, 4)), ({}, (0, 0))):
            answer = await client.post(route, json=body | fields)
            usage = (events(answer.text)[-2] if stream else answer.json())["usage"]
            details = usage["completion_tokens_details"]
            accepted, rejected = expected
            assert details["accepted_prediction_tokens"] == accepted
            assert details["rejected_prediction_tokens"] == rejected
            assert usage["completion_tokens"] == 6, "rejected tokens are no part of the answer"

    async def test_adds_up_over_samples(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.play([11, 12, 13, 14])
        engine.step, engine.drafted = 4, 5
        body = BODIES[CHAT] | {"n": 3, "seed": 1, "max_tokens": 4} | prediction(TEXT)
        details = (await client.post(CHAT, json=body)).json()["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 9
        assert details["rejected_prediction_tokens"] == 6

    @pytest.mark.parametrize("step", [2, 4, 100])
    async def test_leaves_out_what_is_behind_a_stop_string(
        self, client: httpx.AsyncClient, engine: FakeEngine, step: int
    ) -> None:
        (ids,) = engine.reply_with("one two STOP three four five six")
        engine.step, engine.drafted = step, step
        body = BODIES[CHAT] | {"stop": "STOP"} | prediction(TEXT)
        usage = (await client.post(CHAT, json=body)).json()["usage"]
        details = usage["completion_tokens_details"]
        whole, rest = divmod(usage["completion_tokens"], step)
        last = min(rest, min(step, len(ids) - whole * step) - 1)
        assert details["accepted_prediction_tokens"] == whole * (step - 1) + last

    async def test_has_llamacpps_timings_where_drafts_were_verified(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.play([11, 12, 13, 14])
        body = BODIES[CHAT] | {"timings_per_token": True, "max_tokens": 4}
        assert "draft_n" not in (await client.post(CHAT, json=body)).json()["timings"]
        engine.step, engine.drafted = 2, 3
        timings = (await client.post(CHAT, json=body)).json()["timings"]
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (6, 2)


class TestStreams:
    """A step that gives several tokens is streamed as as many steps that give one."""

    @pytest.mark.parametrize(
        ("route", "fields"),
        [
            (CHAT, {}),
            (CHAT, {"logprobs": True, "top_logprobs": 2}),
            (CHAT, {"n": 2, "seed": 1}),
            (CHAT, {"stop": ["brown"]}),
            (CHAT, {"stop": ["wn f"], "include_stop_str_in_output": True}),
            (CHAT, {"return_token_ids": True}),
            (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
            (COMPLETIONS, {}),
            (COMPLETIONS, {"logprobs": 2}),
            (COMPLETIONS, {"max_tokens": 5}),
            (COMPLETIONS, {"echo": True, "logprobs": 0}),
            ("/generate_stream", {}),
            ("/generate_stream", {"parameters": {"top_n_tokens": 2, "stop": ["jumps"]}}),
            ("/generate_stream", {"parameters": {"details": True, "max_new_tokens": 4}}),
            ("/v1/responses", {}),
            ("/v1/messages", {"max_tokens": 40}),
        ],
    )
    @pytest.mark.parametrize("step", [2, 3, 100])
    async def test_have_the_events_of_single_tokens(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        route: str,
        fields: dict[str, Any],
        step: int,
    ) -> None:
        engine.reply_with(TEXT)
        body = {
            CHAT: {"messages": USER, "stream": True},
            COMPLETIONS: {"prompt": "hi", "stream": True},
            "/generate_stream": {"inputs": "hi"},
            "/v1/responses": {"input": "hi", "stream": True},
            "/v1/messages": {"model": "tgi", "messages": USER, "stream": True},
        }[route] | fields
        found = []
        for engine.step, engine.drafted in ((1, 0), (step, step - 1)):
            answer = await client.post(route, json=body)
            assert answer.status_code == 200, answer.text
            found.append([_timeless(event) for event in events(answer.text)])
        one, several = found
        if fields.get("n") == 2:  # the order between samples is that of their arrival
            one, several = (sorted(each, key=json.dumps) for each in found)
        assert several == one

    async def test_a_reader_that_was_busy_gets_one_event_for_several_steps(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with(TEXT)
        body = BODIES[CHAT] | {"stream": True}
        engine.step = 3
        together = events((await client.post(CHAT, json=body)).text)
        engine.drafted = 2
        single = events((await client.post(CHAT, json=body)).text)
        assert len(single) > len(together)


def _timeless(event: Any) -> Any:
    """An event without the ids and times that differ between requests."""
    if isinstance(event, dict):
        return {
            key: _timeless(value)
            for key, value in event.items()
            if key not in ("id", "item_id", "created", "created_at", "completed_at", "timings")
        }
    return [_timeless(each) for each in event] if isinstance(event, list) else event


async def test_drafts_are_logged(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tgi_cli.router.observability.access_log")
    engine.play([11, 12, 13, 14])
    body = BODIES[CHAT] | {"max_tokens": 4}
    await client.post(CHAT, json=body)
    engine.step, engine.drafted = 2, 3
    await client.post(CHAT, json=body)
    without, drafted = caplog.records
    assert not hasattr(without, "drafted_tokens")
    assert (drafted.drafted_tokens, drafted.accepted_tokens) == (6, 2)  # type: ignore[attr-defined]
    assert drafted.drafts == {"context": [6, 2]}  # type: ignore[attr-defined]


async def test_the_time_of_a_step_is_shared_among_its_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
) -> None:
    engine.play([11, 12, 13, 14, 15, 16])
    engine.step, engine.drafted, engine.pause = 3, 2, 0.01
    await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 6})
    text = (await client.get("/metrics")).text
    (count,) = [
        line.split()[1]
        for line in text.splitlines()
        if line.startswith("tgi_request_inter_token_seconds_count")
    ]
    assert count == "5"
