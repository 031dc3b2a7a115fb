"""Log-probabilities and raw logits of a prompt's own positions, chunk by chunk.

A chunk's logits are computed in parts of bounded size, and each part is reduced at once to what
the request needs. Only requested raw logits are stored in full, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.engine.step import ChunkLogprobs, Step
from tgi_cli.sampling.logprobs import likeliest
from tgi_cli.worker.input_batch import RowOptions
from tgi_cli.worker.upload import to_host


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Positions of a prompt that a step computes and reports.

    Attributes:
        index: index of its sequence in the step.
        row: row of the sequence.
        start: its first position.
        first: the flat index of that position.
        scored: number of positions, from the first on, whose next token is scored.
        raw: number of positions, from the first on, whose raw logits are reported.
        top: number of likeliest tokens to report with each.
    """

    index: int
    row: int
    start: int
    first: int
    scored: int
    raw: int
    top: int


def prompt_chunks(step: Step, options: Mapping[int, RowOptions]) -> list[PromptChunk]:
    """The chunks of a step whose requests want reports on their prompts."""
    chunks = []
    first = 0
    for index, (row, start, count) in enumerate(
        zip(step.rows, step.starts, step.counts, strict=True)
    ):
        wanted = options.get(row)
        if wanted is not None:
            top, prompt = wanted.extras.prompt_logprobs, wanted.prompt_tokens
            scored = 0 if top is None else min(count, prompt - 1 - start)
            raw = min(count, prompt - start) if wanted.extras.return_context_logits else 0
            if scored > 0 or raw > 0:
                chunks.append(PromptChunk(index, row, start, first, max(scored, 0), raw, top or 0))
        first += count
    return chunks


class ScoredChunk:
    """The results of a chunk, on the host or on their way to it."""

    def __init__(
        self,
        chunk: PromptChunk,
        hidden: Tensor,
        pool: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        logits_at_once: int,
        scores_at_once: int,
    ) -> None:
        """Compute and reduce.

        Args:
                chunk: what to report.
            hidden: [T, H] of the whole step.
            pool: int32 [rows, width], the tokens of every row.
            logits_of: float32 [N, V] of hidden states [N, H].
            logits_at_once: N at most.
            scores_at_once: how many of them to reduce at once.
        """
        self.index = chunk.index
        self._chunk = chunk
        self._scores: list[tuple[Tensor, Tensor, Tensor]] = []
        self._raw: Tensor | None = None
        start = chunk.start + 1
        following = pool[chunk.row, start : start + chunk.scored].long()
        count = max(chunk.scored, chunk.raw)
        for begin in range(0, count, logits_at_once):
            end = min(begin + logits_at_once, count)
            logits = logits_of(hidden[chunk.first + begin : chunk.first + end])
            for piece in range(begin, min(end, chunk.scored), scores_at_once):
                until = min(piece + scores_at_once, end, chunk.scored)
                self._reduce(logits[piece - begin : until - begin], following[piece:until])
            if begin < chunk.raw:
                self._copy_raw(logits[: chunk.raw - begin], begin)

    def _reduce(self, logits: Tensor, token_ids: Tensor) -> None:
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        ids = likeliest(logits, min(self._chunk.top, logits.shape[1]))
        self._scores.append((to_host(chosen), to_host(ids), to_host(logprobs.gather(1, ids))))

    def _copy_raw(self, logits: Tensor, begin: int) -> None:
        if self._raw is None:
            shape = (self._chunk.raw, logits.shape[1])
            self._raw = torch.empty(shape, pin_memory=logits.device.type == "cuda")
        self._raw[begin : begin + len(logits)].copy_(logits, non_blocking=True)

    def scores(self) -> ChunkLogprobs | None:
        """The scored tokens, once they are on the host; None if there are none."""
        if not self._scores:
            return None
        result = ChunkLogprobs(self._chunk.start + 1, [], [], [])
        for logprobs, ids, values in self._scores:
            result.logprobs.extend(logprobs.tolist())
            result.top_ids.extend(ids.tolist())
            result.top_logprobs.extend(values.tolist())
        return result

    def logits(self) -> NDArray[np.float32] | None:
        """The raw logits, once they are on the host; None if none are reported."""
        return None if self._raw is None else self._raw.numpy()
