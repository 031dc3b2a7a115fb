"""From what the engine says of one request to text, and to what its caller gets."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.llm.engine import Update
from tgi_cli.llm.options import Prompt
from tgi_cli.llm.outputs import Completion, Piece
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.stop import StopBuffer, StopStrings
from tgi_cli.text.tokenizer import Tokenizer


class Collector:
    """One request while it runs.

    Attributes:
        request: as it was given to the engine.
        finish_reason: None while it runs. It may end before the engine knows, by a stop string:
            then whoever feeds it cancels the request.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        index: int,
        stops: StopStrings,
        tokenizer: Tokenizer,
        hidden_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.index = index
        self.finish_reason: str | None = None
        self._hidden = hidden_ids | request.stop_token_ids
        self._detokenizer = Detokenizer(tokenizer, prompt.ids)
        self._stops = StopBuffer(stops)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._prompt_logprobs: list[float] = []
        self._prompt_top: list[dict[int, float]] = []
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._error = ""
        self._cached_tokens = 0
        self._submitted = time.monotonic()
        self._queue_seconds = 0.0
        self._first_token: float | None = None
        self._ended = self._submitted

    def take(self, update: Update) -> Piece:
        """Apply one update; what it adds to the stream."""
        if update.started is not None:
            self._queue_seconds = update.started.queue_ns / 1e9
            self._cached_tokens = update.started.cached_tokens
        for scores in update.prompt_logprobs:
            self._prompt_logprobs += scores.logprobs
            self._prompt_top += map(_ranked, scores.top_ids, scores.top_logprobs)
        for logits in update.logits:
            for offset, row in enumerate(logits.values):
                self._logits[logits.start + offset] = row
        first = len(self._token_ids)
        text = self._take_tokens(update)
        finished = update.finished
        if finished is not None and self.finish_reason is None:
            failed = finished.reason in (FinishReason.ERROR, FinishReason.GRAMMAR)
            self.finish_reason = "error" if failed else finished.reason.name.lower()
            self._error = finished.error
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        if text:
            self._texts.append(text)
        if self.finish_reason is not None:
            self._ended = update.at
        return Piece(
            text=text,
            token_ids=self._token_ids[first:],
            logprobs=self._logprobs[first:],
            top_logprobs=self._top_logprobs[first:],
            finish_reason=self.finish_reason,
        )

    def _take_tokens(self, update: Update) -> str:
        """Append the tokens up to the one that completes a stop string; their text."""
        if update.token_ids and self._first_token is None:
            self._first_token = update.at
        texts = []
        for i, token in enumerate(update.token_ids):
            self._token_ids.append(token)
            self._logprobs.append(update.logprobs[i])
            if self.request.sampling.top_logprobs:
                self._top_logprobs.append(_ranked(update.top_ids[i], update.top_logprobs[i]))
            if token not in self._hidden:
                texts.append(self._stops.push(self._detokenizer.push(token)))
            if self._stops.hit is not None:
                self.finish_reason = "stop_sequence"
                break
        return "".join(texts)

    def completion(self, first: Collector | None = None, index: int | None = None) -> Completion:
        """All of it, so far.

        Args:
            first: the collector of the prompt's first sample, which knows what is said of the
                prompt; None: this one.
            index: among the continuations that are returned; None: as it was generated.
        """
        first = first or self
        prompt, request = self.prompt, self.request
        size = len(prompt.ids)
        scored = first.request.prompt_logprobs is not None
        return Completion(
            request_id=request.request_id,
            prompt_index=prompt.index,
            index=self.index if index is None else index,
            prompt=prompt.text,
            prompt_ids=list(prompt.ids),
            text="".join(self._texts),
            token_ids=list(self._token_ids),
            logprobs=list(self._logprobs),
            top_logprobs=list(self._top_logprobs),
            finish_reason=self.finish_reason or "cancelled",
            stop=self._stops.hit,
            error=self._error,
            cached_tokens=self._cached_tokens,
            prompt_logprobs=first._prompt_logprobs if scored else None,
            prompt_top_logprobs=first._prompt_top if first.request.prompt_logprobs else [],
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
        """Logits of the positions from ``start`` to ``end``, as far as there are any."""
        rows = [self._logits[i] for i in range(start, end) if i in self._logits]
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)


def _ranked(ids: list[int], logprobs: list[float]) -> dict[int, float]:
    return dict(zip(ids, logprobs, strict=True))
