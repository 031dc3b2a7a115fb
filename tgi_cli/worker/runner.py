"""Runs one step: picks the executor of its forward pass, computes logits, samples.

Host cost of a decode step without the model and the sampler, at 1 / 32 / 256 rows on one 2025
server core: launch 67 / 76 / 125 us, sample 24 / 25 / 28 us, reading the result 10 / 13 / 38 us;
packing the inputs for a device adds 34 / 61 / 90 us. Nothing in it loops over tokens in Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention import PagedAttention
from tgi_cli.attention.host_cache import HostCache
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.image_slices import NOTHING_ENCODED, EncodeReport
from tgi_cli.engine.step import Step
from tgi_cli.models.base import EncoderDecoderLM, ImageRows
from tgi_cli.models.speculators.base import TargetStates
from tgi_cli.sampling.constraints import TokenMasks
from tgi_cli.sampling.sampler import Sampler
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.encoder_decoder import EncoderDecoderExecutor
from tgi_cli.worker.executors import (
    EagerExecutor,
    Executor,
    Forward,
    ForwardOutput,
    ProgramExecutor,
    RunnableModel,
)
from tgi_cli.worker.images import ImageEncoder
from tgi_cli.worker.input_batch import InputBatch, RowOptions
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.mixed_graphs import MixedGraphs
from tgi_cli.worker.prompt_logprobs import PromptChunk, ScoredChunk, prompt_chunks
from tgi_cli.worker.result import DeviceResult
from tgi_cli.worker.sizing.memory import out_of_memory_as_error
from tgi_cli.worker.speculation.stage import ProposalStage
from tgi_cli.worker.step_inputs import InputPreparer, StepBatch
from tgi_cli.worker.upload import to_host

MAX_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 25}
"""Limit of logits computed at once (32 and 128 MiB in float32). Each part reads the head's weights
again: on a CPU, with a vocabulary of 151936 and 32 rows, parts of half the size take a third
longer."""

MAX_SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Limit of logits sampled at once; the sampler holds up to seven times as much. On a CPU parts that
stay in its caches are as fast or faster (greedy, 128 rows of 151936: 9 ms against 29)."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A started forward pass, and what the step reports in addition to tokens.

    Attributes:
        forward: its result, on the device.
        step: as the scheduler made it.
        options: of the sampled sequences that want more than a token, by index.
        chunks: of prompts that are reported on.
        began: when it was launched, of :func:`time.perf_counter`.
        encodes: the outcomes of images.
    """

    forward: ForwardOutput
    step: Step
    options: dict[int, RowOptions]
    chunks: list[PromptChunk]
    began: float
    encodes: EncodeReport = NOTHING_ENCODED


