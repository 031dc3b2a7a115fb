"""Hidden states of all calibration samples, on disk: they outgrow memory, and survive Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.quantize.offloaded_model import OffloadedModel


def _bytes(flat: Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    array: Any = flat.numpy()
    return memoryview(array)


class ActivationFile:
    """Tensors [samples, tokens, width] in a file, read and written a few samples at a time.

    Args:
        path: of the file; made where it is not there.
        samples, tokens, width: the shape.
        dtype: of the elements.
    """

    def __init__(
        self, path: Path, samples: int, tokens: int, width: int, dtype: torch.dtype
    ) -> None:
        self.path = path
        self.samples = samples
        self._sample = (tokens, width)
        self._bytes = tokens * width * dtype.itemsize
        self._dtype = dtype
        self._file = path.open("r+b" if path.exists() else "w+b")

    def write(self, start: int, rows: Tensor) -> None:
        """Samples from ``start`` on, from any device."""
        self._file.seek(start * self._bytes)
        flat = rows.detach().to("cpu", self._dtype).contiguous().view(-1).view(torch.uint8)
        self._file.write(_bytes(flat))

    def read(self, start: int, stop: int) -> Tensor:
        """Samples up to, not including, ``stop``; on the CPU."""
        flat = torch.empty((stop - start) * self._bytes, dtype=torch.uint8)
        self._file.seek(start * self._bytes)
        if self._file.readinto(_bytes(flat)) != len(flat):
            raise OSError(f"{self.path} is shorter than it was written")
        return flat.view(self._dtype).view(stop - start, *self._sample)

    def flush(self) -> None:
        self._file.flush()

    def remove(self) -> None:
        """Close and delete the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> ActivationFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


