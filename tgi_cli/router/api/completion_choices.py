"""The choices of text completions, complete or as chunks, with the prompts that they echo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
from msgspec import UNSET

from tgi_cli.router.api.openai_common import FINISH_REASONS, spelled
from tgi_cli.router.api.schemas.openai import CompletionRequest
from tgi_cli.router.api.schemas.openai_answers import CompletionChoice, CompletionLogprobs
from tgi_cli.router.generation.deltas import Delta, DeltaSource, Token
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.merge import Whole
from tgi_cli.router.generation.prompt_logprobs import INLINE_SCORES, encoded_rows, shortest
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.workers import TextWorkers

Tops = list[dict[str, float] | None]


@dataclass(slots=True)
class EchoReport:
    """``logprobs`` of an echoed prompt: parallel lists, ``tops`` as the items of a JSON array."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    tops: bytes = b""


class Choice:
    """Writes one continuation, complete or as chunks.

    Attributes:
        awaits_report: the prompt's log-probabilities are requested but not known yet.
    """

    def __init__(
        self, body: CompletionRequest, generation: Generation, echoed: str, tokenizer: Tokenizer
    ) -> None:
        self.generation = generation
        self._logprobs = body.logprobs is not None
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._token_ids = bool(body.return_token_ids)
        self._first = True
        self.awaits_report = bool(body.echo) and self._logprobs
        self._report: EchoReport | None = None
        self._echoed = echoed
        self._tokenizer = tokenizer
        self._offset = 0
        self._held: list[Delta] = []

    def report(self) -> EchoReport:
        """Report the prompt, whose log-probabilities must be complete."""
        return echo_report(self.generation, self._tokenizer, self._echoed, self._as_ids)

    def take(self, report: EchoReport) -> None:
        """Start with this report of the prompt."""
        self._report = report
        self.awaits_report = False

    async def whole(self, whole: Whole, index: int, workers: TextWorkers) -> CompletionChoice:
        """The complete choice; a worker thread renders long reports."""
        tokens, tops = whole.tokens, whole.top_tokens
        if self._logprobs and len(tokens) * (1 + len(tops[0] if tops else ())) > INLINE_SCORES:
            logprobs = await workers.run(self._log_probabilities, tokens, tops)
        else:
            logprobs = self._log_probabilities(tokens, tops)
        choice = CompletionChoice(
            index=index,
            logprobs=logprobs,
            text=self._echoed + whole.finish.text,
            finish_reason=FINISH_REASONS[whole.finish.reason],
        )
        self._add_ids(choice, tokens)
        return choice

    def parts(self, delta: Delta) -> list[CompletionChoice]:
        """The chunks that a delta makes.

        Chunks wait for the report of the prompt, as another sample may be faster than the first.
        """
        self._held.append(delta)
        return [] if self.awaits_report else self.rest()

    def rest(self) -> list[CompletionChoice]:
        """The chunks that waited."""
        held, self._held = self._held, []
        return [part for part in map(self._part, held) if part is not None]

    def _part(self, delta: Delta) -> CompletionChoice | None:
        silent = not self._logprobs and not (self._token_ids and delta.tokens)
        if silent and not delta.text and delta.finish is None:
            return None
        logprobs = self._log_probabilities(delta.tokens, delta.top_tokens)
        echoed, self._echoed = self._echoed, ""
        part = CompletionChoice(
            index=delta.index,
            text=echoed + delta.text,
            logprobs=logprobs,
            finish_reason=None if delta.finish is None else FINISH_REASONS[delta.finish.reason],
        )
        self._add_ids(part, delta.tokens)
        return part

    def _add_ids(self, choice: CompletionChoice, tokens: Sequence[Token]) -> None:
        """vLLM's ``return_token_ids``: those of the chunk, and in the first the prompt's."""
        if not self._token_ids:
            return
        choice.token_ids = [token.id for token in tokens]
        choice.prompt_token_ids = self.generation.prompt_ids if self._first else UNSET
        self._first = False

    def _log_probabilities(
        self, tokens: Sequence[Token], top_tokens: Sequence[Sequence[Token]]
    ) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=None, text_offset=[])
        tops = encoded_rows(self._tops(tokens, top_tokens))
        report, self._report = self._report, None
        if report is not None:
            found.tokens += report.tokens
            found.token_logprobs += report.logprobs
            found.text_offset += report.offsets
            tops = report.tops + (b"," if tops else b"") + tops
            self._offset = len(self._echoed)
        for token in tokens:
            found.tokens.append(spelled(token.id, token.text, self._as_ids))
            found.token_logprobs.append(token.logprob)
            found.text_offset.append(self._offset)
            self._offset += len(token.text)
        # Already encoded, as there may be many.
        found.top_logprobs = cast("Tops", msgspec.Raw(b"[%b]" % tops))
        return found

    def _tops(
        self, tokens: Sequence[Token], top_tokens: Sequence[Sequence[Token]]
    ) -> Iterator[dict[str, float]]:
        """The likeliest tokens at each position; the actual one is among them, and counts once."""
        for position, token in enumerate(tokens):
            others = top_tokens[position] if top_tokens else ()
            yield {
                spelled(
                    other.id, token.text if other.id == token.id else other.text, self._as_ids
                ): other.logprob
                for other in (*others, token)
            }


