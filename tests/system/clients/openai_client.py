"""OpenAI's own client, 2.x and 3.x."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

from tests.system.clients.harness import MESSAGES, PROMPT, call, items, main, raises, whole


@call
async def models(client: Any) -> None:
    listed = await items(client.models.list())
    assert [model.id for model in listed] == ["tgi-demo"]
    assert (await whole(client.models.retrieve("tgi-demo"))).object == "model"
    await raises(openai.NotFoundError, "other", lambda: client.models.retrieve("other"))


@call
async def chat(client: Any) -> None:
    answer = await whole(
        client.chat.completions.create(
            model="tgi",
            messages=MESSAGES,
            max_completion_tokens=12,
            temperature=0,
            top_p=1,
            n=1,
            seed=1,
            stop="\n\n\n",
            logit_bias={},
            frequency_penalty=0,
            presence_penalty=0,
            user="someone",
        )
    )
    (choice,) = answer.choices
    assert answer.id
    assert (choice.message.role, choice.message.refusal) == ("assistant", None)
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@call
async def chat_logprobs(client: Any) -> None:
    create = partial(
        client.chat.completions.create,
        model="tgi",
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    answer = await whole(create())
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert token.top_logprobs[0].token == token.token, "it is greedy"
        assert token.logprob <= 0
    chunks = await items(create(stream=True))
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == tokens


@call
async def chat_samples(client: Any) -> None:
    create = partial(
        client.chat.completions.create, model="tgi", messages=MESSAGES, max_tokens=8, n=3, seed=1
    )
    answer = await whole(create())
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in await items(create(stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1


@call
async def chat_stream(client: Any) -> None:
    create = partial(
        client.chat.completions.create,
        model="tgi",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
    )
    answer = await whole(create())
    chunks = await items(create(stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert "".join(choice.delta.content or "" for choice in choices) == (
        answer.choices[0].message.content
    )
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == answer.choices[0].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage) == ([], answer.usage)
    assert len({chunk.id for chunk in chunks}) == 1


@call
async def chat_stream_helper(client: Any) -> None:
    """What adds the chunks up: it joins the roles of deltas, too, and refuses what is cut off."""
    ask: Any = {"model": "tgi", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    answer = await whole(client.chat.completions.create(**ask))
    text = answer.choices[0].message.content
    stream = client.chat.completions.stream(**ask, stop=text[5:8])
    if isinstance(client, AsyncOpenAI):
        async with stream as entered:
            final = await entered.get_final_completion()
    else:
        with stream as entered:
            final = entered.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == text[: text.index(text[5:8])]
    assert final.choices[0].finish_reason == "stop"


@call
async def completions(client: Any) -> None:
    create = partial(
        client.completions.create, model="tgi", prompt=PROMPT, max_tokens=12, temperature=0
    )
    answer = await whole(create(stop=["\n\n\n"], logprobs=2))
    (choice,) = answer.choices
    assert choice.text == "".join(choice.logprobs.tokens)
    assert len(choice.logprobs.top_logprobs) == answer.usage.completion_tokens
    chunks = await items(create(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage == answer.usage


@call
async def completions_of_several_prompts(client: Any) -> None:
    create = partial(client.completions.create, model="tgi", max_tokens=6, temperature=0)
    prompts = [PROMPT, "import os"]
    alone = [(await whole(create(prompt=prompt))).choices[0].text for prompt in prompts]
    both = await whole(create(prompt=prompts))
    assert [choice.text for choice in both.choices] == alone
    ids = await whole(create(prompt=[5, 6, 7], echo=True))
    assert len(ids.choices[0].text) > 3


@call
async def errors(client: Any) -> None:
    create = partial(client.chat.completions.create, model="tgi", messages=MESSAGES)
    for ask in (partial(create, temperature=-1), partial(create, temperature=-1, stream=True)):
        error = await raises(openai.APIStatusError, "temperature", ask)
        assert error.status_code in (400, 422)
        assert error.param == "temperature"
        assert error.type


def client_of(kind: Any, url: str) -> Any:
    return kind(base_url=f"{url}/v1", api_key="-", max_retries=0)


main({"sync": partial(client_of, OpenAI), "async": partial(client_of, AsyncOpenAI)})
