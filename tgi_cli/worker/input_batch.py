"""The persistent batch: one row per running sequence, for as long as it runs.

===============  =========================================  ================================
state            shape                                      written by
===============  =========================================  ================================
tokens           int32 [max_rows, max_tokens + 1], device   a new row; the sampler; a step
block table      int32 [max_rows, max_blocks], host         a new row; appended blocks
its device copy  the same, device                           the same
sampling         one record per row, host                   a new row
adapter slots    int32 [max_rows], host                     a new row
encoder tokens   int64 [max_rows], host                     a new row
row options      rows that want more than tokens, host      a new row; a freed one
image positions  rows with images, host                     a new row; a freed one
===============  =========================================  ================================

On a CPU the block table and its copy share their memory; elsewhere the copy follows the tokens in
theirs, so that one operation writes what a step changes of both. A freed row's arrays need no
clearing: they are not read before a new sequence has overwritten them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.engine.step import NewRow, OptionalOutputs, Step
from tgi_cli.sampling.table import SamplingTable
from tgi_cli.worker.image_positions import ImagePositions
from tgi_cli.worker.upload import Uploader

_Write = tuple[int, int, list[int]]
"""A row, where in it, and what is written there."""

_ALIGNMENT = 64
"""Numbers at a multiple of which the device's block table begins, as other tensors do."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of a row whose logits are to be processed or reported."""

    request_id: int
    prompt_tokens: int
    extras: OptionalOutputs