BATCH_TOKENS = 2048
"""Of samples that go through a block at once; a sample alone may be longer."""


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """How the decoder calls a layer: everything but the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    by_name: bool
    """Whether hidden states are ``hidden_states=``, not the first argument."""


class _Mismatch(Exception):
    """Layers were not called one after the other with what the one before returned."""


class _RecordingLayer(nn.Module):
    """Stands where a layer was: says what it was called with, and returns its input."""

    def __init__(self, block: nn.Module, tupled: bool) -> None:
        super().__init__()
        self._block = (block,)  # in a tuple: it is no part of this module
        self._tupled = tupled
        self.call: _LayerCall | None = None
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        by_name = "hidden_states" in keywords
        self.hidden = keywords.pop("hidden_states") if by_name else arguments[0]
        rest = arguments if by_name else arguments[1:]
        self.call = _LayerCall(rest, keywords, by_name)
        return (self.hidden,) if self._tupled else self.hidden


class _ReplayLayer(_RecordingLayer):
    """Stands where the last layer was, and says what it had said."""

    def __init__(self, block: nn.Module, tupled: bool, hidden: Tensor) -> None:
        super().__init__(block, tupled)
        self._answer = hidden

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        super().forward(*arguments, **keywords)
        return (self._answer,) if self._tupled else self._answer


class BlockRunner:
    """Samples on their way through a model.

    Args:
        model: its blocks may be materialized or not.
        ids: int64 [samples, tokens].

    Attributes:
        batches: (start, stop) of samples that are computed together.
        width: of hidden states.

    Raises:
        UnsupportedModelError: the decoder does more than call one layer after the other.
    """

    def __init__(self, model: OffloadedModel, ids: Tensor) -> None:
        self.model = model
        self.ids = ids
        step = max(1, BATCH_TOKENS // ids.shape[1])
        self.batches = [(start, min(start + step, len(ids))) for start in range(0, len(ids), step)]
        self.width = 0
        self._tupled = False
        self._calls: list[list[_LayerCall]] = []

    def begin(self, path: Path | None) -> ActivationFile | None:
        """Find out how blocks are called, and write the first one's inputs to ``path``.

        With no path nothing is written (they are there from an earlier run).
        """
        model = self.model
        model.materialize_rest(head=False)
        inputs: ActivationFile | None = None
        try:
            for start, stop in self.batches:
                hidden, calls = self._catch(self.ids[start:stop].to(model.device))
                self._calls.append(_shared(calls, self._calls[0] if self._calls else None))
                self.width = hidden.shape[-1]
                if path is not None:
                    inputs = inputs or self.activations(path)
                    inputs.write(start, hidden)
        finally:
            model.release_rest()
        return inputs

    def activations(self, path: Path) -> ActivationFile:
        """A file for hidden states of all samples."""
        samples, tokens = self.ids.shape
        return ActivationFile(path, samples, tokens, self.width, self.model.dtype)

    def run(self, block: int, batch: int, hidden: Tensor) -> Tensor:
        """What a block, which must be materialized, makes of a batch of hidden states."""
        call = self._calls[batch][block]
        hidden = hidden.to(self.model.device, self.model.dtype)
        module = self.model.blocks[block]
        if call.by_name:
            output = module(*call.arguments, hidden_states=hidden, **call.keywords)
        else:
            output = module(hidden, *call.arguments, **call.keywords)
        made: Tensor = output[0] if isinstance(output, tuple) else output
        return made

    def inputs(self, hidden: ActivationFile) -> Iterator[tuple[int, Tensor]]:
        """Each batch with its number."""
        for number, (start, stop) in enumerate(self.batches):
            yield number, hidden.read(start, stop)

    def logits(self, batch: int, hidden: Tensor) -> Tensor:
        """float32 [samples, tokens, vocabulary] of a batch that went through all blocks.

        What is outside of the blocks must be materialized, head and all.
        """
        start, stop = self.batches[batch]
        hidden = hidden.to(self.model.device, self.model.dtype)
        kept = list(self.model.blocks)
        stand_ins: list[nn.Module] = [_RecordingLayer(block, self._tupled) for block in kept]
        stand_ins[-1] = _ReplayLayer(kept[-1], self._tupled, hidden)
        try:
            self._replace(stand_ins)
            ids = self.ids[start:stop].to(self.model.device)
            output = self.model.whole(input_ids=ids, use_cache=False)
        finally:
            self._replace(kept)
        logits: Tensor = output.logits.float()
        return logits

    def _catch(self, ids: Tensor) -> tuple[Tensor, list[_LayerCall]]:
        name = type(self.model.whole).__name__
        for tupled in (self._tupled, not self._tupled):
            try:
                caught = self._attempt(ids, tupled)
            except _Mismatch:
                continue
            self._tupled = tupled
            return caught
        raise UnsupportedModelError(
            f"{name} does more than call its layers one after the other",
            "fp8, int8 and rtn quantize it: they need no calibration",
        )

    def _attempt(self, ids: Tensor, tupled: bool) -> tuple[Tensor, list[_LayerCall]]:
        kept = list(self.model.blocks)
        recorders = [_RecordingLayer(block, tupled) for block in kept]
        try:
            self._replace(recorders)
            output = self.model.decoder(input_ids=ids, use_cache=False)
        except (IndexError, TypeError, RuntimeError, AttributeError) as error:
            if tupled == self._tupled:  # perhaps it takes the first of a tuple
                raise _Mismatch from error
            raise UnsupportedModelError(
                f"{type(self.model.whole).__name__} cannot be taken block by block: {error}",
                "fp8, int8 and rtn quantize it: they need no calibration",
            ) from error
        finally:
            self._replace(kept)
        first = recorders[0].hidden
        shape = (*ids.shape, output[0].shape[-1])
        if first is None or tuple(output[0].shape) != shape or tuple(first.shape) != shape:
            raise _Mismatch
        calls = []
        for recorder in recorders:
            if recorder.call is None or recorder.hidden is not first:
                raise _Mismatch
            calls.append(recorder.call)
        return first, calls

    def _replace(self, modules: list[Any]) -> None:
        for index, module in enumerate(modules):
            self.model.blocks[index] = module


def _shared(calls: list[_LayerCall], first: list[_LayerCall] | None) -> list[_LayerCall]:
    """The same calls, with the tensors of an earlier batch (or layer) where these are equal."""
    known: list[Tensor] = []
    for call in first or ():
        known.extend(_tensors((call.arguments, call.keywords)))
    chosen: dict[int, Tensor] = {}

    def same(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in chosen:
                alike = (other for other in known if _equal(other, value))
                chosen[id(value)] = next(alike, value)
                if chosen[id(value)] is value:
                    known.append(value)
            return chosen[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(map(same, value))
        if isinstance(value, dict):
            return {key: same(each) for key, each in value.items()}
        return value

    return [_LayerCall(same(call.arguments), same(call.keywords), call.by_name) for call in calls]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
