"""The attributes of a model's work in traces.

Names are OpenTelemetry's conventions for generative AI, whose status is "development":
https://github.com/open-telemetry/semantic-conventions-genai/blob/main/docs/gen-ai/gen-ai-spans.md.
Those that hold prompts, answers, stop strings or tools are opt-in there, and are not set here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.observability.access_log import AccessRecord, LoggedGeneration

PROVIDER = "tgi"
"""The convention has no name for this server, and allows others than its own."""
_NAME_CHARACTERS = 128
_MOST_INTEGER = 2**63 - 1
"""Attributes are signed 64-bit numbers."""
_REASONS = {FinishReason.LENGTH: "length"}


def model_of(record: AccessRecord, served: str) -> str:
    """The model that a request names; ``served`` if it names none."""
    return (record.model or served)[:_NAME_CHARACTERS]


def request_attributes(record: AccessRecord, served: str) -> dict[str, Any]:
    """The attributes that are known when the model's work begins."""
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_of(record, served),
    }


def response_attributes(record: AccessRecord, served: str) -> dict[str, Any]:
    """The attributes that are known when it has ended."""
    return {
        name: value
        for name, value in (*_parameters(record), *_results(record, served))
        if value is not None
    }


def _parameters(record: AccessRecord) -> Iterator[tuple[str, Any]]:
    generations = record.generations
    if record.streamed:
        yield "gen_ai.request.stream", True
    if len(generations) > 1:
        yield "gen_ai.request.choice.count", len(generations)
    if not generations:
        return
    spec = generations[0].spec
    sampling = spec.sampling
    yield "gen_ai.request.max_tokens", spec.max_new_tokens
    yield "gen_ai.request.temperature", float(sampling.temperature)
    if spec.seed is not None and spec.seed <= _MOST_INTEGER:
        yield "gen_ai.request.seed", spec.seed
    if sampling.top_k:
        yield "gen_ai.request.top_k", float(sampling.top_k)
    if sampling.top_p < 1:
        yield "gen_ai.request.top_p", float(sampling.top_p)
    for name in ("frequency_penalty", "presence_penalty"):
        if penalty := getattr(sampling, name):
            yield f"gen_ai.request.{name}", float(penalty)


def _results(record: AccessRecord, served: str) -> Iterator[tuple[str, Any]]:
    generations = record.generations
    if not generations:
        return
    leads = list({id(each.lead): each.lead for each in generations}.values())
    yield "gen_ai.response.model", generations[0].spec.adapter or served
    reasons = [_REASONS.get(each, "stop") for each in map(_ended, generations) if each is not None]
    if reasons:
        yield "gen_ai.response.finish_reasons", reasons
    yield "gen_ai.usage.input_tokens", sum(lead.prompt_tokens for lead in leads)
    yield "gen_ai.usage.cache_read.input_tokens", sum(lead.cached_tokens for lead in leads)
    yield "gen_ai.usage.output_tokens", sum(each.generated_tokens for each in generations)
    if reasoning := sum(each.reasoning_tokens for each in generations):
        yield "gen_ai.usage.reasoning.output_tokens", reasoning
    first = [each.timings.first_token for each in generations if each.timings.first_token]
    if record.streamed and first:
        yield "gen_ai.response.time_to_first_chunk", min(first) - record.began


def _ended(generation: LoggedGeneration) -> FinishReason | None:
    return generation.finish_reason
