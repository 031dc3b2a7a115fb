"""Widely used clients send images, on a real socket."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import openai
import pytest
from huggingface_hub import AsyncInferenceClient

from tests.router.fakes import FakeEngine
from tests.tools.fake_vision import data_url, file_of

PART: Any = {"type": "image_url", "image_url": {"url": data_url(3)}}
USER: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, PART]}]


def rows(engine: FakeEngine) -> list[int]:
    """The rows of the images of the last request."""
    return [image.num_rows for image in engine.requests[-1].images]


class TestOpenAI:
    @pytest.fixture
    def ai(self, url: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)

    async def test_chat(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        answer = await ai.chat.completions.create(model="tgi", messages=USER)
        assert answer.choices[0].message.content == "hello world"
        assert rows(engine) == [3]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(engine.requests[0].prompt_ids)

    async def test_stream(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        stream = await ai.chat.completions.create(model="tgi", messages=USER, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "hello world"
        assert rows(engine) == [3]

    async def test_responses(self, ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        content: Any = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": data_url(4), "detail": "low"},
        ]
        answer = await ai.responses.create(
            model="tgi", input=[{"role": "user", "content": content}]
        )
        assert answer.output_text == "hello world"
        assert rows(engine) == [2]

    async def test_errors(self, ai: openai.AsyncOpenAI) -> None:
        wrong: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(
                model="tgi", messages=[{"role": "user", "content": [wrong]}]
            )
        assert caught.value.code == "failed_to_download_image"
        assert caught.value.param == "messages"


class TestAnthropic:
    async def test_messages(self, url: str, engine: FakeEngine) -> None:
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0, timeout=60)
        data = base64.b64encode(file_of(3)).decode()
        source: Any = {"type": "base64", "media_type": "image/png", "data": data}
        message = await claude.messages.create(
            model="tgi",
            max_tokens=20,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": source},
                        {"type": "text", "text": "What is this?"},
                    ],
                }
            ],
        )
        assert message.content[0].type == "text"
        assert message.content[0].text == "hello world"
        assert rows(engine) == [3]


class TestHuggingFaceHub:
    @pytest.fixture
    def hub(self, url: str) -> AsyncInferenceClient:
        return AsyncInferenceClient(url, timeout=60)

    async def test_chat(self, hub: AsyncInferenceClient, engine: FakeEngine) -> None:
        answer = await hub.chat_completion(USER)
        assert answer.choices[0].message.content == "hello world"
        assert rows(engine) == [3]

    async def test_text_generation(self, hub: AsyncInferenceClient, engine: FakeEngine) -> None:
        """As the documentation of TGI's vision models shows it."""
        prompt = f"![]({data_url(3)})What is this?\n\n"
        answer = await hub.text_generation(prompt, return_full_text=False)
        assert answer == "hello world"
        assert rows(engine) == [3]
        pieces = [
            piece
            async for piece in await hub.text_generation(prompt, stream=True, max_new_tokens=20)
        ]
        assert "".join(pieces).startswith("hello world")
        assert rows(engine) == [3]
