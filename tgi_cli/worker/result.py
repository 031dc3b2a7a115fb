"""A step's tokens on their way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.engine.step import StepResult
from tgi_cli.sampling.logprobs import TopLogprobs
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker.memory import out_of_memory_as_error
from tgi_cli.worker.prompt import ScoredChunk
from tgi_cli.worker.staging import to_host

POISONED = "the model's output for this sequence is not a number (NaN or infinite logits)"


UNCHOOSABLE = "the constraints on this sequence leave no token that may be chosen"


@dataclass(slots=True)
class Produced:
    """What a step made, on the device.

    Attributes:
        sampled: the step's sampled entries, in order, in parts.
        errors: of entries that failed alone, by index.
        generation_logits: float32 [V], by index of the entry; on their way to the host.
        prompts: of the chunks that are reported on.
    """

    sampled: list[Sampled] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    generation_logits: dict[int, Tensor] = field(default_factory=dict)
    prompts: list[ScoredChunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the step's entries, starting at ``first``; tensors on the host."""

    first: int
    token_ids: Tensor
    logprobs: Tensor
    top: TopLogprobs | None


class DeviceResult:
    """Implements :class:`tgi_cli.engine.step.PendingResult`.

    The copies to the host are started at once and not waited for; on a CPU there are none.
    """

    def __init__(self, produced: Produced, device: torch.device) -> None:
        self._produced = produced
        self._parts: list[_Part] = []
        self._arrived: torch.cuda.Event | None = None
        first = 0
        for part in produced.sampled:
            top = part.top
            if top is not None:
                top = TopLogprobs(top.entries, top.counts, to_host(top.ids), to_host(top.logprobs))
            self._parts.append(_Part(first, to_host(part.token_ids), to_host(part.logprobs), top))
            first += len(part.token_ids)
        if device.type == "cuda" and (self._parts or produced.prompts):
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> StepResult:
        """Block until the tokens are here.

        Raises:
            OutOfMemoryError: the step ran out of device memory.
            RuntimeError: the device failed.
        """
        if self._arrived is not None:
            with out_of_memory_as_error():
                self._arrived.synchronize()
        result = StepResult([], [], [], [], dict(self._produced.errors))
        for part in self._parts:
            _append(result, part)
        for index, logits in self._produced.generation_logits.items():
            result.generation_logits[index] = logits.numpy()
        for chunk in self._produced.prompts:
            scores, kept = chunk.scores(), chunk.logits()
            if scores is not None:
                result.prompt_scores[chunk.place] = scores
            if kept is not None:
                result.context_logits[chunk.place] = kept
        return result


def _append(result: StepResult, part: _Part) -> None:
    logprobs: NDArray[np.float32] = part.logprobs.numpy()
    finite = np.isfinite(logprobs)
    if not finite.all():
        for entry in np.flatnonzero(~finite).tolist():
            if np.isnan(logprobs[entry]):
                result.errors[part.first + entry] = POISONED
            else:
                result.errors.setdefault(part.first + entry, UNCHOOSABLE)
        logprobs = np.where(finite, logprobs, np.float32(0.0))
    count = len(logprobs)
    result.token_ids += part.token_ids.tolist()
    result.logprobs += logprobs.tolist()
    result.top_ids += [[] for _ in range(count)]
    result.top_logprobs += [[] for _ in range(count)]
    top = part.top
    if top is None:
        return
    rows = zip(
        top.entries.tolist(),
        top.counts.tolist(),
        top.ids.tolist(),
        top.logprobs.tolist(),
        strict=True,
    )
    for entry, asked, ids, values in rows:
        if finite[entry]:
            result.top_ids[part.first + entry] = ids[:asked]
            result.top_logprobs[part.first + entry] = values[:asked]
