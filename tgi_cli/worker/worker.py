"""The worker of one process: a model on its device, its KV cache and its warm-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tgi_cli.attention import PagedAttention
from tgi_cli.config import EngineConfig, ModelFacts
from tgi_cli.device import default_threads
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.step import PendingResult, Step, StepTime
from tgi_cli.errors import TgiError
from tgi_cli.kernels import describe_kernels
from tgi_cli.models import CausalLM
from tgi_cli.worker.cuda_graphs import DecodeGraphs, graph_sizes
from tgi_cli.worker.executors import Forward
from tgi_cli.worker.graph_capture import cuda_graphs
from tgi_cli.worker.greedy_choice import greedy_choice
from tgi_cli.worker.host_cache import open_host_cache
from tgi_cli.worker.image_positions import ImagePositions
from tgi_cli.worker.images import ImageEncoder
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.kv_identity import block_identity
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.mixed_graphs import MixedGraphs
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing.draft_timing import time_steps
from tgi_cli.worker.sizing.image_cost import ImageCostMeter, max_image_rows
from tgi_cli.worker.sizing.kv_cache import Capacity, KVCacheSizing
from tgi_cli.worker.sizing.memory import release_unused_memory
from tgi_cli.worker.sizing.profile_steps import WARMUP_BLOCKS, WARMUP_SLOTS, with_slots
from tgi_cli.worker.sizing.variants import variant_steps
from tgi_cli.worker.speculation.load import LoadedDrafter
from tgi_cli.worker.speculation.stage import ProposalStage
from tgi_cli.worker.step_graphs import StepGraphs, mixed_sizes_of
from tgi_cli.worker.upload import Uploader

if TYPE_CHECKING:
    from tgi_cli.worker.lazy_grammars import LazyGrammars

log = logging.getLogger(__name__)

GRAPH_FACTORIES = {"cuda": cuda_graphs}
"""Factories of graphs by type of device; other devices have none."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, with its attention, adapters, program and drafter.

    Attributes:
        facts: read from its configuration.
        model: in its dtype, on its device.
        attention: without blocks yet.
        lora: slots for adapters; None if there are none.
        program: compiled from the model, where one could be.
        drafter: has weights and drafts for the model; None without one.
        load_seconds: the time it took to load.
    """

    facts: ModelFacts
    model: CausalLM
    attention: PagedAttention
    lora: LoraCache | None = None
    program: Forward | None = None
    drafter: LoadedDrafter | None = None
    load_seconds: float = 0.0


class ModelWorker:
    """Implements :class:`tgi_cli.engine.step.Worker`; call :meth:`warmup` before any step.

    Args:
        config: as resolved.
        loaded: the model.
        shard: this process's share of the model. All shards call the same methods with the same
            steps, in the same order.
        grammars: compiles grammars; None if they are off.

    Attributes:
        capacity: the result of the warm-up.
        grammars: as given.
    """

    capacity: Capacity | None = None
    _most_proposed = 0
    """Drafts that a drafter with weights proposes for a sequence, on any shard."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        shard: Shard = ALONE,
        grammars: LazyGrammars | None = None,
    ) -> None:
        self.model = loaded.model
        self.attention = loaded.attention
        self._config = config
        self._facts = loaded.facts
        self._load_seconds = loaded.load_seconds
        self._shard = shard
        self._device = self.attention.device
        self._lora = loaded.lora
        self.grammars = grammars
        rows = InputBatch(
            config.max_batch_size,
            config.max_sequence_tokens,
            config.block_size,
            Uploader(self._device),
            has_encoder=config.decoder is not None,
            vocab_size=loaded.facts.vocab_size,
            image_positions=ImagePositions(
                config.max_batch_size,
                loaded.model.position_axes,
                any(spec.spans != "none" for spec in loaded.attention.specs),
                loaded.facts.whole_prompts,
            ),
        )
        model, vocab_size = loaded.model, loaded.facts.vocab_size
        drafter = loaded.drafter
        needs = "none" if drafter is None else drafter.needs
        self.runner = ModelRunner(
            model, self.attention, rows, vocab_size, loaded.lora, shard, loaded.program, needs
        )
        self._proposer = None if drafter is None else drafter.make(rows)
        if self._proposer is not None:
            self.runner.propose_with(ProposalStage(self._proposer, rows))
        self._images: ImageEncoder | None = None
        if model.vision is not None:
            threads = default_threads(model.weight_bytes, shard.local_size)
            self._images = ImageEncoder(model.vision, self._device, shard, threads)
            self.runner.encode_with(self._images)
        self._graphs: StepGraphs | None = None
        sizes = graph_sizes(config.max_batch_size, config.cuda_graphs)
        make = GRAPH_FACTORIES.get(self._device.type)
        own_attention = any(spec.gathered or spec.index for spec in self.attention.specs)
        if make is not None and sizes and config.decoder is not None:
            log.info("an encoder-decoder model runs without CUDA graphs")
        elif make is not None and sizes and needs != "none":
            log.info("a drafter reads hidden states: the model runs without CUDA graphs")
        elif make is not None and sizes and own_attention:
            if shard.leads:
                log.info("a model with attention of its own runs without CUDA graphs")
        elif make is not None and sizes:
            width, choose, own = greedy_choice(model, shard, vocab_size)
            given, attention = (make, loaded.lora), self.attention
            decodes = DecodeGraphs(model, attention, rows, width, sizes, *given, choose, own)
            mixed = None
            if attention.states is None:
                counts = mixed_sizes_of(config)
                mixed = MixedGraphs(model, attention, rows, counts, *given, width, choose, own)
            self._graphs = StepGraphs(self.runner, shard, attention, decodes, mixed)

    def launch(self, step: Step) -> object:
        """See :meth:`tgi_cli.engine.step.Worker.launch`."""
        return self.runner.launch(step)

    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> PendingResult:
        """See :meth:`tgi_cli.engine.step.Worker.sample`."""
        return self.runner.sample(handle, masks)

    @property
    def block_bytes(self) -> int:
        """See :class:`tgi_cli.engine.block_store.BlockExporter`."""
        return self.attention.block_bytes

    def block_identity(self) -> bytes:
        """See :class:`tgi_cli.engine.block_store.BlockExporter`."""
        return block_identity(self._config, self.attention)

    def export_block(self, block: int) -> bytes:
        """See :class:`tgi_cli.engine.block_store.BlockExporter`."""
        return self.attention.export_block(block)

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        """See :meth:`tgi_cli.engine.step.AdapterStore.prepare_adapter`."""
        assert self._lora is not None, "the engine has no slots"
        return self._lora.prepare_adapter(adapter_id, name, path)

    def forget_adapter(self, adapter_id: int) -> None:
        """See :meth:`tgi_cli.engine.step.AdapterStore.forget_adapter`."""
        assert self._lora is not None, "the engine has no slots"
        self._lora.forget_adapter(adapter_id)

    def warmup(self) -> Capacity:
        """Run the worst steps that the limits allow, then make the KV cache as large as fits.

        With a profile that `tgi warmup` has saved, the worst steps are not run.

        Raises:
            OutOfMemoryError: such a step, or an explicit limit, does not fit.
        """
        began = time.monotonic()
        config, shard = self._config, self._shard
        states = self.attention.states
        slots = 0 if states is None else WARMUP_SLOTS
        proposer, rows = self._proposer, config.max_batch_size
        if proposer is not None:
            proposer.allocate(WARMUP_BLOCKS, rows)
        own_beside = 0 if proposer is None else proposer.block_bytes
        # Blocks have the same ids on all shards, and steps the same proposals.
        beside = -shard.smallest(-own_beside)
        self._most_proposed = -shard.smallest(-self._own_proposals)
        weight_bytes = self.model.weight_bytes + (0 if proposer is None else proposer.weight_bytes)

        def run(step: Step) -> object:
            return self._run_asking(with_slots(step, slots))

        images = self._image_meter(run)
        profile, num_blocks, num_slots, effective = KVCacheSizing(
            config,
            self.attention,
            shard,
            weight_bytes,
            run,
            lambda: None if self._graphs is None else self._graphs.measure(),
            beside,
            None if images is None else images.measure,
        ).size()
        if not profile.graphs and self._graphs is not None:
            self._graphs.drop("there were none when the limits were measured")
        self.attention.allocate(num_blocks)
        if states is not None:
            states.allocate(num_slots)
        if proposer is not None:
            proposer.allocate(num_blocks, rows)
        release_unused_memory(self._device)  # the small cache
        has_graphs = self._graphs is not None and self._graphs.capture(
            effective, num_blocks, states
        )
        self._compile_variants(effective, num_blocks)
        if states is not None and effective.speculate:
            if shard.leads:
                log.info("nothing is speculated: recurrent states cannot be rolled back")
            effective = replace(effective, speculate=0)
        step_times = self._time_steps(effective, num_blocks, profile.step_times)
        host_cache = self.runner.host_cache = open_host_cache(config, self.attention, shard)
        self.capacity = Capacity(
            config=effective,
            num_blocks=num_blocks,
            # A drafter's cache has no window: blocks are kept for it.
            kv_window=None if beside else self._kv_window(),
            num_host_blocks=0 if host_cache is None else host_cache.num_slots,
            num_state_slots=num_slots,
            cache_bytes=num_blocks * shard.total(self.attention.block_bytes + own_beside),
            state_bytes=0 if states is None else num_slots * states.slot_bytes * shard.size,
            weight_bytes=shard.total(weight_bytes),
            activation_bytes=profile.activation_bytes,
            load_seconds=self._load_seconds,
            warmup_seconds=time.monotonic() - began,
            step_seconds=profile.step_seconds,
            graphs=has_graphs,
            step_times=step_times,
            most_proposed=self._most_proposed,
            images=profile.images,
            whole_prompts=self._facts.whole_prompts,
        )
        if effective.max_total_tokens < config.max_total_tokens and shard.leads:
            log.warning(
                "memory for %d of %d tokens of context: max_total_tokens is %d",
                effective.max_total_tokens,
                config.max_total_tokens,
                effective.max_total_tokens,
            )
        return self.capacity

    def _image_meter(self, run: Callable[[Step], object]) -> ImageCostMeter | None:
        """Measures the cost of images relative to steps; None if the model takes none."""
        tower, images = self.model.vision, self._images
        if tower is None or images is None:
            return None
        return ImageCostMeter(self._config, tower, images, run, self._shard)

    def _time_steps(
        self, config: EngineConfig, num_blocks: int, known: tuple[StepTime, ...]
    ) -> tuple[StepTime, ...]:
        """The durations of steps with and without drafts, measured unless every shard has them."""
        proposer = self._proposer
        catches_up = -self._shard.smallest(-(proposer is not None and proposer.catches_up))
        complete = len(known) and (not catches_up or any(time.lag for time in known))
        if not config.speculate or self._shard.smallest(complete):
            return known
        return time_steps(
            lambda step: self.sample(self.launch(step)).wait(),
            config,
            self._shard,
            num_blocks,
            self._most_proposed,
            self._assume_computed,
            self._forget_computed if catches_up else None,
        )

    @property
    def _own_proposals(self) -> int:
        """Drafts that this shard's drafter with weights proposes for a sequence."""
        proposer = self._proposer
        return 0 if proposer is None else min(proposer.num_drafts, self._config.speculate)

    def _assume_computed(self) -> None:
        if self._proposer is not None:
            self._proposer.assume_computed()

    def _forget_computed(self) -> None:
        if self._proposer is not None:
            self._proposer.forget_computed()

    def _run_asking(self, step: Step) -> object:
        """Run a step that asks for as many drafts as a step may."""
        if self._most_proposed:
            step.proposals = [self._most_proposed * (count > 0) for count in step.samples]
        return self.sample(self.launch(step)).wait()

    def _compile_variants(self, config: EngineConfig, num_blocks: int) -> None:
        """Compile kernel variants that the steps so far have not used: it takes seconds."""
        if self._device.type != "cuda" or config.decoder is not None:
            return
        captured = self.runner.graphs, self.runner.mixed_graphs
        self.runner.graphs = self.runner.mixed_graphs = None
        slots = 0 if self.attention.states is None else self.attention.states.num_slots
        spans = self._shard.any(any(spec.spans != "none" for spec in self.attention.specs))
        try:
            for step in variant_steps(config, num_blocks, spans, self._lora is not None):
                self._run_asking(with_slots(step, slots))
        finally:
            self.runner.graphs, self.runner.mixed_graphs = captured

    def read_bytes(self, rows: int) -> int:
        """Bytes of weights that a decode of ``rows`` sequences reads, over all shards."""
        own = self.model.bytes_read(rows) * self._shard.size
        if self._shard.stages == 1 or self.capacity is None:
            return own
        # Other stages read the same share of their weights.
        return own * self.capacity.weight_bytes // (self.model.weight_bytes * self._shard.size)

    def _kv_window(self) -> int | None:
        """Positions that any layer sees of a sequence, over all stages; None for all."""
        own, shard = self.model.kv_window, self._shard
        if shard.any(own is None):
            return None
        return -shard.smallest(-(own or 0))

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Do nothing: a single process cannot lose a shard."""

    def close(self) -> None:
        """End the worker's threads. May be called twice."""
        if self.grammars is not None:
            self.grammars.close()
        if self._images is not None:
            self._images.close()

    def info(self) -> EngineInfo:
        """The model and the limits, for clients.

        Raises:
            RuntimeError: before :meth:`warmup`.
        """
        capacity = self.capacity
        if capacity is None:
            raise RuntimeError("the limits are unknown before warm-up")
        config = capacity.config
        weights = config.quantize or self._facts.quantization
        head = None if config.head_bits is None else f"{config.head_bits}-bit head"
        return EngineInfo(
            model_id=config.model_id,
            revision=config.revision,
            model_type=self._facts.model_type,
            dtype=config.dtype,
            device=config.device,
            vocab_size=self._facts.vocab_size,
            eos_token_ids=self._facts.eos_token_ids,
            max_input_tokens=config.max_input_tokens,
            max_total_tokens=config.max_total_tokens,
            max_batch_prefill_tokens=config.max_batch_prefill_tokens,
            max_batch_total_tokens=capacity.max_batch_total_tokens,
            max_batch_size=config.max_batch_size,
            block_size=config.block_size,
            weight_bytes=capacity.weight_bytes,
            load_seconds=capacity.load_seconds,
            grammar=self.grammars is not None,
            quantize=", ".join(filter(None, (weights, head))),
            num_shard=config.num_shard,
            step_seconds=capacity.step_seconds,
            speculate=config.speculate,
            decoder_start_ids=() if config.decoder is None else (config.decoder.start_id,),
            vision=capacity.encoder is not None,
            max_image_rows=0 if capacity.encoder is None else max_image_rows(config),
            kernels=describe_kernels() if config.device == "cpu" else "",
            pipeline_parallel_size=config.pipeline_parallel_size,
        )
