"""huggingface_hub's InferenceClient and AsyncInferenceClient."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.system.clients.harness import (
    MESSAGES,
    PROMPT,
    SCHEMA,
    TOOL,
    TOOLS,
    call,
    call_of,
    fits,
    items,
    main,
    raises,
    whole,
)

ONE_CALL = {"parallel_tool_calls": False}


@call
async def text_generation(client: Any) -> None:
    """Its route puts the prompt in front unless told not to."""
    text = await whole(client.text_generation(PROMPT, max_new_tokens=8))
    assert text.startswith(PROMPT)
    new = await whole(client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False))
    assert text == PROMPT + new


@call
async def text_generation_details(client: Any) -> None:
    answer = await whole(
        client.text_generation(
            PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2
        )
    )
    details = answer.details
    assert (details.finish_reason, details.generated_tokens) == ("length", 8)
    assert len(details.tokens) == len(details.top_tokens) == 8
    assert all(len(others) == 2 for others in details.top_tokens)
    assert details.prefill[0].logprob is None
    assert all(token.logprob <= 0 for token in details.prefill[1:])


@call
async def text_generation_stream(client: Any) -> None:
    text = await whole(client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False))
    pieces = await items(client.text_generation(PROMPT, max_new_tokens=8, stream=True))
    assert len(pieces) == 8
    assert "".join(pieces) == text


@call
async def text_generation_stream_details(client: Any) -> None:
    events = await items(
        client.text_generation(
            PROMPT, max_new_tokens=8, stream=True, details=True, seed=3, do_sample=True
        )
    )
    assert [event.index for event in events] == list(range(1, 9))
    assert all(event.token.logprob <= 0 for event in events)
    assert all(event.generated_text is None for event in events[:-1])
    last = events[-1]
    assert last.generated_text.startswith(PROMPT)
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 8)
    assert (last.details.seed, last.details.input_length > 0) == (3, True)


@call
async def text_generation_every_parameter(client: Any) -> None:
    ask = partial(
        client.text_generation,
        PROMPT,
        details=True,
        do_sample=True,
        frequency_penalty=0.1,
        max_new_tokens=12,
        repetition_penalty=1.1,
        return_full_text=False,
        seed=7,
        stop=["\n\n\n"],
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        truncate=2,
        typical_p=0.9,
        watermark=True,
    )
    first, second = await whole(ask()), await whole(ask())
    assert first.generated_text == second.generated_text, "of one seed"
    assert first.details.seed == 7


@call
async def text_generation_stop(client: Any) -> None:
    text = await whole(client.text_generation(PROMPT, max_new_tokens=30, return_full_text=False))
    stop = text[5:8]
    answer = await whole(
        client.text_generation(
            PROMPT, max_new_tokens=30, return_full_text=False, details=True, stop=[stop]
        )
    )
    assert answer.generated_text == text[: text.index(stop) + len(stop)], "TGI keeps the string"
    assert answer.details.finish_reason == "stop_sequence"


@call
async def text_generation_best_of(client: Any) -> None:
    answer = await whole(
        client.text_generation(PROMPT, max_new_tokens=8, best_of=2, do_sample=True, details=True)
    )
    (other,) = answer.details.best_of_sequences
    assert other.generated_text.startswith(PROMPT)
    assert other.seed != answer.details.seed


@call
async def text_generation_errors(client: Any) -> None:
    ask = partial(client.text_generation, PROMPT, max_new_tokens=0)
    await raises(Exception, "strictly positive", ask)
    await raises(Exception, "strictly positive", lambda: items(ask(stream=True)))


@call
async def text_generation_grammar(client: Any) -> None:
    """Every type that TGI knew."""
    types: list[tuple[str, Any]] = [
        ("json", SCHEMA),
        ("json", json.dumps(SCHEMA)),
        ("json_schema", {"name": "function", "schema": SCHEMA}),
    ]
    ask = partial(client.text_generation, PROMPT, max_new_tokens=200, return_full_text=False)
    for name, value in types:
        fits(await whole(ask(grammar={"type": name, "value": value})))
    regex: Any = {"type": "regex", "value": "[0-9]{3}-(yes|no)"}
    text = await whole(ask(grammar=regex))
    assert re.fullmatch(regex["value"], text)
    assert "".join(await items(ask(grammar=regex, stream=True))).startswith(text)


@call
async def chat(client: Any) -> None:
    answer = await whole(
        client.chat_completion(
            MESSAGES,
            max_tokens=12,
            temperature=0.5,
            top_p=0.9,
            seed=1,
            n=1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias={},
            logprobs=True,
            top_logprobs=2,
            stop=["\n\n\n"],
        )
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@call
async def chat_stream(client: Any) -> None:
    ask = partial(client.chat_completion, MESSAGES, max_tokens=12, temperature=0)
    text = (await whole(ask())).choices[0].message.content
    chunks = await items(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert choices[-1].finish_reason in ("stop", "length")


@call
async def chat_as_openai(client: Any) -> None:
    create = partial(client.chat.completions.create, messages=MESSAGES, max_tokens=8)
    assert (await whole(create(model="tgi"))).choices[0].message.content
    chunks = await items(create(model="tgi", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@call
async def chat_response_format(client: Any) -> None:
    """OpenAI's form, which it sends to a URL in TGI's."""
    schema = {"name": "function", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    ask = partial(client.chat_completion, MESSAGES, max_tokens=200, response_format=form)
    fits((await whole(ask())).choices[0].message.content)
    chunks = await items(ask(stream=True))
    fits("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@call
async def chat_tools(client: Any) -> None:
    ask = partial(client.chat_completion, max_tokens=200, tools=TOOLS, extra_body=ONE_CALL)
    for choice in ("required", {"type": "function", "function": {"name": TOOL["name"]}}):
        answer = await whole(ask(MESSAGES, tool_choice=choice))
        (called,) = answer.choices[0].message.tool_calls
        assert called.function.name == TOOL["name"]
        fits(called.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"
    turn = {"role": "assistant", "tool_calls": [call_of(called.id, called.function.arguments)]}
    result = {"role": "tool", "tool_call_id": called.id, "content": "It joins paths."}
    answer = await whole(ask([*MESSAGES, turn, result], tool_choice="none"))
    assert answer.choices[0].message.content
    assert await whole(ask(MESSAGES, tool_choice="auto"))


@call
async def chat_tools_stream(client: Any) -> None:
    ask = partial(client.chat_completion, MESSAGES, max_tokens=200, tools=TOOLS)
    chunks = await items(ask(tool_choice="required", extra_body=ONE_CALL, stream=True))
    deltas = [entry for chunk in chunks for entry in chunk.choices[0].delta.tool_calls or []]
    assert "".join(delta.function.name or "" for delta in deltas) == TOOL["name"]
    fits("".join(delta.function.arguments or "" for delta in deltas))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@call
async def chat_errors(client: Any) -> None:
    """The asynchronous client of 0.36 keeps the body beside the error, not in its text."""
    ask = partial(client.chat_completion, MESSAGES, temperature=-1.0)
    for answer in (ask, lambda: items(ask(stream=True))):
        error = await raises(Exception, "", answer)
        assert "Bad Request" in f"{error} {error.__cause__}"
        assert "temperature" in f"{error} {getattr(error, 'response_error_payload', '')}"


@call
async def endpoint(client: Any) -> None:
    """The information about a server of Text Generation Inference, of whichever path it knows."""
    client.provider = "hf-inference"
    info = await whole(client.get_endpoint_info(model=client.model))
    assert info["model_id"] == "tgi-demo"
    assert info["max_total_tokens"] > info["max_input_tokens"] > 0


main({"sync": InferenceClient, "async": AsyncInferenceClient})
