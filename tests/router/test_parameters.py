"""Parameters reach the engine: timeouts, priorities, log-probabilities of prompts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.router.fakes import END_ID, FakeEngine
from tests.router.sse import events
from tests.unit.text import tiny
from tgi_cli.router.state import RouterState

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "the fox"}
V1 = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
ALL = [*V1, ("/generate", {"inputs": "hi"})]


@pytest.mark.parametrize(("route", "body"), V1)
class TestV1:
    async def test_logit_bias_reaches_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        answer = await client.post(route, json=body | {"logit_bias": {"5": -100, "399": 1.5}})
        assert answer.status_code == 200
        assert engine.requests[0].sampling.logit_bias == ((5, -100.0), (399, 1.5))

    async def test_logit_bias_as_llama_cpp_sends_it(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        pairs = [[5, -1.5], [399, False], [5, 2]]
        answer = await client.post(route, json=body | {"logit_bias": pairs})
        assert answer.status_code == 200
        assert engine.requests[0].sampling.logit_bias == ((5, 2.0), (399, -100.0))
        for wrong in ([[5, True]], [[5]], [5, 1], [["the", 1]], [[400, 1]]):
            answer = await client.post(route, json=body | {"logit_bias": wrong})
            assert answer.status_code == 400, wrong
            assert answer.json()["error"]["param"].startswith("logit_bias"), wrong

    async def test_bad_words_reach_the_engine_as_token_ids(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        await client.post(route, json=body | {"bad_words": ["fox", " fox", "dog"]})
        words = engine.requests[0].sampling.bad_words
        encode = engine.tokenizer.encode
        expected = {tuple(encode(word, False)) for word in ("fox", " fox", "dog", " dog")}
        assert set(words) == expected
        assert len(words) == len(expected)

    async def test_stop_token_ids_end_the_text(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        """They end the text, are no part of it, and work when the end tokens are ignored."""
        space = engine.tokenizer.encode(" world", False)[0]
        head = engine.tokenizer.encode("hello", False)
        engine.play([*head, space])
        answer = await client.post(route, json=body | {"stop_token_ids": [space]})
        choice = answer.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("hello", "stop")
        assert engine.requests[0].stop_token_ids == {space, END_ID}
        await client.post(route, json=body | {"stop_token_ids": [space], "ignore_eos": True})
        assert engine.requests[1].stop_token_ids == {space}
        assert not engine.requests[1].ignore_eos
        await client.post(route, json=body | {"ignore_eos": True})
        assert engine.requests[2].ignore_eos

    @pytest.mark.parametrize("stream", [False, True])
    async def test_min_tokens_reaches_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict, stream: bool
    ) -> None:
        """Stop strings, too, wait for so many tokens."""
        (ids,) = engine.reply_with("a b a b a b")
        asked = body | {"stop": "b", "min_tokens": 4, "stream": stream}
        answer = await client.post(route, json=asked)
        assert engine.requests[0].sampling.min_new_tokens == 4
        if stream:
            *chunks, _ = events(answer.text)
            choices = [chunk["choices"][0] for chunk in chunks]
            pieces = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
            text = "".join(pieces)
        else:
            choice = answer.json()["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
        forced = engine.tokenizer.decode(ids[:4])
        rest = engine.tokenizer.decode(ids[4:])
        assert text == forced + rest.partition("b")[0]

    async def test_a_cache_salt_reaches_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        await client.post(route, json=body | {"cache_salt": "tenant é"})
        await client.post(route, json=body | {"cache_salt": None})
        assert [request.cache_salt for request in engine.requests] == ["tenant é".encode(), b""]
        assert {request.tenant for request in engine.requests} == {b""}, "there are no keys"

    async def test_priority_is_negated_for_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        await client.post(route, json=body | {"priority": 3})
        await client.post(route, json=body)
        assert [request.priority for request in engine.requests] == [-3, 0]
        answer = await client.post(route, json=body | {"priority": 1 << 31})
        assert answer.status_code == 400

    async def test_common_parameters_reach_the_sampler(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        fields = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "typical_p": 0.9}
        await client.post(route, json=body | fields)
        sampling = engine.requests[0].sampling
        assert {name: getattr(sampling, name) for name in fields} == fields


class TestNative:
    @pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
    async def test_penalty_and_watermark_reach_the_sampler(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str
    ) -> None:
        """TGI's frequency penalty is not OpenAI's."""
        parameters = {"frequency_penalty": 0.5, "watermark": True}
        await client.post(route, json={"inputs": "x", "parameters": parameters})
        sampling = engine.requests[0].sampling
        assert (sampling.relative_frequency_penalty, sampling.frequency_penalty) == (0.5, 0.0)
        assert (sampling.watermark, sampling.watermark_gamma) == (True, 0.5)
        assert sampling.watermark_delta == 2.0

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"watermark_gamma": 0.5, "watermark_delta": 2.0}

    async def test_prefill_has_the_prompts_tokens(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"inputs": "the fox", "parameters": {"decoder_input_details": True}}
        answer = await client.post("/generate", json=body)
        ids = engine.requests[0].prompt_ids
        assert engine.requests[0].prompt_logprobs == 0
        assert answer.json()["details"]["prefill"] == [
            {
                "id": token_id,
                "text": engine.tokenizer.surface(token_id),
                "logprob": -float(place) if place else None,
            }
            for place, token_id in enumerate(ids)
        ]
        assert answer.json()["details"]["tokens"], "it implies details"

    async def test_prefill_is_the_same_for_all_samples(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """One report serves all."""
        parameters = {"decoder_input_details": True, "best_of": 2, "do_sample": True}
        answer = await client.post("/generate", json={"inputs": "x y", "parameters": parameters})
        details = answer.json()["details"]
        assert details["prefill"] == details["best_of_sequences"][0]["prefill"]
        assert len(details["prefill"]) == len(engine.requests[0].prompt_ids)
        assert [request.prompt_logprobs for request in engine.requests] == [0, None]

    async def test_prefill_of_one_token_has_no_logprob(self, client: httpx.AsyncClient) -> None:
        parameters = {"decoder_input_details": True, "truncate": 1}
        answer = await client.post("/generate", json={"inputs": "x", "parameters": parameters})
        (token,) = answer.json()["details"]["prefill"]
        assert token["logprob"] is None


@pytest.mark.parametrize("stream", [False, True])
class TestEchoedLogprobs:
    async def ask(self, client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
        """Text and logprobs of each choice, put together."""
        answer = await client.post("/v1/completions", json=COMPLETION | {"echo": True} | fields)
        assert answer.status_code == 200, answer.text
        if fields["stream"]:
            *chunks, done = events(answer.text)
            assert done == "[DONE]"
        else:
            chunks = [answer.json()]
        found: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                whole = found.setdefault(choice["index"], {"text": "", "usage": None})
                whole["text"] += choice["text"]
                whole["usage"] = chunk["usage"] or whole["usage"]
                for name, values in choice["logprobs"].items():
                    whole[name] = [*whole.get(name, []), *(values or [])]
        return [found[index] for index in sorted(found)]

    @pytest.mark.parametrize("count", [0, 2])
    async def test_echoed_logprobs_are_parallel_lists(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool, count: int
    ) -> None:
        (reply,) = engine.reply_with("hello world")
        (found,) = await self.ask(client, logprobs=count, stream=stream)
        prompt = engine.requests[0].prompt_ids
        assert engine.requests[0].prompt_logprobs == count
        assert found["text"] == "the foxhello world"
        assert len(found["tokens"]) == len(prompt) + len(reply)
        assert found["tokens"][0] == tiny.BOS
        assert found["token_logprobs"][0] is None
        expected = [-float(place) for place in range(1, len(prompt))]
        assert found["token_logprobs"][1:] == expected + [-0.1] * len(reply)
        for token, offset in zip(found["tokens"][1:-1], found["text_offset"][1:-1], strict=True):
            assert found["text"][offset:].startswith(token)
        assert found["top_logprobs"][0] is None
        tops = found["top_logprobs"][1:]
        for token, value, top in zip(
            found["tokens"][1:], found["token_logprobs"][1:], tops, strict=True
        ):
            assert top[token] == value
            assert count or len(top) == 1

    async def test_samples_share_the_report_of_their_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        engine.reply_with("one", "two")
        found = await self.ask(client, logprobs=1, n=2, stream=stream)
        assert [choice["text"] for choice in found] == ["the foxone", "the foxtwo"]
        count = len(engine.requests[0].prompt_ids)
        assert found[0]["token_logprobs"][:count] == found[1]["token_logprobs"][:count]
        assert [request.prompt_logprobs for request in engine.requests] == [1, None]

    async def test_faster_sample_waits_for_the_report(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        engine.reply_with("one", "two")
        engine.late = {1}
        found = await self.ask(client, logprobs=1, n=2, stream=stream)
        assert [choice["text"] for choice in found] == ["the foxone", "the foxtwo"]
        count = len(engine.requests[0].prompt_ids)
        expected = [None, *(-float(place) for place in range(1, count))]
        assert [choice["token_logprobs"][:count] for choice in found] == [expected, expected]

    async def test_character_of_several_tokens_has_correct_offsets(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        (found,) = await self.ask(client, prompt="a🤗b", logprobs=1, stream=stream)
        assert "".join(found["tokens"][1:-1]) == "a🤗bhello world"
        assert found["text"] == "a🤗bhello world"
        place = found["tokens"].index("🤗")
        assert found["text_offset"][place + 1] == 2

    async def test_prompt_alone_can_be_scored(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, stream: bool
    ) -> None:
        """How evaluation harnesses score texts."""
        ids = engine.tokenizer.encode("the fox", False)
        (found,) = await self.ask(client, prompt=ids, logprobs=1, max_tokens=0, stream=stream)
        assert found["text"] == "the fox"
        assert len(found["tokens"]) == len(ids)
        assert found["usage"]["completion_tokens"] == 0
        assert state.admission.in_flight == 0
        assert sum(state.metrics.failures.counts.values()) == 0


@pytest.mark.parametrize(("route", "body"), ALL)
class TestDeadline:
    async def test_timeout_reaches_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        await client.post(route, json=body, headers={"x-request-timeout": "2.5"})
        given = engine.requests[0].timeout_seconds
        assert given is not None
        assert 0 < given <= 2.5, "what tokenizing took is off it already"
        await client.post(route, json=body)
        assert engine.requests[1].timeout_seconds is None

    @pytest.mark.parametrize("header", ["0", "-1", "soon", "nan", "inf", "1e300", ""])
    async def test_invalid_timeouts_are_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict, header: str
    ) -> None:
        answer = await client.post(route, json=body, headers={"x-request-timeout": header})
        assert answer.status_code == (400 if route.startswith("/v1/") else 422)
        assert "x-request-timeout" in answer.text
        assert engine.requests == []

    async def test_timeout_can_expire_before_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, route: str,
        body: dict, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        async def slow(*_: Any) -> list[int]:
            await asyncio.sleep(0.05)
            return [5]

        monkeypatch.setattr(state.workers, "encode", slow)
        answer = await client.post(route, json=body, headers={"x-request-timeout": "0.01"})
        assert answer.status_code == 504
        assert answer.json()["error_type"] == "timeout"
        assert engine.requests == []
        assert state.admission.in_flight == 0
        assert state.metrics.failures.counts["timeout"] == 1