class InputBatch:
    """Token ids, block tables and sampling state of all rows.

    Args:
        max_rows: sequences that run at once.
        max_tokens: of a sequence.
        block_size: tokens per KV block.
        upload: copies host arrays to the device of tokens and block tables, unless it reads the
            host's memory.
        has_encoder: whether all tokens of a prompt but the last are an encoder's.
        vocab_size: ids from here on, which stand for images, are held as 0; None for any.
        image_positions: what images change for the rows' tokens. Default: nothing.

    Attributes:
        tokens: int32 [max_rows, max_tokens + 1], the pool.
        scratch: a flat index after the pool's tokens, where padding writes its tokens.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        upload: Uploader,
        has_encoder: bool = False,
        vocab_size: int | None = None,
        image_positions: ImagePositions | None = None,
    ) -> None:
        device = upload.device
        self._vocab_size = vocab_size
        self.block_size = block_size
        self.width = max_tokens + 1
        max_blocks = -(-self.width // block_size)
        self._shared = not upload.packs
        self.scratch = max_rows * self.width
        self._blocks_at = -(-(self.scratch + 1) // _ALIGNMENT) * _ALIGNMENT
        block_numbers = 0 if self._shared else max_rows * max_blocks
        self._flat = _zeros(self._blocks_at + block_numbers, device)
        self.tokens = self._flat[: self.scratch].view(max_rows, self.width)
        self._on_host: NDArray[np.int32] | None = None
        if device.type == "cpu":
            self._on_host = self.tokens.numpy()
        self.host_blocks: NDArray[np.int32] = np.zeros((max_rows, max_blocks), np.int32)
        self.blocks = torch.from_numpy(self.host_blocks)
        if not self._shared:
            self.blocks = self._flat[self._blocks_at :].view(max_rows, max_blocks)
        self.sampling = SamplingTable(max_rows)
        self.adapter_slots: NDArray[np.int32] = np.full(max_rows, -1, np.int32)
        self._has_encoder = has_encoder
        self.encoder_tokens: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.row_options: dict[int, RowOptions] = {}
        self.image_positions = image_positions or ImagePositions(max_rows)
        self.upload = upload

    def apply(self, step: Step) -> None:
        """Apply the changes since the last step."""
        if self.row_options:
            for row in step.freed:
                self.row_options.pop(row, None)
        if not self.image_positions.empty:
            for row in step.freed:
                self.image_positions.free(row)
        for new in step.new:
            self._write_options(new)
        if step.new or step.appended or step.forced_tokens or step.drafts:
            self._write(self._token_writes(step), self._block_writes(step))
        if step.first_tokens:
            self._write_first_tokens(step)

    def gather(self, flat_indices: Tensor) -> Tensor:
        """Token ids, int64, at row * width + position."""
        return self._flat.index_select(0, flat_indices).long()

    def write(self, flat_indices: Tensor, token_ids: Tensor) -> None:
        """Write token ids at row * width + position."""
        if self._on_host is not None:  # numpy takes a quarter of the time for a few
            self._on_host.reshape(-1)[flat_indices.numpy()] = token_ids.numpy()
        else:
            self.record_write(flat_indices, token_ids)

    def record_write(self, flat_indices: Tensor, token_ids: Tensor) -> None:
        """As :meth:`write`, by operators that a graph can hold."""
        self._flat.index_copy_(0, flat_indices, token_ids.int())

    def _token_writes(self, step: Step) -> list[_Write]:
        writes = [(new.row, 0, self._known(new)) for new in step.new]
        for given in (step.forced_tokens, step.drafts):
            writes += [(tokens.row, tokens.start, tokens.token_ids) for tokens in given]
        return writes

    def _block_writes(self, step: Step) -> list[_Write]:
        writes = [(new.row, 0, new.block_ids) for new in step.new]
        return writes + [(more.row, more.start, more.block_ids) for more in step.appended]

    def _write(self, tokens: list[_Write], blocks: list[_Write]) -> None:
        """Write both: what is on a device in one transfer and one operation."""
        for row, start, block_ids in blocks:
            self.host_blocks[row, start : start + len(block_ids)] = block_ids
        writes: list[tuple[int, list[int]]] = []
        if self._on_host is not None:
            for row, start, token_ids in tokens:
                self._on_host[row, start : start + len(token_ids)] = token_ids
        else:
            writes += [(row * self.width + start, token_ids) for row, start, token_ids in tokens]
        if not self._shared:
            at, stride = self._blocks_at, self.host_blocks.shape[1]
            writes += [(at + row * stride + start, block_ids) for row, start, block_ids in blocks]
        if writes:
            self._flat.index_copy_(0, *self.upload(*_scattered(writes)))

    def _write_first_tokens(self, step: Step) -> None:
        """Write what another stage has chosen, and what the rows may have already."""
        if self._on_host is not None:
            self._on_host[step.rows, step.starts] = step.first_tokens
            return
        flat = np.array(step.rows, np.int64) * self.width + np.array(step.starts, np.int64)
        indices, values = self.upload(flat, np.array(step.first_tokens, np.int32))
        self.write(indices, values)

    def _known(self, new: NewRow) -> list[int]:
        """The tokens of a new row, which can all be looked up."""
        limit = self._vocab_size
        if not new.images or limit is None:
            return new.token_ids
        return [token if token < limit else 0 for token in new.token_ids]

    def _write_options(self, new: NewRow) -> None:
        extras, encoder_tokens = new.extras, new.prompt_tokens - 1 if self._has_encoder else 0
        self.adapter_slots[new.row] = new.adapter_slot
        self.image_positions.put(new)
        self.encoder_tokens[new.row] = encoder_tokens
        self.sampling.set(
            new.row, new.sampling, new.prompt_tokens, extras.stop_token_ids, encoder_tokens
        )
        self.row_options.pop(new.row, None)
        if (
            extras.logits_processors
            or extras.prompt_logprobs is not None
            or extras.return_context_logits
            or extras.return_generation_logits
        ):
            self.row_options[new.row] = RowOptions(new.request_id, new.prompt_tokens, extras)


def _scattered(
    writes: Sequence[tuple[int, list[int]]],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Flat indices of writes that begin at an index each, and the numbers."""
    spans = [np.arange(start, start + len(numbers)) for start, numbers in writes]
    indices = spans[0] if len(spans) == 1 else np.concatenate(spans)
    numbers = chain.from_iterable([numbers for _, numbers in writes])
    return indices, np.fromiter(numbers, np.int32, len(indices))


def _zeros(count: int, device: torch.device) -> Tensor:
    """int32 zeros.

    A CPU's memory is taken page by page as rows are written: 128 rows of 2**24 tokens have 8 GB.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(count, np.int32))
    return torch.zeros(count, dtype=torch.int32, device=device)
