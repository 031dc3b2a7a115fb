"""A step's tokens, copied from the device to the host without waiting."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tgi_cli.engine.image_slices import NOTHING_ENCODED
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
        packed: int32 [N, 2], the same as token ids and the bits of their log-probabilities,
            instead of ``sampled``.
        errors: of entries that failed alone, by index.
        encodes: the outcomes of images.
        generation_logits: float32 [V], by index of the entry; on their way to the host.
        prompts: reports on chunks of prompts.
        proposals: drafts of a drafter with weights; None without any.
        arrived: recorded after the copies; None before :meth:`send`, and on a CPU.
    """

    def __init__(self) -> None:
        self.sampled: list[Sampled] = []
        self.packed: Tensor | None = None
        self.errors: dict[int, str] = {}
        self.encodes = NOTHING_ENCODED
        self.generation_logits: dict[int, Tensor] = {}
        self.prompts: list[ScoredChunk] = []
        self.proposals: DeviceProposals | None = None
        self.arrived: torch.cuda.Event | None = None
        self._sources: object = None
        """Tensors that are copied on a separate stream, and must live until that is done."""

    def send(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Start the copies from ``device`` to the host, without waiting; none from a CPU.

        A step that samples nothing is awaited, too: otherwise a long prompt alone would queue all
        its chunks on the device, ahead of later requests.

        Args:
            device: where the outputs are.
            stream: for the copies, so that the next step does not follow them but runs beside
                them. Default: the current one.
        """
        if device.type != "cuda":
            if self.packed is not None:  # a graph's, which the next step overwrites
                self.packed = self.packed.clone()
            return
        current = torch.cuda.current_stream(device)
        self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if stream is None or (self.packed is None and not self.sampled):
            self._copy()
            self.arrived.record(current)
            return
        stream.wait_stream(current)
        drafts = None if self.proposals is None else replace(self.proposals)
        self._sources = self.sampled, self.packed, drafts
        with torch.cuda.stream(stream):
            self._copy()
        self.arrived.record(stream)

    def _copy(self) -> None:
        self.sampled = list(map(_to_host, self.sampled))
        if self.packed is not None:
            self.packed = to_host(self.packed)
        if self.proposals is not None:
            self.proposals.send()

    def wait(self) -> StepResult:
        """Block until the tokens are on the host.

        Raises:
            OutOfMemoryError: the step ran out of device memory.
            RuntimeError: the device failed.
        """
        if self.arrived is not None:
            with out_of_memory_as_error():
                self.arrived.synchronize()
            self._sources = None
        result = StepResult([], [], [], [], dict(self.errors), encodes=self.encodes)
        if self.packed is not None:
            token_ids, bits = self.packed.unbind(1)
            _append(result, Sampled(token_ids, bits.view(torch.float32), None))
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
