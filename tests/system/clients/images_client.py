"""The same picture in a message of each of the clients, as each of them writes it."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import litellm
from huggingface_hub import InferenceClient
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from text_generation import Client
from text_generation.errors import ValidationError

from tests.system.clients.harness import call, items, main, raises

SIDE = 56
ROWS = 20
"""Tokens that the picture takes: four tiles and the whole, of four rows each."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png() -> bytes:
    """A picture (https://www.w3.org/TR/png-3/), as the environment may lack Pillow."""
    lines = b"".join(
        b"\0" + bytes(value for x in range(SIDE) for value in (4 * x, 4 * y, 99))
        for y in range(SIDE)
    )
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


DATA = base64.b64encode(_png()).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT: Any = {"type": "text", "text": "What is this?"}
PART: Any = {"type": "image_url", "image_url": {"url": URL}}
MESSAGES: Any = [{"role": "user", "content": [TEXT, PART]}]


@call
async def hub_chat(url: str) -> None:
    answer = InferenceClient(url).chat_completion(MESSAGES, max_tokens=8)
    assert answer.usage.prompt_tokens > ROWS


@call
async def text_generation(url: str) -> None:
    client = Client(url, timeout=60)
    answer = client.generate(f"![]({URL})What?", max_new_tokens=8, decoder_input_details=True)
    assert len(answer.details.prefill) > ROWS
    events = await items(client.generate_stream(f"![]({URL})What?", max_new_tokens=8))
    assert events[-1].generated_text == answer.generated_text
    ask = client.generate
    await raises(ValidationError, "Could not fetch image", lambda: ask("![](http://localhost/a)"))


@call
async def langchain_openai(url: str) -> None:
    model = ChatOpenAI(model="tgi", base_url=f"{url}/v1", api_key="-", max_retries=0, max_tokens=8)
    standard = {"type": "image", "base64": DATA, "mime_type": "image/png"}
    for image in (PART, standard):
        answer = await model.ainvoke([HumanMessage(content=[TEXT, image])])
        assert answer.usage_metadata["input_tokens"] > ROWS


@call
async def langchain_anthropic(url: str) -> None:
    model = ChatAnthropic(model="tgi", base_url=url, api_key="-", max_retries=0, max_tokens=8)
    answer = await model.ainvoke([HumanMessage(content=[TEXT, PART])])
    assert answer.usage_metadata["input_tokens"] > ROWS


@call
async def litellm_providers(url: str) -> None:
    for name, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        answer = await litellm.acompletion(
            model=f"{name}/tgi", api_base=base, api_key="-", messages=MESSAGES, max_tokens=8
        )
        assert answer.usage.prompt_tokens > ROWS, name


if __name__ == "__main__":
    main({"any": lambda url: url})