class EchoedSource:
    """Deltas of a stream that waits for the reports of its echoed prompts."""

    def __init__(
        self, source: DeltaSource, choices: Sequence[Choice], workers: TextWorkers
    ) -> None:
        self._source = source
        self._choices = choices
        self._workers = workers
        self._waits = True

    def __aiter__(self) -> EchoedSource:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._source)
        if self._waits:
            await prepare_echoes(self._choices, self._workers)
            self._waits = any(choice.awaits_report for choice in self._choices)
        return delta

    def close(self) -> None:
        """Close the source. Idempotent."""
        self._source.close()


async def prepare_echoes(choices: Sequence[Choice], workers: TextWorkers) -> None:
    """Report the prompts that are complete, each once; worker threads render long reports."""
    made: dict[int, EchoReport] = {}
    for choice in choices:
        generation = choice.generation
        complete = (
            generation.spec.prompt_logprobs is None
            or len(generation.prompt_scores.logprobs) >= generation.prompt_tokens - 1
        )
        if not choice.awaits_report or not complete:
            continue
        lead = generation.lead.index
        if lead not in made:
            size = generation.prompt_tokens * (1 + (generation.spec.prompt_logprobs or 0))
            long = size > INLINE_SCORES
            made[lead] = await workers.run(choice.report) if long else choice.report()
        choice.take(made[lead])


def echo_report(
    generation: Generation, tokenizer: Tokenizer, text: str, as_ids: bool
) -> EchoReport:
    """Report a prompt within its echoed ``text``.

    Tokens that the tokenizer adds precede the text and have no extent in it. Costs 2 us for each
    log-probability, so that long prompts belong in a worker thread.
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
    report.tops = encoded_rows(_prompt_tops(generation, tokenizer, report, as_ids))
    if as_ids:
        report.tokens = [spelled(token_id, "", True) for token_id in generation.prompt_ids]
    return report


def _prompt_tops(
    generation: Generation, tokenizer: Tokenizer, report: EchoReport, as_ids: bool
) -> Iterator[dict[str, float | None] | None]:
    """The likeliest tokens at each position; the actual one is among them, and counts once."""
    yield None
    for position, (ids, values) in enumerate(generation.prompt_scores.tops, 1):
        token_id = generation.prompt_ids[position]
        row: dict[str, float | None] = {
            spelled(other, tokenizer.surface(other), as_ids): shortest(value)
            for other, value in zip(ids, values, strict=True)
            if other != token_id
        }
        row[spelled(token_id, report.tokens[position], as_ids)] = report.logprobs[position]
        yield row
