"""A step's tokens, copied from the device to the host without waiting."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tgi_cli.engine.step import StepResult
from tgi_cli.sampling.logprobs import TopLogprobs
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker.prompt_logprobs import ScoredChunk
from tgi_cli.worker.sizing.memory import out_of_memory_as_error
from tgi_cli.worker.speculation.stage import DeviceProposals
from tgi_cli.worker.upload import to_host

POISONED = "the model's output for this sequence is not a number (NaN or infinite logits)"


NO_TOKEN_ALLOWED = "the constraints on this sequence leave no token that may be chosen"


class DeviceResult:
    """Implements :class:`tgi_cli.engine.step.PendingResult`: a step's outputs on the device.

    The runner fills it and calls :meth:`send`.

    Attributes:
        sampled: the step's sampled entries, in order, in parts.
        errors: of entries that failed alone, by index.
        generation_logits: float32 [V], by index of the entry; on their way to the host.
        prompts: reports on chunks of prompts.
        proposals: drafts of a drafter with weights; None without any.
    """

    def __init__(self) -> None:
        self.sampled: list[Sampled] = []
        self.errors: dict[int, str] = {}
        self.generation_logits: dict[int, Tensor] = {}
        self.prompts: list[ScoredChunk] = []
        self.proposals: DeviceProposals | None = None
        self._arrived: torch.cuda.Event | None = None

    def send(self, device: torch.device) -> None:
        """Start the copies from ``device`` to the host, without waiting; none from a CPU."""
        if device.type != "cuda" or not (self.sampled or self.prompts):
            return
        self.sampled = list(map(_to_host, self.sampled))
        if self.proposals is not None:
            self.proposals.send()
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> StepResult:
        """Block until the tokens are on the host.

        Raises:
            OutOfMemoryError: the step ran out of device memory.
            RuntimeError: the device failed.
        """
        if self._arrived is not None:
            with out_of_memory_as_error():
                self._arrived.synchronize()
        result = StepResult([], [], [], [], dict(self.errors))
        for part in self.sampled:
            _append(result, part)
        for index, logits in self.generation_logits.items():
            result.generation_logits[index] = logits.numpy()
        if self.proposals is not None:
            self.proposals.append_to(result)
        for chunk in self.prompts:
            scores, raw = chunk.scores(), chunk.logits()
            if scores is not None:
                result.prompt_logprobs[chunk.index] = scores
            if raw is not None:
                result.context_logits[chunk.index] = raw
        return result


def _to_host(part: Sampled) -> Sampled:
    top = part.top
    if top is not None:
        top = TopLogprobs(top.entries, top.counts, to_host(top.ids), to_host(top.logprobs))
    return Sampled(to_host(part.token_ids), to_host(part.logprobs), top)


def _append(result: StepResult, part: Sampled) -> None:
    first = len(result.token_ids)
    token_ids = part.token_ids.numpy().tolist()
    logprobs = part.logprobs.numpy().tolist()
    failed = [] if all(map(math.isfinite, logprobs)) else _report(result, first, logprobs)
    result.token_ids += token_ids
    result.logprobs += logprobs
    # Tokens without top tokens share one list, which is never modified.
    result.top_ids += [[]] * len(token_ids)
    result.top_logprobs += [[]] * len(token_ids)
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
    for entry, count, ids, values in rows:
        if entry not in failed:
            result.top_ids[first + entry] = ids[:count]
            result.top_logprobs[first + entry] = values[:count]


def _report(result: StepResult, first: int, logprobs: list[float]) -> list[int]:
    """Report the errors of failed entries, and set their log-probabilities to 0; returns them."""
    failed = [entry for entry, value in enumerate(logprobs) if not math.isfinite(value)]
    for entry in failed:
        if math.isnan(logprobs[entry]):
            result.errors[first + entry] = POISONED
        else:
            result.errors.setdefault(first + entry, NO_TOKEN_ALLOWED)
        logprobs[entry] = 0.0
    return failed
