"""Widely used clients, on a real socket."""

from __future__ import annotations

import asyncio

import openai
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.router.fakes import FakeEngine
from tests.unit.text import tiny
from tgi_cli.engine.messages import FinishReason

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def ai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


class TestHuggingFaceHub:
    @pytest.fixture
    def hub(self, url: str) -> AsyncInferenceClient:
        return AsyncInferenceClient(url, timeout=60)

    async def test_text_generation(self, hub: AsyncInferenceClient, engine: FakeEngine) -> None:
        """It posts to ``/``, which prepends the prompt by default."""
        answer = await hub.text_generation("hi", max_new_tokens=20)
        assert answer == "hihello world"
        assert await hub.text_generation("hi", return_full_text=False) == "hello world"
        assert engine.requests[0].max_new_tokens == 20

    async def test_text_generation_details(
        self, hub: AsyncInferenceClient, engine: FakeEngine
    ) -> None:
        answer = await hub.text_generation(
            "hi", details=True, do_sample=True, seed=5, top_n_tokens=2, stop=["wor"]
        )
        assert answer.generated_text == "hihello wor"
        assert answer.details.finish_reason == "stop_sequence"
        assert answer.details.seed == 5
        assert len(answer.details.tokens) == answer.details.generated_tokens
        assert len(answer.details.top_tokens[0]) == 2

    async def test_text_generation_best_of(self, url: str, engine: FakeEngine) -> None:
        engine.reply_with("worse", "better")
        engine.chances = [-2.0, -1.0]
        answer = await asyncio.to_thread(
            lambda: InferenceClient(url, timeout=60).text_generation(
                "the fox",
                best_of=2,
                do_sample=True,
                details=True,
                decoder_input_details=True,
                frequency_penalty=0.5,
                watermark=True,
            )
        )
        assert answer.generated_text == "the foxbetter"
        assert answer.details is not None
        assert answer.details.best_of_sequences is not None
        assert [other.generated_text for other in answer.details.best_of_sequences] == [
            "the foxworse"
        ]
        assert [token.logprob for token in answer.details.prefill][:2] == [None, -1.0]
        sampling = engine.requests[0].sampling
        assert (sampling.relative_frequency_penalty, sampling.watermark) == (0.5, True)

    async def test_text_generation_stream(self, hub: AsyncInferenceClient) -> None:
        pieces = [piece async for piece in await hub.text_generation("hi", stream=True)]
        assert "".join(pieces) == "hello world" + tiny.EOS
        events = [
            event async for event in await hub.text_generation("hi", stream=True, details=True)
        ]
        assert events[-1].generated_text == "hihello world"
        assert events[-1].details.finish_reason == "eos_token"

    async def test_text_generation_errors(self, hub: AsyncInferenceClient) -> None:
        with pytest.raises(Exception, match="must be strictly positive"):
            await hub.text_generation("hi", top_k=-1)
        with pytest.raises(Exception, match="must be strictly positive"):
            _ = [piece async for piece in await hub.text_generation("hi", top_k=-1, stream=True)]

    async def test_chat(self, hub: AsyncInferenceClient) -> None:
        answer = await hub.chat_completion(USER, max_tokens=20, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == "hello world"
        assert answer.choices[0].finish_reason == "stop"
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        assert answer.usage.total_tokens > 0

    async def test_chat_stream(self, hub: AsyncInferenceClient) -> None:
        chunks = [chunk async for chunk in await hub.chat_completion(USER, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "hello world"
        assert chunks[-1].choices[0].finish_reason == "stop"

    async def test_sync(self, url: str) -> None:
        def call() -> tuple[str, str]:
            client = InferenceClient(url, timeout=60)
            pieces = client.text_generation("hi", stream=True)
            return client.text_generation("hi"), "".join(pieces)

        expected = ("hihello world", "hello world" + tiny.EOS)
        assert await asyncio.to_thread(call) == expected


class TestOpenAI:
    async def test_models(self, ai: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in ai.models.list()] == ["acme/tiny"]
        assert (await ai.models.retrieve("acme/tiny")).owned_by == "acme/tiny"
        with pytest.raises(openai.NotFoundError):
            await ai.models.retrieve("other")

    async def test_chat(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        answer = await ai.chat.completions.create(
            model="tgi", messages=USER, stop="wor", temperature=0, top_p=1, n=1, logit_bias={}
        )
        assert answer.choices[0].message.content == "hello "
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
        assert engine.requests[0].sampling.greedy

    async def test_chat_stream(self, ai: openai.AsyncOpenAI) -> None:
        stream = await ai.chat.completions.create(
            model="tgi", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "hello world"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 0

    async def test_stream_helper_accumulates_the_chunks(self, ai: openai.AsyncOpenAI) -> None:
        async with ai.chat.completions.stream(
            model="tgi", messages=USER, logprobs=True, top_logprobs=1
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.role == "assistant"
        assert final.choices[0].message.content == "hello world"
        assert final.choices[0].finish_reason == "stop"
        assert final.choices[0].logprobs is not None

    async def test_completions(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        engine.reply_with("one", "two")
        answer = await ai.completions.create(model="tgi", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in answer.choices] == ["one", "two"]
        assert answer.choices[0].logprobs is not None
        engine.reply_with("hello world")
        stream = await ai.completions.create(model="tgi", prompt=[5, 6], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"

    async def test_chat_samples(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        engine.reply_with("one", "two", "three")
        answer = await ai.chat.completions.create(
            model="tgi", messages=USER, n=3, logit_bias={"5": -100}, seed=1
        )
        assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
        engine.reply_with("one", "two", "three")
        async with ai.chat.completions.stream(model="tgi", messages=USER, n=3) as stream:
            final = await stream.get_final_completion()
        texts = {choice.index: choice.message.content for choice in final.choices}
        assert texts == {0: "one", 1: "two", 2: "three"}

    async def test_completion_samples(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        engine.reply_with("one", "two", "three")
        stream = await ai.completions.create(model="tgi", prompt="a", n=3, stream=True)
        texts = ["", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["one", "two", "three"]
        engine.reply_with("one", "two", "three")
        engine.requests.clear()
        engine.chances = [-2.0, -1.0, -3.0]
        best = await ai.completions.create(model="tgi", prompt="a", n=2, best_of=3)
        assert [choice.text for choice in best.choices] == ["two", "one"]

    async def test_echo_with_logprobs(self, ai: openai.AsyncOpenAI) -> None:
        answer = await ai.completions.create(
            model="tgi", prompt="the fox", echo=True, logprobs=2, max_tokens=0
        )
        logprobs = answer.choices[0].logprobs
        assert answer.choices[0].text == "the fox"
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None

    async def test_deadline(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        engine.failure, engine.failure_reason = "not done within 1.9 s", FinishReason.TIMEOUT
        with pytest.raises(openai.InternalServerError) as caught:
            await ai.chat.completions.create(
                model="tgi", messages=USER, extra_headers={"x-request-timeout": "2"}
            )
        assert caught.value.status_code == 504
        assert caught.value.code == "timeout"
        assert "Request timed out: not done within 2 s" in caught.value.message
        given = engine.requests[0].timeout_seconds
        assert given is not None
        assert 0 < given <= 2

    async def test_errors(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(model="tgi", messages=USER, n=129)
        assert caught.value.param == "n"
        assert "129 sequences in one request" in caught.value.message
        engine.failure, engine.fail_after = "broken", 2
        stream = await ai.chat.completions.create(model="tgi", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="Request failed during generation: broken"):
            _ = [chunk async for chunk in stream]
