"""A step's tokens on their way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.engine.step import StepResult
from tgi_cli.sampling.logprobs import TopLogprobs
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker.memory import out_of_memory_as_error

POISONED = "the model's output for this sequence is not a number (NaN or infinite logits)"


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

    def __init__(self, parts: list[Sampled], device: torch.device) -> None:
        self._parts: list[_Part] = []
        self._arrived: torch.cuda.Event | None = None
        first = 0
        for part in parts:
            top = part.top
            if top is not None:
                top = TopLogprobs(
                    top.entries, top.counts, _to_host(top.ids), _to_host(top.logprobs)
                )
            self._parts.append(_Part(first, _to_host(part.token_ids), _to_host(part.logprobs), top))
            first += len(part.token_ids)
        if parts and device.type == "cuda":
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
        result = StepResult([], [], [], [])
        for part in self._parts:
            _append(result, part)
        return result


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _append(result: StepResult, part: _Part) -> None:
    logprobs: NDArray[np.float32] = part.logprobs.numpy()
    finite = np.isfinite(logprobs)
    if not finite.all():
        logprobs = np.where(finite, logprobs, np.float32(0.0))
        for entry in np.flatnonzero(~finite).tolist():
            result.errors[part.first + entry] = POISONED
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
