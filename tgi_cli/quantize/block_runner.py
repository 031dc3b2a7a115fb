"""Runs a model one decoder block at a time over fixed samples, whose hidden states are on disk.

The other arguments of a decoder's layers (masks, rotary tables) are recorded once, with layers that
compute nothing; from then on each block is called by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.quantize.offloaded_model import OffloadedModel

BATCH_TOKENS = 2048
"""Tokens that go through a block at once; a single sample may be longer."""

_REMEDY = "fp8, int8 and rtn quantize it: they need no calibration"


class ActivationFile:
    """Tensors [samples, tokens, width] in a file, read and written a few samples at a time.

    A file, since hidden states of all samples outgrow memory, and survive an interruption.

    Args:
        path: path of the file; created if it does not exist.
        samples, tokens, width: the shape.
        dtype: dtype of the elements.
    """

    def __init__(
        self, path: Path, samples: int, tokens: int, width: int, dtype: torch.dtype
    ) -> None:
        self.path = path
        self.samples = samples
        self._shape = (tokens, width)
        self._sample_bytes = tokens * width * dtype.itemsize
        self._dtype = dtype
        self._file = path.open("r+b" if path.exists() else "w+b")

    def write(self, start: int, rows: Tensor) -> None:
        """Write samples from ``start`` on, from any device."""
        self._file.seek(start * self._sample_bytes)
        flat = rows.detach().to("cpu", self._dtype).contiguous().view(-1).view(torch.uint8)
        self._file.write(_memory(flat))

    def read(self, start: int, stop: int) -> Tensor:
        """Read samples from ``start`` up to, not including, ``stop``; on the CPU."""
        flat = torch.empty((stop - start) * self._sample_bytes, dtype=torch.uint8)
        self._file.seek(start * self._sample_bytes)
        if self._file.readinto(_memory(flat)) != len(flat):
            raise OSError(f"{self.path} is shorter than it was written")
        return flat.view(self._dtype).view(stop - start, *self._shape)

    def flush(self) -> None:
        self._file.flush()

    def remove(self) -> None:
        """Close and delete the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _memory(flat: Tensor) -> memoryview:
    """The memory of a tensor of bytes."""
    array: Any = flat.numpy()
    return memoryview(array)


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """A decoder's call of a layer, without the hidden states.

    Attributes:
        arguments, keywords: the other arguments.
        by_name: whether hidden states are passed as ``hidden_states=``, not as the first argument.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    by_name: bool


class _NotSequential(Exception):
    """The decoder did not call its layers one after the other, each with the output before."""


class _RecordingLayer(nn.Module):
    """Replaces a layer: records its call, and returns its input or ``output``."""

    def __init__(self, block: nn.Module, returns_tuple: bool, output: Tensor | None = None) -> None:
        super().__init__()
        self._block = (block,)  # in a tuple, so that it is not a submodule
        self._returns_tuple = returns_tuple
        self._output = output
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
        self.call = _LayerCall(arguments if by_name else arguments[1:], keywords, by_name)
        output = self.hidden if self._output is None else self._output
        return (output,) if self._returns_tuple else output


class BlockRunner:
    """Runs samples through the blocks of a model.

    Args:
        model: its blocks may be materialized or not.
        ids: int64 [samples, tokens].

    Attributes:
        batches: (start, stop) of samples that are computed together.
        width: width of hidden states.

    Raises:
        UnsupportedModelError: the decoder does more than call one layer after the other.
    """

    def __init__(self, model: OffloadedModel, ids: Tensor) -> None:
        self.model = model
        self.ids = ids
        step = max(1, BATCH_TOKENS // ids.shape[1])
        self.batches = [(start, min(start + step, len(ids))) for start in range(0, len(ids), step)]
        self.width = 0
        self._returns_tuple = False
        self._calls: list[list[_LayerCall]] = []

    def begin(self, path: Path | None) -> ActivationFile | None:
        """Record how blocks are called, and write the first block's inputs to ``path`` if given."""
        model = self.model
        model.materialize_rest(head=False)
        inputs: ActivationFile | None = None
        try:
            for start, stop in self.batches:
                hidden, calls = self._record(self.ids[start:stop].to(model.device))
                self._calls.append(_deduplicated(calls, self._calls[0] if self._calls else []))
                self.width = hidden.shape[-1]
                if path is not None:
                    inputs = inputs or self.activations(path)
                    inputs.write(start, hidden)
        finally:
            model.release_rest()
        return inputs

    def activations(self, path: Path) -> ActivationFile:
        """Open a file for hidden states of all samples."""
        samples, tokens = self.ids.shape
        return ActivationFile(path, samples, tokens, self.width, self.model.dtype)

    def run(self, block: int, batch: int, hidden: Tensor) -> Tensor:
        """Run a batch of hidden states through a materialized block."""
        call = self._calls[batch][block]
        hidden = hidden.to(self.model.device, self.model.dtype)
        module = self.model.blocks[block]
        if call.by_name:
            output = module(*call.arguments, hidden_states=hidden, **call.keywords)
        else:
            output = module(hidden, *call.arguments, **call.keywords)
        hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def run_all(self, block: int, hidden: ActivationFile, path: Path) -> ActivationFile:
        """Run all hidden states through a materialized block, into a new file."""
        outputs = self.activations(path)
        for number, inputs in self.inputs(hidden):
            outputs.write(self.batches[number][0], self.run(block, number, inputs))
        return outputs

    def inputs(self, hidden: ActivationFile) -> Iterator[tuple[int, Tensor]]:
        """Iterate over the batches, with their numbers."""
        for number, (start, stop) in enumerate(self.batches):
            yield number, hidden.read(start, stop)

    def logits(self, batch: int, hidden: Tensor) -> Tensor:
        """Compute float32 logits [samples, tokens, vocabulary] from the last block's outputs.

        Everything outside of the blocks must be materialized, including the head.
        """
        start, stop = self.batches[batch]
        hidden = hidden.to(self.model.device, self.model.dtype)
        blocks = list(self.model.blocks)
        replacements = [_RecordingLayer(block, self._returns_tuple) for block in blocks]
        replacements[-1] = _RecordingLayer(blocks[-1], self._returns_tuple, hidden)
        try:
            self._replace_blocks(replacements)
            ids = self.ids[start:stop].to(self.model.device)
            output = self.model.whole(input_ids=ids, use_cache=False)
        finally:
            self._replace_blocks(blocks)
        logits: Tensor = output.logits.float()
        return logits

    def _record(self, ids: Tensor) -> tuple[Tensor, list[_LayerCall]]:
        """Inputs of the first block, and the calls of all, for layers with and without tuples."""
        name = type(self.model.whole).__name__
        for returns_tuple in (self._returns_tuple, not self._returns_tuple):
            try:
                recorded = self._try_recording(ids, returns_tuple)
            except _NotSequential:
                continue
            self._returns_tuple = returns_tuple
            return recorded
        raise UnsupportedModelError(f"{name} does more than call its layers in order", _REMEDY)

    def _try_recording(self, ids: Tensor, returns_tuple: bool) -> tuple[Tensor, list[_LayerCall]]:
        blocks = list(self.model.blocks)
        recorders = [_RecordingLayer(block, returns_tuple) for block in blocks]
        try:
            self._replace_blocks(recorders)
            output = self.model.decoder(input_ids=ids, use_cache=False)
        except (IndexError, TypeError, RuntimeError, AttributeError) as error:
            if returns_tuple == self._returns_tuple:  # the first attempt
                raise _NotSequential from error
            name = type(self.model.whole).__name__
            raise UnsupportedModelError(
                f"{name} cannot be run block by block: {error}", _REMEDY
            ) from error
        finally:
            self._replace_blocks(blocks)
        first = recorders[0].hidden
        shape = (*ids.shape, output[0].shape[-1])
        if first is None or tuple(output[0].shape) != shape or tuple(first.shape) != shape:
            raise _NotSequential
        calls = []
        for recorder in recorders:
            if recorder.call is None or recorder.hidden is not first:
                raise _NotSequential
            calls.append(recorder.call)
        return first, calls

    def _replace_blocks(self, modules: list[Any]) -> None:
        for index, module in enumerate(modules):
            self.model.blocks[index] = module


def _deduplicated(calls: list[_LayerCall], first: list[_LayerCall]) -> list[_LayerCall]:
    """The same calls, sharing equal tensors with each other and with the first batch's."""
    known: list[Tensor] = [
        each
        for call in first
        for each in tree_leaves((call.arguments, call.keywords))
        if isinstance(each, Tensor)
    ]

    def shared(tensor: Tensor) -> Tensor:
        for other in known:
            if tensor is other or (tensor.dtype == other.dtype and torch.equal(tensor, other)):
                return other
        known.append(tensor)
        return tensor

    return [
        replace(
            call,
            arguments=tree_map_only(Tensor, shared, call.arguments),
            keywords=tree_map_only(Tensor, shared, call.keywords),
        )
        for call in calls
    ]
