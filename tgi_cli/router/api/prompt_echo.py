"""A prompt's own tokens and their log-probabilities, as each API shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tgi_cli.router.api.openai_common import spelled
from tgi_cli.router.api.schemas.tgi import PrefillToken
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.prompt_logprobs import encoded_rows, shortest
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import TextWorkers

_INLINE_TOKENS = 256
"""Of a prompt, shown on the event loop itself: 1 ms, if none of them was shown before."""


async def prefill_tokens(
    generation: Generation, tokenizer: Tokenizer, workers: TextWorkers
) -> list[PrefillToken]:
    """TGI's ``prefill``, empty unless asked for; a long one is made by a worker."""
    if generation.spec.prompt_logprobs is None:
        return []
    if generation.prompt_tokens <= _INLINE_TOKENS:
        return _prefill_tokens(generation, tokenizer)
    return await workers.run(_prefill_tokens, generation, tokenizer)


def _prefill_tokens(generation: Generation, tokenizer: Tokenizer) -> list[PrefillToken]:
    logprobs = (None, *map(shortest, generation.prompt_scores.logprobs))
    return [
        PrefillToken(token_id, tokenizer.surface(token_id), logprob)
        for token_id, logprob in zip(generation.prompt_ids, logprobs, strict=True)
    ]


def scores_are_complete(generation: Generation) -> bool:
    """Whether all that was asked of its prompt is known."""
    scores = generation.prompt_scores
    return (
        generation.spec.prompt_logprobs is None
        or len(scores.logprobs) >= generation.prompt_tokens - 1
    )


@dataclass(slots=True)
class EchoReport:
    """``logprobs`` of a prompt that is echoed: parallel lists, ``tops`` as JSON items."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    tops: bytes = b""


def echo_report(
    generation: Generation, tokenizer: Tokenizer, text: str, as_ids: bool
) -> EchoReport:
    """The report on a prompt within its echoed ``text``.

    Tokens that the tokenizer adds stand before the text and take no place in it. Costs 2 us for
    each log-probability: long ones are made by a worker.
    """
    detokenizer = Detokenizer(tokenizer)
    report = EchoReport()
    offset = 0
    for token_id in generation.prompt_ids:
        special = token_id in tokenizer.special_ids
        token = tokenizer.surface(token_id) if special else detokenizer.push(token_id)
        report.tokens.append(token)
        report.offsets.append(offset)
        if not special or text.startswith(token, offset):
            offset += len(token)
    report.logprobs = [None, *map(shortest, generation.prompt_scores.logprobs)]
    report.tops = encoded_rows(_tops(generation, tokenizer, report, as_ids))
    if as_ids:
        report.tokens = [spelled(token_id, "", True) for token_id in generation.prompt_ids]
    return report


def _tops(
    generation: Generation, tokenizer: Tokenizer, report: EchoReport, as_ids: bool
) -> Iterator[dict[str, float | None] | None]:
    """The likeliest in place of each token; that one is among them, and counts once."""
    yield None
    for place, (ids, values) in enumerate(generation.prompt_scores.tops, 1):
        token_id = generation.prompt_ids[place]
        row: dict[str, float | None] = {
            spelled(other, tokenizer.surface(other), as_ids): shortest(value)
            for other, value in zip(ids, values, strict=True)
            if other != token_id
        }
        row[spelled(token_id, report.tokens[place], as_ids)] = report.logprobs[place]
        yield row
