"""Several samples of one prompt: best_of and n, their seeds, answers, usage and failures."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.llm.options import GenerationOptions, Prompt, requests_of
from tgi_cli.router.state import RouterState
from tgi_cli.sampling.params import SamplingParams

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
REQUESTS = [
    (CHAT, {"messages": USER, "n": 3}),
    (COMPLETIONS, {"prompt": "the fox", "n": 3}),
    (COMPLETIONS, {"prompt": "the fox", "best_of": 3}),
]


def native(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "the fox", "parameters": {"best_of": 2, "do_sample": True, **parameters}}


class TestBestOf:
    @pytest.mark.parametrize(("chances", "winner"), [((-2.0, -1.0), 1), ((-1.0, -2.0), 0)])
    async def test_highest_mean_logprob_wins(
        self, client: httpx.AsyncClient, engine: FakeEngine, chances: tuple, winner: int
    ) -> None:
        """The mean, not the sum: the longer text is not worse for its length."""
        replies = engine.reply_with("a", "the quick brown fox jumps")
        engine.chances = list(chances)
        answer = await client.post("/generate", json=native(details=True, top_n_tokens=2))
        details = answer.json()["details"]
        (other,) = details.pop("best_of_sequences")
        texts = ["a", "the quick brown fox jumps"]
        assert answer.json()["generated_text"] == texts[winner]
        assert other["generated_text"] == texts[1 - winner]
        assert set(other) == set(details) | {"generated_text"}
        for found, place in ((details, winner), (other, 1 - winner)):
            assert [token["id"] for token in found["tokens"]] == replies[place]
            assert len(found["top_tokens"]) == found["generated_tokens"] == len(replies[place])
            assert found["seed"] == engine.requests[place].sampling.seed
            assert found["finish_reason"] == "eos_token"
            assert found["prefill"] == []
        assert details["seed"] != other["seed"]

    async def test_headers_describe_the_winner(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        replies = engine.reply_with("the quick brown fox jumps", "a")
        engine.chances = [-2.0, -1.0]
        headers = (await client.post("/generate", json=native())).headers
        assert headers["x-generated-tokens"] == str(len(replies[1]))
        assert headers["x-prompt-tokens"] == str(len(engine.requests[0].prompt_ids))
        assert float(headers["x-compute-time"]) > 0
        assert headers["x-total-time"].isdigit()

    async def test_details_are_absent_unless_requested(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/", json=native())
        assert answer.json() == [{"generated_text": "the foxhello world"}]

    async def test_single_sample_has_no_best_of_sequences(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/generate", json=native(best_of=1, details=True))
        assert "best_of_sequences" not in answer.json()["details"]

    async def test_best_of_selects_text_completions(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """Per prompt, best first, indexed anew; all that was generated is paid for."""
        replies = engine.reply_with("a", "b", "c", "d", "e", "f")
        engine.chances = [-3.0, -1.0, -2.0, -5.0, -6.0, -4.0]
        body = {"prompt": ["x", "y"], "n": 2, "best_of": 3}
        answer = await client.post(COMPLETIONS, json=body)
        found = answer.json()
        assert [choice["text"] for choice in found["choices"]] == ["b", "c", "f", "d"]
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        assert found["usage"]["completion_tokens"] == sum(map(len, replies))
        assert answer.headers["x-generated-tokens"] == str(sum(map(len, replies)))


class TestN:
    @pytest.mark.parametrize("logprobs", [False, True])
    async def test_chats_have_several_choices(
        self, client: httpx.AsyncClient, engine: FakeEngine, logprobs: bool
    ) -> None:
        replies = engine.reply_with("one", "two two", "three")
        body = {"messages": USER, "n": 3, "logprobs": logprobs}
        answer = await client.post(CHAT, json=body)
        found = answer.json()
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in found["choices"]]
        assert texts == ["one", "two two", "three"]
        prompt, completion = len(engine.requests[0].prompt_ids), sum(map(len, replies))
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
        assert answer.headers["x-prompt-tokens"] == str(prompt)
        if logprobs:
            counts = [len(choice["logprobs"]["content"]) for choice in found["choices"]]
            assert counts == list(map(len, replies))

    @pytest.mark.parametrize("usage", [False, True])
    async def test_streamed_chats_have_several_choices(
        self, client: httpx.AsyncClient, engine: FakeEngine, usage: bool
    ) -> None:
        replies = engine.reply_with("one", "two two", "three")
        options = {"include_usage": usage}
        body = {"messages": USER, "n": 3, "stream": True, "stream_options": options}
        *chunks, done = events((await client.post(CHAT, json=body)).text)
        assert done == "[DONE]"
        if usage:
            assert chunks.pop()["usage"]["completion_tokens"] == sum(map(len, replies))
        texts, roles, reasons = ["", "", ""], [0, 0, 0], [0, 0, 0]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            index, delta = choice["index"], choice["delta"]
            assert ("role" in delta) == (roles[index] == 0), "the role comes first, and once"
            roles[index] += "role" in delta
            texts[index] += delta.get("content", "")
            assert not reasons[index]
            reasons[index] += choice["finish_reason"] == "stop"
        assert texts == ["one", "two two", "three"]
        assert roles == reasons == [1, 1, 1]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_completions_have_samples_of_each_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        """The samples of the first prompt come first."""
        engine.reply_with("a", "b", "c", "d")
        body = {"prompt": ["x", "y"], "n": 2, "echo": True, "stream": stream}
        answer = await client.post(COMPLETIONS, json=body)
        texts = ["", "", "", ""]
        if stream:
            *chunks, _ = events(answer.text)
            for chunk in chunks:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        else:
            texts = [choice["text"] for choice in answer.json()["choices"]]
        assert texts == ["xa", "xb", "yc", "yd"]
        prompts = [request.prompt_ids for request in engine.requests]
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
        ids = [request.request_id for request in engine.requests]
        forks = [request.fork_of for request in engine.requests]
        assert forks == [None, ids[0], None, ids[2]]

    @pytest.mark.parametrize(("route", "body"), REQUESTS)
    async def test_samples_fork_the_first_sample(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
    ) -> None:
        await client.post(route, json=body)
        assert [request.fork_of for request in engine.requests] == [None, 1, 1]

    async def test_samples_have_distinct_seeds(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """Sample i has its own seed, the same however many there are; the first has the given."""

        async def seeds(**fields: Any) -> list[int]:
            engine.requests.clear()
            await client.post(CHAT, json={"messages": USER, **fields})
            return [request.sampling.seed for request in engine.requests]

        many = await seeds(n=5, seed=7)
        assert many[0] == 7
        assert len(set(many)) == 5
        assert all(0 <= seed < 1 << 64 for seed in many)
        assert await seeds(n=3, seed=7) == many[:3]
        assert await seeds(seed=7) == [7]
        assert not set(await seeds(n=5, seed=8)) & set(many)
        assert not set(await seeds(n=5)) & set(many)

    @pytest.mark.parametrize("seed", [7, (1 << 64) - 1])
    @pytest.mark.parametrize(("route", "body"), [*REQUESTS, (COMPLETIONS, {"prompt": ["x", "y"]})])
    async def test_seeds_are_those_of_the_python_api(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict, seed: int
    ) -> None:
        count = body.get("n") or body.get("best_of") or 1
        answer = await client.post(route, json=body | {"seed": seed, "temperature": 0.8})
        assert answer.status_code == 200, answer.text
        offline = requests_of(
            Prompt(0, None, (3, 4)),
            SamplingParams(temperature=0.8, seed=seed),
            GenerationOptions(n=count, max_new_tokens=2),
            engine.info,
            itertools.count(1),
        )
        prompts = len(engine.requests) // count
        assert [request.sampling.seed for request in engine.requests] == prompts * [
            request.sampling.seed for request in offline
        ]


class TestFailures:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("route", "body"), [*REQUESTS, ("/generate", native())])
    async def test_one_that_fails_ends_all(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        route: str,
        body: dict,
        stream: bool,
    ) -> None:
        engine.reply_with("the quick brown fox jumps over the lazy dog")
        engine.failure, engine.fail_after, engine.fails = "broken", 1, {2}
        engine.gate = asyncio.Semaphore(5)  # they go on side by side, not to an end
        if stream and ("best_of" in body or route == "/generate"):
            body = {"prompt": "x", "n": 2}
            route = COMPLETIONS
        answer = await client.post(route, json=body | {"stream": stream})
        if stream:
            *_, error, done = events(answer.text)
            assert done == "[DONE]"
            assert error["error_type"] == "generation"
        else:
            assert answer.status_code == (424 if route == "/generate" else 500)
        assert state.admission.in_flight == 0
        assert not state.generator.live
        assert 1 in engine.cancelled
        failures = state.metrics.failures.counts
        assert failures["generation"] == 1
        assert sum(failures.values()) == len(engine.requests)

    async def test_limit_is_released_when_submitting_fails(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        submit = engine.submit

        def second_fails(request: Any, adapter: str = "", session: str = "") -> Any:
            engine.connected = not engine.requests
            return submit(request, adapter, session)

        monkeypatch.setattr(engine, "submit", second_fails)
        answer = await client.post(CHAT, json={"messages": USER, "n": 4})
        assert answer.status_code == 503
        assert engine.cancelled == [1]
        assert state.admission.in_flight == 0
        counts = state.metrics.failures.counts
        assert (counts["dropped"], counts["generation"]) == (1, 3)
