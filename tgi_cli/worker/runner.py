"""Runs one step: flat inputs from the rows, forward, logits of what samples, sampler.

Host cost of a decode step without the model and the sampler, at 1 / 32 / 256 rows on one 2025
server core: launch 67 / 76 / 125 us, sample 24 / 25 / 28 us, taking in the result 10 / 13 / 38 us;
packing the inputs for a device adds 34 / 61 / 90 us. Nothing in it loops over tokens in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.step import Step
from tgi_cli.sampling.constraints import TokenMasks
from tgi_cli.sampling.sampler import Sampler
from tgi_cli.sampling.table import SamplingBatch
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.decode_inputs import DecodeInputs
from tgi_cli.worker.input_batch import InputBatch, RowOptions
from tgi_cli.worker.logits_processors import run_processors
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.prompt_logprobs import PromptChunk, ScoredChunk, prompt_chunks
from tgi_cli.worker.result import DeviceOutputs, DeviceResult
from tgi_cli.worker.sizing.memory import out_of_memory_as_error
from tgi_cli.worker.upload import Uploader, to_host

MAX_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 25}
"""Logits computed at once (32 and 128 MiB in float32). Each part reads the head's weights again:
on a CPU, with a vocabulary of 151936 and 32 rows, parts of half the size take a third longer."""

MAX_SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits sampled at once; the sampler holds up to seven times as much. On a CPU parts that stay
in its caches are as fast or faster (greedy, 128 rows of 151936: 9 ms against 29)."""


