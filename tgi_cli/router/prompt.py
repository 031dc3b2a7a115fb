"""A prompt's own tokens and their log-probabilities, as each API shows them."""

from __future__ import annotations

from tgi_cli.router.generation import Generation
from tgi_cli.router.schemas.native import PrefillToken
from tgi_cli.router.schemas.openai import CompletionLogprobs
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.offload import TextWorkers
from tgi_cli.text.tokenizer import Tokenizer

_INLINE_TOKENS = 256
"""Of a prompt, shown on the event loop itself: 1 ms, if none of them was shown before."""


async def prefill_tokens(
    generation: Generation, tokenizer: Tokenizer, workers: TextWorkers
) -> list[PrefillToken]:
    """TGI's ``prefill``: empty unless asked for."""
    if generation.spec.prompt_logprobs is None:
        return []
    logprobs = (None, *generation.prompt_scores.logprobs)

    def shown() -> list[PrefillToken]:
        return [
            PrefillToken(token_id, tokenizer.surface(token_id), logprob)
            for token_id, logprob in zip(generation.prompt_ids, logprobs, strict=True)
        ]

    return shown() if len(logprobs) <= _INLINE_TOKENS else await workers.run(shown)


def scores_are_complete(generation: Generation) -> bool:
    """Whether all that was asked of its prompt is known."""
    scores = generation.prompt_scores
    return (
        generation.spec.prompt_logprobs is None
        or len(scores.logprobs) >= generation.prompt_tokens - 1
    )


def echoed_logprobs(
    generation: Generation, tokenizer: Tokenizer, text: str
) -> tuple[CompletionLogprobs, int]:
    """``logprobs`` of the prompt within its echoed ``text``, and where the text goes on.

    Tokens that the tokenizer adds stand before the text and take no place in it.
    """
    detokenizer = Detokenizer(tokenizer)
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    scores = generation.prompt_scores
    top_logprobs: list[dict[str, float] | None] = []
    offset = 0
    for place, token_id in enumerate(generation.prompt_ids):
        special = token_id in tokenizer.special_ids
        token = tokenizer.surface(token_id) if special else detokenizer.push(token_id)
        found.tokens.append(token)
        found.text_offset.append(offset)
        if not special or text.startswith(token, offset):
            offset += len(token)
        if place == 0:
            found.token_logprobs.append(None)
            top_logprobs.append(None)
            continue
        logprob = scores.logprobs[place - 1]
        found.token_logprobs.append(logprob)
        top_logprobs.append(
            {
                token if other == token_id else tokenizer.surface(other): value
                for other, value in (*scores.tops[place - 1], (token_id, logprob))
            }
        )
    found.top_logprobs = top_logprobs if generation.spec.prompt_logprobs else None
    return found, len(text)
