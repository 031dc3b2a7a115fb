"""text-generation 0.7: TGI's own client, which posts to ``/`` whatever it wants."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError
from text_generation.types import Grammar, GrammarType, Message, Tool

from tests.system.clients.harness import (
    PROMPT,
    SCHEMA,
    TOOL,
    call,
    fits,
    items,
    main,
    raises,
    whole,
)

MESSAGES = [Message(role="user", content="What does os.path.join do?")]


@call
async def generate(client: Any) -> None:
    answer = await whole(client.generate(PROMPT, max_new_tokens=8, decoder_input_details=True))
    details = answer.details
    assert answer.generated_text == "".join(token.text for token in details.tokens)
    assert (details.finish_reason.value, details.generated_tokens) == ("length", 8)
    assert details.seed is None, "it is greedy unless asked"
    assert details.prefill[0].logprob is None
    assert all(token.logprob <= 0 for token in details.prefill[1:])


@call
async def generate_every_parameter(client: Any) -> None:
    ask = partial(
        client.generate,
        PROMPT,
        do_sample=True,
        max_new_tokens=12,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        return_full_text=True,
        seed=7,
        stop_sequences=["\n\n\n"],
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        truncate=2,
        typical_p=0.9,
        watermark=True,
        top_n_tokens=2,
    )
    first, second = await whole(ask()), await whole(ask())
    assert first.generated_text == second.generated_text, "of one seed"
    assert first.generated_text.startswith(PROMPT)
    assert first.details.seed == 7
    assert all(len(others) == 2 for others in first.details.top_tokens)


@call
async def generate_best_of(client: Any) -> None:
    answer = await whole(client.generate(PROMPT, max_new_tokens=8, best_of=2, do_sample=True))
    (other,) = answer.details.best_of_sequences
    assert other.generated_text
    assert other.seed != answer.details.seed


@call
async def generate_stream(client: Any) -> None:
    text = (await whole(client.generate(PROMPT, max_new_tokens=8))).generated_text
    events = await items(client.generate_stream(PROMPT, max_new_tokens=8, top_n_tokens=2))
    assert "".join(event.token.text for event in events) == text
    assert all(event.generated_text is None for event in events[:-1])
    assert events[-1].generated_text == text
    details = events[-1].details
    assert (details.finish_reason.value, details.generated_tokens) == ("length", 8)


@call
async def generate_grammar(client: Any) -> None:
    ask = partial(client.generate, PROMPT, max_new_tokens=200)
    fits((await whole(ask(grammar=Grammar(type=GrammarType.Json, value=SCHEMA)))).generated_text)
    regex = Grammar(type=GrammarType.Regex, value="[0-9]{3}-(yes|no)")
    text = (await whole(ask(grammar=regex))).generated_text
    assert re.fullmatch(regex.value, text)
    stream = partial(client.generate_stream, PROMPT, max_new_tokens=200, grammar=regex)
    assert (await items(stream()))[-1].generated_text == text


@call
async def generate_errors(client: Any) -> None:
    ask = partial(client.generate, "x" * 9000, max_new_tokens=8)
    await raises(ValidationError, "must be <= 2048", ask)
    stream = partial(client.generate_stream, "x" * 9000, max_new_tokens=8)
    await raises(ValidationError, "must be <= 2048", lambda: items(stream()))


@call
async def chat(client: Any) -> None:
    answer = await whole(
        client.chat(
            MESSAGES,
            max_tokens=12,
            temperature=0.5,
            top_p=0.9,
            seed=1,
            n=1,
            frequency_penalty=0.1,
            presence_penalty=0.1,
            logit_bias=[],
            logprobs=True,
            top_logprobs=2,
        )
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert all(len(token["top_logprobs"]) == 2 for token in choice.logprobs["content"])
    assert answer.usage["completion_tokens"] > 0


@call
async def chat_tools(client: Any) -> None:
    tools = [Tool(type="function", function=TOOL)]
    answer = await whole(
        client.chat(MESSAGES, max_tokens=200, tools=tools, tool_choice=TOOL["name"])
    )
    (called,) = answer.choices[0].message.tool_calls
    assert called["function"]["name"] == TOOL["name"]
    fits(called["function"]["arguments"])


main({"sync": Client, "async": AsyncClient})
