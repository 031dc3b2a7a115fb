"""LangChain's models: langchain-openai's, langchain-huggingface's and langchain-anthropic's."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI
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


class Models:
    """The models on one server, asked in one way: what they wait for or what they return."""

    def __init__(self, invoke: str, stream: str, batch: str, url: str) -> None:
        self.invoke, self.stream, self.batch = invoke, stream, batch
        self.openai: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "-", "max_retries": 0}
        self.anthropic: dict[str, Any] = {
            "model": "tgi", "base_url": url, "api_key": "-", "max_retries": 0,
        }  # fmt: skip
        self.endpoint: dict[str, Any] = {"endpoint_url": url, "max_new_tokens": 12}

    def ask(self, model: Any, *arguments: Any, **named: Any) -> Any:
        return whole(getattr(model, self.invoke)(*arguments, **named))

    def chunks(self, model: Any, *arguments: Any, **named: Any) -> Any:
        return items(getattr(model, self.stream)(*arguments, **named))

    def all(self, model: Any, inputs: list[Any]) -> Any:
        return whole(getattr(model, self.batch)(inputs))


async def _converses(models: Models, model: Any) -> None:
    """A chat model answers alike whole, in chunks and among others."""
    answer = await models.ask(model, MESSAGES)
    assert answer.content
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.usage_metadata["output_tokens"] > 0
    first, *rest = await models.chunks(model, MESSAGES)
    joined = first
    for chunk in rest:
        joined += chunk
    assert rest  # how many there are is for the router's haste to say: it sends what has come
    assert joined.type == "AIMessageChunk"
    assert joined.content == answer.content
    assert joined.response_metadata["finish_reason"] == answer.response_metadata["finish_reason"]
    assert joined.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
    others = await models.all(model, [MESSAGES, MESSAGES])
    assert [other.content for other in others] == [answer.content] * 2


async def _writes(models: Models, model: Any) -> None:
    """A text model writes alike whole, in pieces and among others."""
    text = await models.ask(model, PROMPT)
    assert text
    assert "".join(await models.chunks(model, PROMPT)) == text
    assert await models.all(model, [PROMPT, PROMPT]) == [text, text]


async def _calls(models: Models, model: Any) -> None:
    """A chat model calls alike whole and in chunks, and takes the result."""
    answer = await models.ask(model, MESSAGES)
    (called,) = answer.tool_calls
    assert called["name"] == TOOL["name"]
    fits(json.dumps(called["args"]))
    first, *rest = await models.chunks(model, MESSAGES)
    for chunk in rest:
        first += chunk
    assert [other["args"] for other in first.tool_calls] == [called["args"]]
    result = ToolMessage("It joins paths.", tool_call_id=called["id"])
    turns = [HumanMessage(MESSAGES[0]["content"]), answer, result]
    assert (await models.ask(model, turns)).tool_calls


@call
async def chat_openai(models: Models) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 1, "stream_usage": True}
    await _converses(models, ChatOpenAI(model="tgi", **settings, **models.openai))


@call
async def chat_openai_logprobs(models: Models) -> None:
    model = ChatOpenAI(model="tgi", max_tokens=6, logprobs=True, top_logprobs=2, **models.openai)
    answer = await models.ask(model, MESSAGES)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert len(tokens) == answer.usage_metadata["output_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@call
async def openai(models: Models) -> None:
    await _writes(models, OpenAI(model="tgi", max_tokens=12, temperature=0, **models.openai))


@call
async def chat_hugging_face(models: Models) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "stream_usage": True}
    llm = HuggingFaceEndpoint(**models.endpoint)
    await _converses(models, ChatHuggingFace(llm=llm, model_kwargs={"seed": 1}, **settings))


@call
async def hugging_face_endpoint(models: Models) -> None:
    """It samples unless told not to."""
    await _writes(models, HuggingFaceEndpoint(seed=1, **models.endpoint))
    greedy = {"temperature": None, "top_k": None, "top_p": None, "typical_p": None}
    await _writes(models, HuggingFaceEndpoint(**greedy, **models.endpoint))


class Function(BaseModel):
    """What an answer shall be."""

    name: Literal["join", "split"]
    arguments: int = Field(ge=0, le=9)


class Signature(BaseModel):
    """A function without bounds of numbers, which Anthropic's client does not send."""

    name: Literal["join", "split"]
    arguments: int


@call
async def chat_openai_structured(models: Models) -> None:
    model = ChatOpenAI(model="tgi", max_tokens=200, **models.openai)
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Function, method=method)
        assert isinstance(await models.ask(structured, MESSAGES), Function)


@call
async def chat_openai_tools(models: Models) -> None:
    model = ChatOpenAI(model="tgi", max_tokens=200, seed=1, **models.openai)
    one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    await _calls(models, model.bind_tools(TOOLS, **one))


@call
async def chat_openai_responses(models: Models) -> None:
    model = ChatOpenAI(
        model="tgi", max_tokens=20, temperature=0, use_responses_api=True, **models.openai
    )
    answer = await models.ask(model, MESSAGES)
    assert answer.text
    chunks = await models.chunks(model, MESSAGES)
    assert "".join(chunk.text for chunk in chunks) == answer.text


@call
async def chat_hugging_face_structured(models: Models) -> None:
    llm = HuggingFaceEndpoint(**models.endpoint)
    model = ChatHuggingFace(llm=llm, max_tokens=200)
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(SCHEMA | {"title": "look_up"}, method=method)
        fits(json.dumps(await models.ask(structured, MESSAGES)))


@call
async def chat_hugging_face_tools(models: Models) -> None:
    llm = HuggingFaceEndpoint(**models.endpoint)
    model = ChatHuggingFace(llm=llm, max_tokens=200, model_kwargs={"seed": 1})
    await _calls(models, model.bind_tools(TOOLS, tool_choice=TOOL["name"]))


@call
async def chat_anthropic(models: Models) -> None:
    model = ChatAnthropic(max_tokens=12, top_k=1, **models.anthropic)
    answer = await models.ask(model, MESSAGES)
    assert answer.content
    assert answer.response_metadata["stop_reason"] in ("end_turn", "max_tokens")
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = await models.chunks(model, MESSAGES)
    assert "".join(chunk.text for chunk in chunks) == answer.text
    await raises(
        ContextOverflowError,
        "prompt is too long",
        lambda: getattr(model, models.invoke)("What is os.path.join? " * 3000),
    )


@call
async def chat_anthropic_structured(models: Models) -> None:
    model = ChatAnthropic(max_tokens=200, **models.anthropic)
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Signature, method=method)
        assert isinstance(await models.ask(structured, MESSAGES), Signature)


@call
async def chat_anthropic_tools(models: Models) -> None:
    model = ChatAnthropic(max_tokens=200, top_k=1, **models.anthropic)
    one: dict[str, Any] = {"tool_choice": "any", "parallel_tool_calls": False}
    await _calls(models, model.bind_tools(TOOLS, **one))


main(
    {
        "sync": partial(Models, "invoke", "stream", "batch"),
        "async": partial(Models, "ainvoke", "astream", "abatch"),
    }
)
