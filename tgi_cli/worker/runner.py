"""Runs one step: flat inputs from the rows, forward, logits of what samples, sampler.

Host cost of a decode step without the model and the sampler, at 1 / 32 / 256 rows on one 2025
server core: launch 67 / 76 / 125 us, sample 24 / 25 / 28 us, taking in the result 10 / 13 / 38 us;
packing the inputs for a device adds 34 / 61 / 90 us. Nothing in it loops over tokens in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention
from tgi_cli.engine.step import Step
from tgi_cli.sampling.batch import SamplingBatch
from tgi_cli.sampling.sampler import Sampled, Sampler
from tgi_cli.worker.memory import out_of_memory_as_error
from tgi_cli.worker.result import DeviceResult
from tgi_cli.worker.rows import Rows
from tgi_cli.worker.staging import Uploader

MAX_LOGITS = 1 << 25
"""Logits computed and sampled at once (128 MiB in float32): bounds the sampler's memory."""


class Model(Protocol):
    """What a runner asks of a model; :class:`tgi_cli.models.CausalLM` is one."""

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """Hidden states [T, H] of a flat batch; ids and positions are int64 [T]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, V] of hidden states [N, H]."""
        ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward that was started.

    Attributes:
        hidden: [N, H], the last token of each sampled sequence; None when nothing samples.
        batch: the N sampled entries.
        targets: int64 [N], where their tokens go: row * width + position.
    """

    hidden: Tensor | None
    batch: SamplingBatch
    targets: Tensor | None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A step as the model wants it, on the device."""

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    last: Tensor | None
    """int64 [N]: flat index of the last token of each sampled sequence; None: all T tokens."""
    targets: Tensor


class ModelRunner:
    """Implements :class:`tgi_cli.engine.step.Worker` over a model and its KV cache.

    Args:
        model: computes hidden states and logits.
        attention: holds the KV cache, already allocated.
        rows: the persistent batch.
        vocab_size: width of the logits.
        device: of all of them.
        upload: brings host arrays there.
    """

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        rows: Rows,
        vocab_size: int,
        device: torch.device,
        upload: Uploader,
    ) -> None:
        self.rows = rows
        self._model = model
        self._attention = attention
        self._device = device
        self._upload = upload
        self._sampler = Sampler(upload)
        self._rows_at_once = max(1, MAX_LOGITS // vocab_size)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Apply the row changes and start the forward.

        The changes hold even if the forward fails: the scheduler does not repeat them.

        Raises:
            OutOfMemoryError: the device's memory did not suffice for the step.
        """
        with out_of_memory_as_error():
            self.rows.apply(step)
            if step.copies:
                self._attention.copy_blocks(step.copies)
            rows = np.array(step.rows, np.int64)
            ends = np.array(step.starts, np.int64) + np.array(step.counts, np.int64)
            samples = np.array(step.samples, np.bool_)
            inputs = self._prepare(step, rows, ends, samples)
            self._attention.plan(inputs.metadata)
            hidden = self._model.forward(inputs.input_ids, inputs.positions, self._attention)
            if not samples.all():
                rows, ends = rows[samples], ends[samples]
            batch = self.rows.sampling.select(rows, ends)
            if not len(batch):
                return Launched(None, batch, None)
            if inputs.last is not None:
                hidden = hidden.index_select(0, inputs.last)
            return Launched(hidden, batch, inputs.targets)

    @torch.inference_mode()
    def sample(self, handle: object) -> DeviceResult:
        """Choose the tokens of a launched step and put them into the token pool.

        Raises:
            OutOfMemoryError: as above.
        """
        assert isinstance(handle, Launched)
        if handle.hidden is None or handle.targets is None:
            return DeviceResult([], self._device)
        count, at_once = len(handle.batch), self._rows_at_once
        parts: list[Sampled] = []
        with out_of_memory_as_error():
            for first in range(0, count, at_once):
                part = slice(first, first + at_once)
                batch = handle.batch if count <= at_once else handle.batch[part]
                logits = self._model.logits(handle.hidden[part])
                sampled = self._sampler(logits, batch, self.rows.tokens)
                self.rows.write(handle.targets[part], sampled.token_ids)
                parts.append(sampled)
            return DeviceResult(parts, self._device)

    def _prepare(
        self,
        step: Step,
        rows: NDArray[np.int64],
        ends: NDArray[np.int64],
        samples: NDArray[np.bool_],
    ) -> _Inputs:
        """Flat inputs and attention metadata of a step, in one transfer."""
        table = self.rows
        count = len(rows)
        starts_at = np.zeros(count + 1, np.int32)
        if step.num_decodes == count:  # one token per row, all of them sampled
            starts_at[:] = np.arange(count + 1)
            row_of_token, positions = rows, ends - 1
        else:
            counts = np.array(step.counts, np.int64)
            np.cumsum(counts, out=starts_at[1:])
            row_of_token = np.repeat(rows, counts)
            # Position minus flat index is the same for all tokens of a sequence.
            positions = np.arange(len(row_of_token)) + np.repeat(ends - starts_at[1:], counts)
        blocks, offsets = np.divmod(positions, table.block_size)
        slots = table.host_blocks[row_of_token, blocks] * np.int64(table.block_size) + offsets
        kv_lens = ends.astype(np.int32)
        last = starts_at[1:][samples].astype(np.int64) - 1
        d_positions, d_tokens, d_slots, d_rows, d_targets, d_last, d_starts, d_lens = self._upload(
            positions,
            row_of_token * table.width + positions,
            slots,
            rows,
            (rows * table.width + ends)[samples],
            last,
            starts_at,
            kv_lens,
        )
        num_blocks = -(-int(kv_lens.max()) // table.block_size)
        metadata = AttentionMetadata(
            query_start_loc=d_starts,
            kv_lens=d_lens,
            block_table=table.blocks[:, :num_blocks].index_select(0, d_rows),
            slot_mapping=d_slots,
            query_lens_host=step.counts,
            kv_lens_host=kv_lens.tolist(),
            num_decodes=step.num_decodes,
        )
        return _Inputs(
            input_ids=table.gather(d_tokens),
            positions=d_positions,
            metadata=metadata,
            last=None if len(last) == len(positions) else d_last,
            targets=d_targets,
        )