class ModelRunner:
    """Implements :class:`tgi_cli.engine.step.Worker` over a model and its KV cache.

    Args:
        model: computes hidden states and logits.
        attention: holds the KV cache, already allocated.
        rows: the persistent batch, on the device of both.
        vocab_size: width of the logits.
        lora: of the model; None if it has no slots for adapters.
        shard: this process's share of the model; the first one of the last stage alone samples.
        program: compiled from the model, where one could be.
        needs: the hidden states that a drafter reads; see :meth:`propose_with`.

    Attributes:
        graphs: of decode steps, once they are captured.
        mixed_graphs: of steps with prompts, likewise.
    """

    graphs: DecodeGraphs | None = None
    mixed_graphs: MixedGraphs | None = None
    host_cache: HostCache | None = None

    def __init__(
        self,
        model: RunnableModel,
        attention: PagedAttention,
        rows: InputBatch,
        vocab_size: int,
        lora: LoraCache | None = None,
        shard: Shard = ALONE,
        program: Forward | None = None,
        needs: TargetStates = "none",
    ) -> None:
        self.rows = rows
        self.program = program
        self._model = model
        self._attention = attention
        self._device = rows.tokens.device
        self._lora = lora
        self._shard = shard
        self._sampler = Sampler(rows.upload)
        self._inputs = InputPreparer(rows, lora)
        eager = EagerExecutor(model, attention, self._inputs, needs)
        self._flat_executors: list[Executor] = [eager]
        if program is not None:
            programmed = ProgramExecutor(program, attention, self._inputs, needs)
            self._flat_executors.insert(0, programmed)
        if isinstance(model, EncoderDecoderLM):
            alone = EncoderDecoderExecutor(model, attention, self._inputs, rows)
            self._flat_executors = [alone]
        self._proposals: ProposalStage | None = None
        self._images: ImageEncoder | None = None
        self._vocab_size = vocab_size
        self._copies: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._last_copy: torch.cuda.Event | None = None
        self.logits_at_once = max(1, MAX_LOGITS[self._device.type] // vocab_size)
        self.scores_at_once = max(1, MAX_SCORES[self._device.type] // vocab_size)

    def propose_with(self, stage: ProposalStage) -> None:
        """Have a drafter with weights follow each step, and propose drafts where requested."""
        self._proposals = stage

    def encode_with(self, images: ImageEncoder) -> None:
        """Encode images and use their rows, as steps request."""
        self._images = images

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        """Apply the row changes and start the forward pass; sample it before the next launch.

        The changes hold even if the forward pass fails: the scheduler does not repeat them.

        Raises:
            OutOfMemoryError: the device's memory did not suffice for the step.
        """
        began = time.perf_counter()
        with out_of_memory_as_error():
            # First, and without taking memory: later steps use the slots, too.
            if self.host_cache is not None:
                self.host_cache.offload(step.offloads)
                self.host_cache.restore(step.restores)
            if step.adapters and self._lora is not None:
                self._lora.put(step.adapters)
            self.rows.apply(step)
            if step.loads:
                self._attention.import_blocks(step.loads)
            image_rows, encodes = None, NOTHING_ENCODED
            if self._images is not None:
                images = self._images.run(step)
                image_rows, encodes = images.rows, images.report
            if step.copies:
                self._attention.copy_blocks(step.copies)
            if self._proposals is not None:
                self._proposals.apply(step)
            if not step.rows:  # the step only encodes
                return LaunchedStep(self._nothing(), step, {}, [], began, encodes)
            requested = self.rows.row_options
            chunks = prompt_chunks(step, requested) if requested else []
            batch = self._batch(step, bool(chunks), image_rows)
            forward = self._pick_executor(batch).run(batch)
            options = {}
            if requested:
                rows = enumerate(forward.batch.rows.tolist())
                options = {index: requested[row] for index, row in rows if row in requested}
            return LaunchedStep(forward, step, options, chunks, began, encodes)

    def _nothing(self) -> ForwardOutput:
        """The result of a step without entries."""
        self._inputs.reset()
        none = np.zeros(0, np.int64)
        empty = torch.empty(0, 1, device=self._device)
        targets = torch.empty(0, dtype=torch.int64, device=self._device)
        return ForwardOutput(empty, self.rows.sampling.select(none, none), targets)

    def _batch(
        self, step: Step, reports_prompts: bool, images: ImageRows | None = None
    ) -> StepBatch:
        rows = np.array(step.rows, np.int64)
        adapter_slots = None
        if self._lora is not None:
            adapter_slots = self.rows.adapter_slots[rows]
            if adapter_slots.max() < 0:
                adapter_slots = None
        return StepBatch(step, rows, adapter_slots, reports_prompts, images)

    def _pick_executor(self, batch: StepBatch) -> Executor:
        """The fastest one that supports the step. Graphs look up every token."""
        captured: tuple[Executor | None, ...] = (self.graphs, self.mixed_graphs)
        for graphs in captured:
            if graphs is not None and not batch.step.images and graphs.supports(batch):
                self._inputs.reset()
                return graphs
        return next(each for each in self._flat_executors if each.supports(batch))

    @torch.inference_mode()
    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> DeviceResult:
        """Choose the tokens of a launched step and put them into the token pool.

        Then images are encoded for as long as the step may still last.

        Raises:
            OutOfMemoryError: as above.
            ValueError: masks of another shape than the step's.
        """
        assert isinstance(handle, LaunchedStep)
        result = self._sample(handle, masks)
        result.encodes = handle.encodes
        if self._images is not None:
            result.encodes = self._images.run_timed(handle.step, handle.began, handle.encodes)
        return result

    def _sample(
        self, handle: LaunchedStep, masks: tuple[Sequence[int], Any] | None
    ) -> DeviceResult:
        result = DeviceResult()
        if not self._shard.is_last:
            return result
        with out_of_memory_as_error():
            forward = handle.forward
            if forward.all_hidden is not None:
                for chunk in handle.chunks:
                    scored = ScoredChunk(
                        chunk,
                        forward.all_hidden,
                        self.rows.tokens,
                        self._model.logits,
                        self.logits_at_once,
                        self.scores_at_once,
                    )
                    result.prompts.append(scored)
            agreed: Tensor | None = None
            if len(forward.batch):
                self._choose(handle, self._masks(masks, len(forward.batch)), result)
                if self._shard.size > 1 and result.packed is None:
                    agreed = self._agree(forward, result)
            if self._proposals is not None and handle.step.rows:
                chosen = [part.token_ids for part in result.sampled] if agreed is None else [agreed]
                if result.packed is not None:
                    chosen = [result.packed[:, 0], *chosen]
                result.proposals = self._proposals.propose(handle.step, chosen, forward.states)
            if self._shard.rank > 0:
                result.packed = None  # shard 0 reports
            result.send(self._device, self._copies)
            if result.packed is not None:  # other results are never overwritten
                self._last_copy = result.arrived
        return result

    @torch.inference_mode()
    def logits(self, handle: LaunchedStep) -> Tensor:
        """float32 [N, V] of a launched step, all at once: for a few rows."""
        forward = handle.forward
        return forward.output if forward.is_logits else self._model.logits(forward.output)

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

    def _choose(self, handle: LaunchedStep, masks: TokenMasks | None, result: DeviceResult) -> None:
        """Head and sampler, in parts of bounded size."""
        forward = handle.forward
        plain = masks is None and not handle.options
        if self._shard.size > 1:  # the others are given neither masks nor all options
            assert masks is None or handle.step.reads_logits
            plain = not handle.step.reads_logits
        if forward.choose is not None and plain:
            if self._last_copy is not None:  # of what is about to be overwritten
                torch.cuda.current_stream(self._device).wait_event(self._last_copy)
            result.packed = forward.choose()
            return
        count = len(forward.batch)
        logits_at_once = count if forward.is_logits else self.logits_at_once
        for begin in range(0, count, logits_at_once):
            logits = forward.output[begin : begin + logits_at_once]
            if not forward.is_logits:
                logits = self._model.logits(logits)
            if self._shard.rank > 0:
                continue
            at_once = self.scores_at_once
            if (
                masks is None
                and not handle.options
                and self._sampler.only_reads(logits, forward.batch)
            ):
                at_once = len(logits)
            for first in range(begin, begin + len(logits), at_once):
                end = min(first + at_once, begin + len(logits))
                part = slice(first, end)
                batch = forward.batch if end - first == count else forward.batch[part]
                raw = logits[first - begin : end - begin]
                scores = self._apply_options(handle, part, raw, result)
                mask = None if masks is None else masks.between(first, end)
                sampled = self._sampler(raw, batch, self.rows.tokens, scores, mask)
                self.rows.write(forward.targets[part], sampled.token_ids)
                result.sampled.append(sampled)

    def _agree(self, forward: ForwardOutput, result: DeviceResult) -> Tensor:
        """Send shard 0's tokens to the other shards; returns them.

        A sum may differ in its last bit from shard to shard; their sequences may not.
        """
        if self._shard.rank == 0:
            return self._shard.broadcast(torch.cat([part.token_ids for part in result.sampled]))
        chosen = self._shard.broadcast(torch.empty_like(forward.targets))
        self.rows.write(forward.targets, chosen)
        return chosen

    def _apply_options(
        self, handle: LaunchedStep, part: slice, logits: Tensor, result: DeviceResult
    ) -> Tensor | None:
        """Report raw logits and run logits processors; returns processed ones, if there are any."""
        scores, batch = None, handle.forward.batch
        for entry, options in handle.options.items():
            if not part.start <= entry < part.stop:
                continue
            index = entry - part.start
            if options.extras.return_generation_logits:
                result.generation_logits[entry] = to_host(logits[index].clone())
            if options.extras.logits_processors:
                scores = logits.clone() if scores is None else scores
                row, position = batch.rows[entry], batch.positions[entry]
                token_ids = self.rows.tokens[int(row), : int(position)].tolist()  # waits for them
                error = _run_processors(options, scores[index], token_ids)
                if error is not None:
                    result.errors[entry] = error
        return scores


def _run_processors(options: RowOptions, scores: Tensor, token_ids: Sequence[int]) -> str | None:
    """Run a request's processors on its ``scores``, in place and in order.

    Args:
        options: of the request.
        scores: float32 [V], its raw logits.
        token_ids: prompt and generated tokens so far.

    Returns:
        The error in one line, if a processor raised or returned something that no token can be
        sampled from; else None.
    """
    for processor in options.extras.logits_processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            returned = processor(options.request_id, scores, token_ids, options.extras.client_id)
        except Exception as error:  # the user's own code may raise anything; only it fails
            message = str(error).strip().partition("\n")[0]
            return f"the logits processor {name} failed: {type(error).__name__}: {message}"
        if not isinstance(returned, Tensor):
            found = type(returned).__name__
        elif returned.shape != scores.shape or not returned.is_floating_point():
            found = f"{returned.dtype} {list(returned.shape)}"
        else:
            if returned is not scores:
                scores.copy_(returned)
            continue
        return (
            f"the logits processor {name} returned {found} "
            f"instead of a float tensor [{len(scores)}]"
        )
    if not bool((scores < math.inf).all()):
        return "the logits processors left NaN or infinite logits"
    return None
