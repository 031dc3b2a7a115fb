"""What is said of a prompt's own positions: log-probabilities and raw logits, chunk by chunk.

A chunk's logits are computed in parts of bounded size and reduced at once to what was asked;
only raw logits, where a request wants them, are kept whole, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.engine.step import ChunkLogprobs, Step
from tgi_cli.sampling.top_tokens import likeliest
from tgi_cli.worker.input_batch import RowOptions
from tgi_cli.worker.upload import to_host


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Positions of a prompt that a step computes and that are to be reported.

    Attributes:
        place: of its sequence in the step.
        row: of the sequence.
        start: its first position.
        first: the flat index of that.
        scored: positions, from the first on, whose next token is of the prompt and scored.
        kept: positions, from the first on, whose raw logits are wanted.
        top: how many of the likeliest tokens to report with each.
    """

    place: int
    row: int
    start: int
    first: int
    scored: int
    kept: int
    top: int


def prompt_chunks(step: Step, asking: Mapping[int, RowOptions]) -> list[PromptChunk]:
    """The chunks of a step whose requests ask for something about their prompts."""
    chunks = []
    first = 0
    for place, (row, start, count) in enumerate(
        zip(step.rows, step.starts, step.counts, strict=True)
    ):
        wanted = asking.get(row)
        if wanted is not None:
            top, prompt = wanted.extras.prompt_logprobs, wanted.prompt_tokens
            scored = 0 if top is None else min(count, prompt - 1 - start)
            kept = min(count, prompt - start) if wanted.extras.return_context_logits else 0
            if scored > 0 or kept > 0:
                chunks.append(PromptChunk(place, row, start, first, max(scored, 0), kept, top or 0))
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
            chunk: what is wanted.
            hidden: [T, H] of the whole step.
            pool: int32 [rows, width], the tokens of every row.
            logits_of: float32 [N, V] of hidden states [N, H].
            logits_at_once: N at most.
            scores_at_once: how many of them to reduce at once.
        """
        self.place = chunk.place
        self._chunk = chunk
        self._scores: list[tuple[Tensor, Tensor, Tensor]] = []
        self._kept: Tensor | None = None
        start = chunk.start + 1
        following = pool[chunk.row, start : start + chunk.scored].long()
        count = max(chunk.scored, chunk.kept)
        for begin in range(0, count, logits_at_once):
            end = min(begin + logits_at_once, count)
            logits = logits_of(hidden[chunk.first + begin : chunk.first + end])
            for piece in range(begin, min(end, chunk.scored), scores_at_once):
                until = min(piece + scores_at_once, end, chunk.scored)
                self._reduce(logits[piece - begin : until - begin], following[piece:until])
            if begin < chunk.kept:
                self._keep(logits[: chunk.kept - begin], begin)

    def _reduce(self, logits: Tensor, token_ids: Tensor) -> None:
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        ids = likeliest(logits, min(self._chunk.top, logits.shape[1]))
        self._scores.append((to_host(chosen), to_host(ids), to_host(logprobs.gather(1, ids))))

    def _keep(self, logits: Tensor, begin: int) -> None:
        if self._kept is None:
            shape = (self._chunk.kept, logits.shape[1])
            self._kept = torch.empty(shape, pin_memory=logits.device.type == "cuda")
        self._kept[begin : begin + len(logits)].copy_(logits, non_blocking=True)

    def scores(self) -> ChunkLogprobs | None:
        """Of the scored tokens, once they are here; None: none were."""
        if not self._scores:
            return None
        result = ChunkLogprobs(self._chunk.start + 1, [], [], [])
        for logprobs, ids, values in self._scores:
            result.logprobs.extend(logprobs.tolist())
            result.top_ids.extend(ids.tolist())
            result.top_logprobs.extend(values.tolist())
        return result

    def logits(self) -> NDArray[np.float32] | None:
        """The raw logits that were kept, once they are here."""
        return None if self._kept is None else self._kept.numpy()
