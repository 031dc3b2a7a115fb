"""llama.cpp's completion in the middle of a text, for editors: ``POST /infill``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.completions import fill_in_middle
from tgi_cli.router.api.openai_common import GENERATION, timings_of
from tgi_cli.router.api.openai_parameters import openai_spec, requested_length
from tgi_cli.router.api.schemas.infill import InfillAnswer, InfillChunk, InfillRequest
from tgi_cli.router.api.schemas.openai_answers import OpenAIErrorResponse
from tgi_cli.router.generation.deltas import Delta, Finish
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.merge import merge
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import Endpoint, RequestContext
from tgi_cli.router.http.error_styles import openai_body
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import RouterState, prompt_characters
from tgi_cli.text.fill_in_middle import File

_encode = msgspec.json.Encoder().encode

_STOP_TYPES = {
    FinishReason.LENGTH: "limit",
    FinishReason.EOS_TOKEN: "eos",
    FinishReason.STOP_SEQUENCE: "word",
}

_SAMPLERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "temperature": (("temperature", 1.0),),
    "top_k": (("top_k", 0),),
    "top_p": (("top_p", 1.0),),
    "min_p": (("min_p", 0.0),),
    "typ_p": (("typical_p", 1.0),),
    "penalties": (
        ("repeat_penalty", 1.0),
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
    ),
}
"""llama.cpp's samplers, and the parameters that switch each off."""
_OTHER_NAMES = {"typical_p": "typ_p"}
_WITHOUT_EFFECT = ("infill",)
"""It prefers whole words among tokens of a common prefix; editors name it, and any text is a valid
answer without it."""


async def infill(context: RequestContext[InfillRequest]) -> Response | EventStream:
    """The text between a prefix and a suffix, complete or as a stream."""
    body, state = context.body, context.state
    with context.preparing():
        adapter = await state.adapters.for_openai(body.model, body.adapter_id)
        spec = replace(_spec(body, state), adapter=adapter)
    generations = await context.open([spec])
    generation = generations[0]
    model = body.model or state.config.model_id
    if body.stream:
        encoder = InfillEvents(generation, model, bool(body.timings_per_token))
        return context.stream(merge(generations), encoder, prompt_characters(generations))
    (whole,) = await context.collect(generations)
    text = _indented(whole.finish.text, body.n_indent or 0)
    answer = _answer(generation, model, whole.finish, text)
    return context.answer(_selected(answer, body.response_fields), generations)


def _spec(body: InfillRequest, state: RouterState) -> GenerationSpec:
    """Check the request, and make its spec. Raises ApiError."""
    found = fill_in_middle(state, "input_suffix")
    _apply_samplers(body)
    if (body.n or 1) != 1:
        raise errors.unsupported("n", "`n` other than 1", "unsupported_value")
    if body.stream and (body.n_indent or 0) > 0:
        raise errors.unsupported("n_indent", "`n_indent` in a stream", "unsupported_value")
    if body.stream and body.response_fields:
        raise errors.unsupported(
            "response_fields", "`response_fields` in a stream", "unsupported_value"
        )
    spec = openai_spec(
        body,
        state,
        top_logprobs=0,
        add_special_tokens=True,
        prompt_only=requested_length(body)[1] == 0,
    )
    if spec.truncate is not None:
        raise errors.validation("a prompt with a suffix cannot be truncated", "input_suffix")
    files = [File(file.filename, file.text) for file in body.input_extra or ()]
    prompt = found.prompt(
        body.input_prefix + (body.prompt or ""),
        body.input_suffix,
        files,
        add_special_tokens=spec.add_special_tokens,
    )
    seconds = (body.t_max_predict_ms or 0) / 1e3
    return replace(
        spec,
        prompt=prompt,
        prompt_param="input_prefix",
        stop_token_ids=spec.stop_token_ids | found.stop_ids,
        line_seconds=seconds if seconds > 0 else None,
    )


def _apply_samplers(body: InfillRequest) -> None:
    """Switch off the samplers that ``samplers`` lacks. Raises ApiError for unknown ones."""
    if not body.samplers:
        return
    named = {_OTHER_NAMES.get(name, name) for name in body.samplers}
    for name in named - _SAMPLERS.keys() - set(_WITHOUT_EFFECT):
        raise errors.unsupported("samplers", f"the sampler {name!r}", "unsupported_value")
    for name, parameters in _SAMPLERS.items():
        if name not in named:
            for parameter, neutral in parameters:
                setattr(body, parameter, neutral)


def _indented(text: str, indent: int) -> str:
    """The text up to the first further line with less indentation; empty lines do not count."""
    if indent <= 0:
        return text
    lines = text.split("\n")
    for number, line in enumerate(lines[1:], 1):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            return "\n".join(lines[:number])
    return text


def _answer(generation: Generation, model: str, finish: Finish, text: str) -> InfillAnswer:
    return InfillAnswer(
        content=text,
        model=model,
        tokens_predicted=0 if generation.spec.prompt_only else generation.generated_tokens,
        tokens_evaluated=generation.prompt_tokens,
        tokens_cached=generation.cached_tokens,
        has_new_line="\n" in finish.text,
        stop_type=_STOP_TYPES[finish.reason],
        stopping_word=finish.stop or "",
        timings=timings_of([generation]),
    )


def _selected(answer: InfillAnswer, fields: Sequence[str] | None) -> Any:
    """The fields that ``response_fields`` names, each under the name given; missing ones left out.

    Without names, the whole answer.
    """
    if not fields:
        return answer
    whole = msgspec.to_builtins(answer)
    selected: dict[str, Any] = {}
    for name in fields:
        key, slash, inner = name.partition("/")
        value = whole.get(key)
        if slash:
            value = value.get(inner) if isinstance(value, dict) else None
        if value is not None:
            selected[name] = value
    return selected


class InfillEvents:
    """llama.cpp's events; the last has no text, and all that a complete answer has besides."""

    def __init__(self, generation: Generation, model: str, timings: bool) -> None:
        self._generation = generation
        self._model = model
        self._timings = timings

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        generation = self._generation
        events = b""
        if delta.text:
            chunk = InfillChunk(
                content=delta.text,
                tokens_predicted=generation.generated_tokens,
                tokens_evaluated=generation.prompt_tokens,
            )
            if self._timings:
                chunk.timings = timings_of([generation])
            events = b"data: %b\n\n" % _encode(chunk)
        if delta.finish is not None:
            answer = _answer(generation, self._model, delta.finish, "")
            events += b"data: %b\n\n" % _encode(answer)
        return events

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b"data: " + openai_body(error) + b"\n\n"

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b""


INFILL = replace(
    GENERATION,
    body=(InfillRequest,),
    answer=(InfillAnswer,),
    events=(InfillChunk, InfillAnswer, OpenAIErrorResponse),
    example={"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16},
)

ROUTES = [Endpoint("/infill", infill, INFILL)]
