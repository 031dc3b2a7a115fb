"""LiteLLM, by each of the names under which it reaches a server like this one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import litellm

from tests.system.clients.harness import (
    MESSAGES,
    PROMPT,
    SCHEMA,
    TOOL,
    TOOLS,
    call,
    fits,
    items,
    main,
    raises,
    whole,
)

Ask = Callable[..., Any]


class Provider:
    """One provider's completions, whichever way they are waited for."""

    def __init__(self, name: str, chat: Ask, text: Ask, url: str) -> None:
        named = {"api_base": f"{url}/v1", "api_key": "-", "max_retries": 0}
        self.chat = partial(chat, model=f"{name}/tgi", **named)
        of_text = "text-completion-openai" if name == "openai" else name
        self.text = partial(text, model=f"{of_text}/tgi", **named)


@call
async def chat(provider: Provider) -> None:
    answer = await whole(
        provider.chat(
            messages=MESSAGES, max_tokens=12, temperature=0, top_p=1, seed=1, stop=["\n\n\n"]
        )
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens > 0


@call
async def chat_stream(provider: Provider) -> None:
    ask = partial(provider.chat, messages=MESSAGES, max_tokens=12, temperature=0)
    answer = await whole(ask())
    chunks = await items(ask(stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.role == "assistant"
    assert built.choices[0].message.content == answer.choices[0].message.content
    assert built.choices[0].finish_reason == answer.choices[0].finish_reason
    assert built.usage.completion_tokens == answer.usage.completion_tokens


@call
async def chat_errors(provider: Provider) -> None:
    ask = partial(provider.chat, messages=MESSAGES, temperature=-1)
    await raises(Exception, "temperature", ask)


@call
async def chat_response_format(provider: Provider) -> None:
    schema = {"name": "function", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    ask = partial(provider.chat, messages=MESSAGES, max_tokens=200, response_format=form)
    fits((await whole(ask())).choices[0].message.content)


@call
async def chat_tools(provider: Provider) -> None:
    named = {"type": "function", "function": {"name": TOOL["name"]}}
    ask = partial(provider.chat, max_tokens=200, tools=TOOLS, tool_choice=named)
    answer = await whole(ask(messages=MESSAGES))
    (called,) = answer.choices[0].message.tool_calls
    assert called.function.name == TOOL["name"]
    fits(called.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = await items(ask(messages=MESSAGES, stream=True))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function.name == TOOL["name"]
    fits(streamed.function.arguments)
    result = {"role": "tool", "tool_call_id": called.id, "content": "It joins paths."}
    turns = [*MESSAGES, answer.choices[0].message, result]
    assert await whole(ask(messages=turns))


@call
async def text(provider: Provider) -> None:
    ask = partial(provider.text, prompt=PROMPT, max_tokens=12, temperature=0)
    answer = await whole(ask())
    assert answer.choices[0].text
    chunks = await items(ask(stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == answer.choices[0].text


def kinds() -> dict[str, Callable[[str], Provider]]:
    ways = {
        "sync": (litellm.completion, litellm.text_completion),
        "async": (litellm.acompletion, litellm.atext_completion),
    }
    return {
        f"{way} {name}": partial(Provider, name, *asks)
        for name in ("openai", "huggingface", "hosted_vllm")
        for way, asks in ways.items()
    }


main(kinds())