class RunnableModel(Protocol):
    """What a runner asks of a model; :class:`tgi_cli.models.CausalLM` is one."""

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        """Hidden states [T, H] of a flat batch; ids and positions are int64 [T]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, V] of hidden states [N, H]."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A forward that was started.

    Attributes:
        hidden: [N, H], the last token of each sampled sequence; or with
        headed: float32 [N, V], their logits.
        batch: the N sampled entries.
        targets: int64 [N], where their tokens go: row * width + position.
        asking: of the sampled entries, by index, those that want more than a token.
        context: [T, H], all hidden states, where
        chunks: say something about prompts.
    """

    hidden: Tensor
    batch: SamplingBatch
    targets: Tensor
    asking: dict[int, RowOptions]
    context: Tensor | None
    chunks: list[PromptChunk]
    headed: bool = False


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
        adapters: of the model; None where there is no room for any.
        shard: this process's place among those that run the model; the first alone chooses.

    Attributes:
        graphs: what steps of decodes alone are run by, up to its size; None: they are launched
            one operation after the other, as all others are.
    """

    graphs: DecodeGraphs | None = None

    def __init__(
        self,
        model: RunnableModel,
        attention: PagedAttention,
        rows: InputBatch,
        vocab_size: int,
        device: torch.device,
        upload: Uploader,
        adapters: LoraCache | None = None,
        shard: Shard = ALONE,
    ) -> None:
        self.rows = rows
        self._model = model
        self._attention = attention
        self._device = device
        self._upload = upload
        self._adapters = adapters
        self._shard = shard
        self._sampler = Sampler(upload)
        self._decodes = DecodeInputs(rows) if device.type == "cpu" else None
        self._vocab_size = vocab_size
        self._logits_at_once = max(1, MAX_LOGITS[device.type] // vocab_size)
        self._scores_at_once = max(1, MAX_SCORES[device.type] // vocab_size)

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Apply the row changes and start the forward; to be sampled before the next launch.

        The changes hold even if the forward fails: the scheduler does not repeat them.

        Raises:
            OutOfMemoryError: the device's memory did not suffice for the step.
        """
        with out_of_memory_as_error():
            # First, and without taking memory: what is in a slot holds for later steps, too.
            if step.adapters and self._adapters is not None:
                self._adapters.put(step.adapters)
            self.rows.apply(step)
            if step.copies:
                self._attention.copy_blocks(step.copies)
            rows = np.array(step.rows, np.int64)
            chunks = prompt_chunks(step, self.rows.asking) if self.rows.asking else []
            if self._decodes is not None and self.graphs is None:
                decodes = self._decodes.prepare(step)
                if decodes is not None and not chunks and self._without_adapters(rows):
                    self._attention.plan(decodes.metadata)
                    hidden = self._model.forward(
                        decodes.input_ids, decodes.positions, self._attention
                    )
                    asking = self._asking(rows)
                    return LaunchedStep(hidden, decodes.batch, decodes.targets, asking, None, [])
            ends = np.array(step.starts, np.int64) + np.array(step.counts, np.int64)
            graphs = self.graphs
            if (
                graphs is not None
                and step.num_decodes == len(rows) <= graphs.largest
                and not chunks
            ):
                slots = self.rows.adapter_slots[rows]
                decoded = graphs.run(rows, ends, slots if slots.max() >= 0 else None)
                batch = self.rows.sampling.select(rows, ends)
                asking = self._asking(rows)
                output, targets = decoded.output, decoded.targets
                return LaunchedStep(output, batch, targets, asking, None, [], decoded.headed)
            samples = np.array(step.samples, np.bool_)
            inputs = self._prepare(step, rows, ends, samples)
            self._attention.plan(inputs.metadata)
            hidden = self._model.forward(inputs.input_ids, inputs.positions, self._attention)
            if not samples.all():
                rows, ends = rows[samples], ends[samples]
            batch = self.rows.sampling.select(rows, ends)
            context = hidden if chunks else None
            if inputs.last is not None:
                hidden = hidden.index_select(0, inputs.last)
            return LaunchedStep(hidden, batch, inputs.targets, self._asking(rows), context, chunks)

    def _without_adapters(self, rows: NDArray[np.int64]) -> bool:
        """Whether no row has an adapter; if so, the model is told."""
        if self._adapters is not None:
            slots = self.rows.adapter_slots[rows]
            if slots.max() >= 0:
                return False
            self._adapters.plan(slots, None)
        return True

    def _asking(self, rows: NDArray[np.int64]) -> dict[int, RowOptions]:
        """Of sampled rows, by their index, those that want more than a token."""
        if not self.rows.asking:
            return {}
        wanted = [self.rows.asking.get(row) for row in rows.tolist()]
        return {entry: ask for entry, ask in enumerate(wanted) if ask is not None}

    @torch.inference_mode()
    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> DeviceResult:
        """Choose the tokens of a launched step and put them into the token pool.

        Raises:
            OutOfMemoryError: as above.
            ValueError: masks of another shape than the step's.
        """
        assert isinstance(handle, LaunchedStep)
        produced = DeviceOutputs()
        with out_of_memory_as_error():
            if handle.context is not None:
                for chunk in handle.chunks:
                    scored = ScoredChunk(
                        chunk,
                        handle.context,
                        self.rows.tokens,
                        self._model.logits,
                        self._logits_at_once,
                        self._scores_at_once,
                    )
                    produced.prompts.append(scored)
            if len(handle.batch):
                self._choose(handle, self._masks(masks, len(handle.batch)), produced)
                if self._shard.size > 1:
                    self._agree(handle, produced)
            return DeviceResult(produced, self._device)

    @torch.inference_mode()
    def logits(self, handle: LaunchedStep) -> Tensor:
        """float32 [N, V] of a launched step, all at once: for a few rows."""
        return handle.hidden if handle.headed else self._model.logits(handle.hidden)

    def _masks(
        self, masks: tuple[Sequence[int], Any] | None, num_sampled: int
    ) -> TokenMasks | None:
        if masks is None or not len(masks[0]):
            return None
        entries, bits = np.array(masks[0], np.int64), np.asarray(masks[1], np.int32)
        shape = (len(entries), -(-self._vocab_size // 32))
        order = np.argsort(entries)
        if bits.shape != shape or entries[order[0]] < 0 or entries[order[-1]] >= num_sampled:
            raise ValueError(f"masks {bits.shape} of {entries} for {num_sampled} entries, {shape}")
        return TokenMasks(entries[order], bits[order])

    def _choose(
        self, handle: LaunchedStep, masks: TokenMasks | None, produced: DeviceOutputs
    ) -> None:
        """Head and sampler, in parts of bounded size."""
        count = len(handle.batch)
        logits_at_once = count if handle.headed else self._logits_at_once
        for begin in range(0, count, logits_at_once):
            logits = handle.hidden[begin : begin + logits_at_once]
            if not handle.headed:
                logits = self._model.logits(logits)
            if self._shard.rank > 0:
                continue
            at_once = self._scores_at_once
            if (
                masks is None
                and not handle.asking
                and self._sampler.only_reads(logits, handle.batch)
            ):
                at_once = len(logits)
            for first in range(begin, begin + len(logits), at_once):
                end = min(first + at_once, begin + len(logits))
                part = slice(first, end)
                batch = handle.batch if end - first == count else handle.batch[part]
                raw = logits[first - begin : end - begin]
                scores = self._ask(handle, part, raw, produced) if handle.asking else None
                mask = None if masks is None else masks.between(first, end)
                sampled = self._sampler(raw, batch, self.rows.tokens, scores, mask)
                self.rows.write(handle.targets[part], sampled.token_ids)
                produced.sampled.append(sampled)

    def _agree(self, handle: LaunchedStep, produced: DeviceOutputs) -> None:
        """Shard 0 says what it chose, so that a sum that differs in its last bit from shard to
        shard cannot make their sequences differ."""
        if self._shard.rank == 0:
            self._shard.broadcast(torch.cat([part.token_ids for part in produced.sampled]))
        else:
            chosen = torch.empty_like(handle.targets)
            self.rows.write(handle.targets, self._shard.broadcast(chosen))

    def _ask(
        self, handle: LaunchedStep, part: slice, logits: Tensor, produced: DeviceOutputs
    ) -> Tensor | None:
        """Report raw logits and run logits processors; returns processed ones, if any were."""
        scores = None
        for entry, asking in handle.asking.items():
            if not part.start <= entry < part.stop:
                continue
            index = entry - part.start
            if asking.extras.return_generation_logits:
                produced.generation_logits[entry] = to_host(logits[index].clone())
            if asking.extras.logits_processors:
                scores = logits.clone() if scores is None else scores
                row, position = handle.batch.rows[entry], handle.batch.positions[entry]
                token_ids = self.rows.tokens[int(row), : int(position)].tolist()  # waits for them
                error = run_processors(asking, scores[index], token_ids)
                if error is not None:
                    produced.errors[entry] = error
        return scores

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
        adapted = []
        if self._adapters is not None and table.adapter_slots[rows].max() >= 0:
            adapted = [table.adapter_slots[row_of_token]]
        (
            d_positions,
            d_tokens,
            d_slots,
            d_rows,
            d_targets,
            d_last,
            d_starts,
            d_lens,
            *d_adapted,
        ) = self._upload(
            positions,
            row_of_token * table.width + positions,
            slots,
            rows,
            (rows * table.width + ends)[samples],
            last,
            starts_at,
            kv_lens,
            *adapted,
        )
        if self._adapters is not None:
            self._adapters.plan(table.adapter_slots[rows], d_adapted[0] if d_adapted else None)
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
