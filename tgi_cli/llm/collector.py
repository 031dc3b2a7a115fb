"""Collects the outputs of requests: text, log-probabilities, logits and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.llm.engine import InProcessEngine, RequestGroup, RequestUpdate
from tgi_cli.llm.options import GenerationOptions, Prompt
from tgi_cli.llm.outputs import Completion, Piece
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.text.sequence_text import PromptLogprobTable, SequenceText
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer


class Collector:
    """One request while it runs.

    Attributes:
        request: The request as the engine got it.
        prompt: Its prompt.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        index: int,
        stops: StopStrings,
        tokenizer: Tokenizer,
        hidden_ids: frozenset[int],
        start_ids: tuple[int, ...] = (),
    ) -> None:
        """Begin. ``start_ids`` precede the answer of an encoder-decoder model, not the prompt."""
        self.request = request
        self.prompt = prompt
        self._index = index
        self._text = SequenceText(
            tokenizer,
            start_ids or prompt.ids,
            stops,
            hidden_ids=hidden_ids | request.stop_token_ids,
        )
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._prompt_scores = PromptLogprobTable()
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._error = ""
        self._cached_tokens = 0
        self._submitted = time.monotonic()
        self._queue_seconds = 0.0
        self._first_token: float | None = None
        self._ended = self._submitted

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, or None while it runs.

        A stop string ends it before the engine knows: its caller then cancels the request.
        """
        reason = self._text.finish_reason
        if reason is None:
            return None
        failed = reason in (FinishReason.ERROR, FinishReason.GRAMMAR)
        return "error" if failed else reason.name.lower()

    def take(self, update: RequestUpdate) -> Piece:
        """Add an update. Returns what it adds to a stream."""
        batch, text = update.batch, self._text
        if batch.started is not None:
            self._queue_seconds = batch.started.queue_ns / 1e9
            self._cached_tokens = batch.started.cached_tokens
        for run in batch.prompt_logprobs:
            self._prompt_scores.take(run)
        for logits in batch.logits:
            for offset, row in enumerate(logits.values):
                self._logits[logits.start + offset] = row
        if batch.token_ids and self._first_token is None:
            self._first_token = update.arrived
        first = len(self._token_ids)
        for i, token in enumerate(batch.token_ids):
            text.push(token)
            self._token_ids.append(token)
            self._logprobs.append(batch.logprobs[i])
            if self.request.sampling.top_logprobs:
                self._top_logprobs.append(_by_token(batch.top_ids[i], batch.top_logprobs[i]))
            if text.finish_reason is not None:
                break
        if batch.finished is not None and text.finish_reason is None:
            text.finish(batch.finished.reason)
            self._error = batch.finished.error
        if text.finish_reason is not None:
            self._ended = update.arrived
        return Piece(
            text=text.take(),
            token_ids=self._token_ids[first:],
            logprobs=self._logprobs[first:],
            top_logprobs=self._top_logprobs[first:],
            finish_reason=self.finish_reason,
        )

    def completion(self, first: Collector | None = None) -> Completion:
        """Everything so far.

        Args:
            first: Collector of the prompt's first sample, which the engine reports on the prompt
                to. Default: this one.
        """
        first = first or self
        prompt, request = self.prompt, self.request
        size = len(prompt.ids)
        num_tops = first.request.prompt_logprobs
        scores = first._prompt_scores
        return Completion(
            request_id=request.request_id,
            prompt_index=prompt.index,
            index=self._index,
            prompt=prompt.text,
            prompt_ids=list(prompt.ids),
            text=self._text.text,
            token_ids=list(self._token_ids),
            logprobs=list(self._logprobs),
            top_logprobs=list(self._top_logprobs),
            finish_reason=self.finish_reason or "cancelled",
            stop=self._text.stop,
            error=self._error,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=None if num_tops is None else list(scores.logprobs),
            prompt_top_logprobs=[_by_token(*top) for top in scores.tops] if num_tops else [],
            context_logits=(first._rows(0, size) if first.request.return_context_logits else None),
            generation_logits=(
                self._rows(size - 1, size - 1 + len(self._token_ids))
                if request.return_generation_logits
                else None
            ),
            queue_seconds=self._queue_seconds,
            first_token_seconds=(
                None if self._first_token is None else self._first_token - self._submitted
            ),
            total_seconds=self._ended - self._submitted,
        )

    def _rows(self, start: int, end: int) -> NDArray[np.float32]:
        """The logits of positions from ``start`` to ``end`` that were reported."""
        rows = [self._logits[i] for i in range(start, end) if i in self._logits]
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)


def _by_token(ids: Sequence[int], logprobs: Sequence[float]) -> dict[int, float]:
    return dict(zip(ids, logprobs, strict=True))


def run(engine: InProcessEngine, collectors: Sequence[Collector], progress: bool | None) -> None:
    """Submit all requests and wait for them; leaving early cancels those that are live.

    Raises:
        EngineDeadError: The engine's loop has ended.
    """
    by_id = {collector.request.request_id: collector for collector in collectors}
    with (
        closing(RequestGroup(engine)) as group,
        Throughput(len(collectors), progress) as throughput,
    ):
        for collector in collectors:
            group.submit(collector.request)
        while group.live:
            prompt_tokens = new_tokens = done = 0
            for update in group.receive():
                collector = by_id[update.request_id]
                piece = collector.take(update)
                if update.batch.started is not None:
                    prompt_tokens += len(collector.prompt.ids)
                new_tokens += len(piece.token_ids)
                if piece.finish_reason is not None:
                    done += 1
                    group.drop(update.request_id)
            throughput.add(prompt_tokens, new_tokens, done)


def completions_of(collectors: Sequence[Collector], options: GenerationOptions) -> list[Completion]:
    """The ``n`` completions of each prompt, one prompt after another; the best first if ranked."""
    completions: list[Completion] = []
    for start in range(0, len(collectors), options.samples):
        samples = collectors[start : start + options.samples]
        found = [collector.completion(samples[0]) for collector in samples]
        if options.samples > options.n:
            found.sort(key=lambda completion: -completion.mean_logprob)
            found = [replace(each, index=i) for i, each in enumerate(found[: options.n])]
        completions += found
    return completions


class Throughput(ProgressReporter):
    """A progress bar over requests, with the tokens per second so far."""

    def __init__(self, num_requests: int, show_bar: bool | None) -> None:
        super().__init__("requests", show_bar=show_bar, log_interval=None)
        self._prompt_tokens = self._new_tokens = 0
        self._since = time.monotonic()
        self.start("", num_requests)

    def add(self, prompt_tokens: int, new_tokens: int, requests: int) -> None:
        """Count tokens and finished requests."""
        self._prompt_tokens += prompt_tokens
        self._new_tokens += new_tokens
        if self.show_bar:
            seconds = max(time.monotonic() - self._since, 1e-9)
            speed = f"{self._prompt_tokens / seconds:.0f} tokens/s in, "
            self.advance(requests, speed + f"{self._new_tokens / seconds:.0f} out")
