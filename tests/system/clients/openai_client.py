"""OpenAI's own client, 2.x and 3.x."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

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


async def final_of(manager: Any, method: str = "get_final_completion") -> Any:
    """What a stream helper of either kind adds up."""
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            return await getattr(stream, method)()
    with manager as stream:
        return getattr(stream, method)()


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
        client.chat.completions.create,
        model="tgi",
        messages=MESSAGES,
        max_tokens=8,
        n=3,
        temperature=1,
        seed=1,
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
    final = await final_of(client.chat.completions.stream(**ask, stop=text[5:8]))
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


class Function(BaseModel):
    """What an answer shall be: the schema of the harness, as a model."""

    name: Literal["join", "split"]
    arguments: int = Field(ge=0, le=9)


@call
async def chat_response_format(client: Any) -> None:
    schema = {"name": "function", "schema": SCHEMA, "strict": True}
    ask = partial(client.chat.completions.create, model="tgi", messages=MESSAGES, max_tokens=200)
    ask = partial(ask, response_format={"type": "json_schema", "json_schema": schema})
    fits((await whole(ask())).choices[0].message.content)
    chunks = await items(ask(stream=True))
    fits("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@call
async def chat_json_object(client: Any) -> None:
    """Any object, unless the answer is cut off."""
    answer = await whole(
        client.chat.completions.create(
            model="tgi",
            messages=MESSAGES,
            max_tokens=200,
            temperature=0,
            response_format={"type": "json_object"},
        )
    )
    (choice,) = answer.choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@call
async def chat_parse(client: Any) -> None:
    ask: Any = {"model": "tgi", "messages": MESSAGES, "max_tokens": 200}
    answer = await whole(client.chat.completions.parse(**ask, response_format=Function))
    assert isinstance(answer.choices[0].message.parsed, Function)
    final = await final_of(client.chat.completions.stream(**ask, response_format=Function))
    assert isinstance(final.choices[0].message.parsed, Function)


@call
async def chat_tools(client: Any) -> None:
    create = partial(client.chat.completions.create, model="tgi", max_tokens=200, tools=TOOLS)
    create = partial(create, parallel_tool_calls=False)
    for choice in ("required", {"type": "function", "function": {"name": TOOL["name"]}}):
        answer = await whole(create(messages=MESSAGES, tool_choice=choice))
        message = answer.choices[0].message
        assert message.content is None
        (called,) = message.tool_calls
        assert called.id
        assert (called.type, called.function.name) == ("function", TOOL["name"])
        fits(called.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": called.id, "content": "It joins paths."}
    turns = [*MESSAGES, message.to_dict(), result]
    answer = await whole(create(messages=turns, tool_choice="none"))
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert await whole(create(messages=MESSAGES, tool_choice="auto"))


@call
async def chat_tools_in_parallel(client: Any) -> None:
    """A model as small as this one does not know when to end; the limit ends it."""
    create = partial(client.chat.completions.create, model="tgi", messages=MESSAGES, tools=TOOLS)
    create = partial(create, tool_choice="required", max_tokens=100, temperature=0)
    answer = await whole(create())
    first, second, *_ = answer.choices[0].message.tool_calls
    assert first.id != second.id
    for called in (first, second):
        assert called.function.name == TOOL["name"]
        fits(called.function.arguments)
    streamed = ["", ""]
    for chunk in await items(create(stream=True)):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.index < 2:
                streamed[delta.index] += delta.function.arguments or ""
    assert streamed == [first.function.arguments, second.function.arguments]


@call
async def chat_tools_stream(client: Any) -> None:
    ask: Any = {"model": "tgi", "messages": MESSAGES, "max_tokens": 200, "tools": TOOLS}
    ask |= {"tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    chunks = await items(client.chat.completions.create(**ask, stream=True))
    deltas = [entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id
    assert "".join(delta.function.name or "" for delta in deltas) == TOOL["name"]
    fits("".join(delta.function.arguments or "" for delta in deltas))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    ask["tools"] = [openai.pydantic_function_tool(Function)]
    final = await final_of(client.chat.completions.stream(**ask))
    (called,) = final.choices[0].message.tool_calls
    assert isinstance(called.function.parsed_arguments, Function)


@call
async def chat_tools_parse(client: Any) -> None:
    answer = await whole(
        client.chat.completions.parse(
            model="tgi",
            messages=MESSAGES,
            max_tokens=200,
            tools=[openai.pydantic_function_tool(Function)],
            tool_choice="required",
            parallel_tool_calls=False,
        )
    )
    (called,) = answer.choices[0].message.tool_calls
    assert isinstance(called.function.parsed_arguments, Function)


@call
async def responses(client: Any) -> None:
    ask: Any = {"model": "tgi", "input": "What does os.path.join do?", "temperature": 0}
    ask |= {"max_output_tokens": 30, "instructions": "Be brief."}
    answer = await whole(client.responses.create(**ask))
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    assert answer.usage.output_tokens > 0
    events = await items(client.responses.create(**ask, stream=True))
    assert events[0].type == "response.created"
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == answer.output_text
    assert events[-1].type == f"response.{answer.status}"
    assert events[-1].response.output_text == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = await final_of(client.responses.stream(**ask), "get_final_response")
    assert final.output_text == answer.output_text


@call
async def responses_parse(client: Any) -> None:
    ask: Any = {"model": "tgi", "input": "What does os.path.join do?", "max_output_tokens": 200}
    answer = await whole(client.responses.parse(**ask, text_format=Function))
    assert isinstance(answer.output_parsed, Function)
    final = await final_of(
        client.responses.stream(**ask, text_format=Function), "get_final_response"
    )
    assert isinstance(final.output_parsed, Function)


@call
async def responses_tools(client: Any) -> None:
    ask: Any = {"model": "tgi", "max_output_tokens": 200, "tools": [{"type": "function", **TOOL}]}
    ask |= {"parallel_tool_calls": False}
    question = {"role": "user", "content": "What does os.path.join do?"}
    answer = await whole(client.responses.create(**ask, input=[question], tool_choice="required"))
    (called,) = answer.output
    assert (called.type, called.name) == ("function_call", TOOL["name"])
    fits(called.arguments)
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "It joins."}
    turns = [question, called.to_dict(), result]
    answer = await whole(client.responses.create(**ask, input=turns, tool_choice="none"))
    assert answer.output_text
    events = await items(
        client.responses.create(**ask, input=[question], tool_choice="required", stream=True)
    )
    kind = "response.function_call_arguments.delta"
    fits("".join(event.delta for event in events if event.type == kind))


@call
async def responses_state(client: Any) -> None:
    ask: Any = {"model": "tgi", "max_output_tokens": 10}
    first = await whole(client.responses.create(**ask, input="What is a list?"))
    found = await whole(client.responses.retrieve(first.id))
    assert found.output_text == first.output_text
    more: Any = {"input": "And a tuple?", "previous_response_id": first.id}
    counted = await whole(client.responses.input_tokens.count(model="tgi", **more))
    second = await whole(client.responses.create(**ask, **more))
    assert second.usage.input_tokens == counted.input_tokens
    listed = await whole(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed.data] == ["message"] * 3
    begun = await whole(client.responses.create(**ask, input="Hello!", background=True))
    ended = await whole(client.responses.cancel(begun.id))
    assert ended.status in ("cancelled", "completed", "incomplete")
    await whole(client.responses.delete(first.id))
    retrieve = partial(client.responses.retrieve, first.id)
    await raises(openai.NotFoundError, "not found", retrieve)


@call
async def responses_custom_tools(client: Any) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": r'[a-c]{3}"\n'}
    tool = {"type": "custom", "name": "patch", "description": "Edits.", "format": form}
    ask: Any = {"model": "tgi", "input": "Edit it.", "tools": [tool], "max_output_tokens": 100}
    ask |= {"tool_choice": {"type": "custom", "name": "patch"}}
    (called,) = (await whole(client.responses.create(**ask))).output
    assert called.type == "custom_tool_call"
    assert re.fullmatch(form["definition"], called.input)
    events = await items(client.responses.create(**ask, stream=True))
    kind = "response.custom_tool_call_input.delta"
    text = "".join(event.delta for event in events if event.type == kind)
    assert re.fullmatch(form["definition"], text)


@call
async def errors(client: Any) -> None:
    create = partial(client.chat.completions.create, model="tgi", messages=MESSAGES)
    for ask in (partial(create, temperature=-1), partial(create, temperature=-1, stream=True)):
        error = await raises(openai.BadRequestError, "temperature", ask)
        assert error.param == "temperature"
        assert error.type


def client_of(kind: Any, url: str) -> Any:
    return kind(base_url=f"{url}/v1", api_key="-", max_retries=0)


main({"sync": partial(client_of, OpenAI), "async": partial(client_of, AsyncOpenAI)})
