"""The model on its device, from a folder of weights to a worker that runs steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tgi_cli import kernels
from tgi_cli.attention import PagedAttention, attention_name, create_attention
from tgi_cli.config import EngineConfig, ModelFacts, ServeConfig, resolve
from tgi_cli.device import available_memory, default_threads, describe, set_threads
from tgi_cli.device.distributed import ALONE, Shard, device_of
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.step import PendingResult, Step
from tgi_cli.errors import ConfigError, TgiError
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import CausalLM, load_model, model_facts, read_config
from tgi_cli.models.lora import adapter_rank
from tgi_cli.worker.cuda_graphs import DecodeGraphs, cuda_graphs, graph_sizes
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing.capacity import Capacity
from tgi_cli.worker.sizing.kv_cache import KVCacheSizing
from tgi_cli.worker.sizing.memory import LOAD_REMEDY, out_of_memory_as_error, release_unused_memory
from tgi_cli.worker.sizing.profile_steps import replays_agree
from tgi_cli.worker.sizing.step_timing import read_bytes
from tgi_cli.worker.upload import Uploader

if TYPE_CHECKING:
    from tgi_cli.worker.grammar import LLGuidance
    from tgi_cli.worker.tensor_parallel.worker import ShardedWorker

log = logging.getLogger(__name__)

GRAPHS = {"cuda": cuda_graphs}
"""What makes graphs, by kind of device; others have none."""


class ModelWorker:
    """Implements :class:`tgi_cli.engine.step.Worker`; :meth:`warmup` comes before any step.

    Args:
        config: as resolved.
        facts: of the model.
        model: in its dtype, on its device.
        attention: without blocks yet.
        load_seconds: that loading took, to be reported.
        adapters: of the model; None where there is no room for any.
        shard: this process's place, if several run the model: all of them call the same methods
            with the same steps, in the same order.
        grammars: what compiles them, on its way; None: nothing does.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        model: CausalLM,
        attention: PagedAttention,
        load_seconds: float = 0.0,
        adapters: LoraCache | None = None,
        shard: Shard = ALONE,
        grammars: Future[LLGuidance | None] | None = None,
    ) -> None:
        self._config = config
        self._facts = facts
        self._model = model
        self._attention = attention
        self._load_seconds = load_seconds
        self._shard = shard
        self._device = attention.device
        self._capacity: Capacity | None = None
        upload = Uploader(self._device)
        rows = InputBatch(
            config.max_batch_size, config.max_total_tokens, config.block_size, self._device, upload
        )
        self._adapters = adapters
        self._grammars = grammars
        self._runner = ModelRunner(
            model, attention, rows, facts.vocab_size, self._device, upload, adapters, shard
        )
        self._graphs: DecodeGraphs | None = None
        sizes = graph_sizes(config.max_batch_size, config.cuda_graphs)
        make = GRAPHS.get(self._device.type)
        if make is not None and sizes:
            self._graphs = DecodeGraphs(
                model, attention, rows, facts.vocab_size, sizes, make, adapters
            )

    def launch(self, step: Step) -> object:
        """See :meth:`tgi_cli.engine.step.Worker.launch`."""
        return self._runner.launch(step)

    def sample(
        self, handle: object, masks: tuple[Sequence[int], Any] | None = None
    ) -> PendingResult:
        """See :meth:`tgi_cli.engine.step.Worker.sample`."""
        return self._runner.sample(handle, masks)

    @property
    def grammars(self) -> LLGuidance | None:
        """What compiles grammars for the model, if anything does."""
        return None if self._grammars is None else self._grammars.result()

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        """See :meth:`tgi_cli.engine.step.AdapterStore.prepare_adapter`."""
        assert self._adapters is not None, "the engine has no slots"
        return self._adapters.prepare_adapter(adapter_id, name, path)

    def forget_adapter(self, adapter_id: int) -> None:
        """See :meth:`tgi_cli.engine.step.AdapterStore.forget_adapter`."""
        assert self._adapters is not None, "the engine has no slots"
        self._adapters.forget_adapter(adapter_id)

    def warmup(self) -> Capacity:
        """Run the worst steps that the limits allow, then make the KV cache as large as fits.

        Where `tgi warmup` has measured what they take, they need not be run again.

        Raises:
            OutOfMemoryError: such a step, or what the user promised to clients, does not fit.
        """
        began = time.monotonic()
        config, shard = self._config, self._shard
        sizing = KVCacheSizing(
            config,
            self._attention,
            shard,
            self._model.weight_bytes,
            lambda step: self.sample(self.launch(step)).wait(),
            self._measure_graphs,
        )
        found, num_blocks, effective = sizing()
        if not found.graphs:
            self._keep_graphs("there were none when the limits were measured")
        self._attention.allocate(num_blocks)
        release_unused_memory(self._device)  # the small cache
        self._capture_graphs(effective, num_blocks)
        self._capacity = Capacity(
            config=effective,
            num_blocks=num_blocks,
            kv_window=self._model.kv_window,
            cache_bytes=num_blocks * self._attention.block_bytes * shard.size,
            weight_bytes=shard.total(self._model.weight_bytes),
            activation_bytes=found.activation_bytes,
            load_seconds=self._load_seconds,
            warmup_seconds=time.monotonic() - began,
            step_seconds=found.step_seconds,
            graphs=self._graphs is not None,
        )
        if effective.max_total_tokens < config.max_total_tokens and shard.rank == 0:
            log.warning(
                "memory for %d of %d tokens of context: max_total_tokens is %d",
                effective.max_total_tokens,
                config.max_total_tokens,
                effective.max_total_tokens,
            )
        return self._capacity

    def _measure_graphs(self) -> int | None:
        """Bytes that graphs will take; None: there are none from here on."""
        if self._graphs is None:
            return None
        size, problem = 0, ""
        try:
            size = self._graphs.measure()
        except Exception as error:  # a model's code, a kernel, the device: then it runs launched
            problem = _problem(error)
        self._keep_graphs(problem)
        return size if self._graphs is not None else None

    def _capture_graphs(self, config: EngineConfig, num_blocks: int) -> None:
        """Record the graphs over the cache, and have them used if they are right."""
        graphs, began = self._graphs, time.monotonic()
        if graphs is None:
            return
        before, problem = available_memory(self._device), ""
        try:
            graphs.capture()
        except Exception as error:  # as above
            problem = _problem(error)
        self._keep_graphs(problem)
        if self._graphs is None:
            return
        agree = replays_agree(self._runner, graphs, config, num_blocks)
        self._keep_graphs("" if agree else "they compute something else than the model")
        self._runner.graphs = self._graphs
        if self._graphs is not None and self._shard.rank == 0:
            log.info(
                "CUDA graphs of %d sizes up to %d rows: %.1f MiB, captured in %.1f s",
                len(graphs.sizes),
                graphs.largest,
                max(0, before - available_memory(self._device)) / 2**20,
                time.monotonic() - began,
            )

    def _keep_graphs(self, problem: str) -> None:
        """Do without graphs if any shard has a problem with them: all run the same operations."""
        graphs, fine = self._graphs, self._shard.smallest(int(not problem))
        if graphs is None or fine:
            return
        cause = problem or "another shard has none"
        log.warning("decode steps run without CUDA graphs, slower: %s", cause)
        self._graphs = None
        graphs.drop()

    def read_bytes(self, rows: int) -> int:
        """Bytes of weights that a decode of ``rows`` sequences reads, over all shards."""
        return read_bytes(self._model, rows) * self._shard.size

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Have ``on_lost`` called when no step can be run any more: never, in one process."""

    def close(self) -> None:
        """End what was started for the worker: threads. May be called twice."""
        if self.grammars is not None:
            self.grammars.close()

    def info(self) -> EngineInfo:
        """What clients must know.

        Raises:
            RuntimeError: before :meth:`warmup`.
        """
        capacity = self._capacity
        if capacity is None:
            raise RuntimeError("the limits are not known before warm-up")
        config = capacity.config
        weights = config.quantize or self._facts.quantization
        head = "quantized head" if config.quantize_head else None
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
        )


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def load_worker(
    serve: ServeConfig, model_path: Path, progress: Callable[[int, int], None] | None = None
) -> tuple[ModelWorker | ShardedWorker, EngineConfig]:
    """Load a model and put a worker around it, in several processes if that was asked for.

    Args:
        serve: the user's words; resolved here, since that takes the model's and the device's
            facts.
        model_path: folder of the checkpoint.
        progress: told of the loading; see :func:`tgi_cli.models.load_model`.

    Returns:
        The worker, not warmed up, and the resolved configuration (whose limits warm-up may
        still lower).

    Raises:
        ConfigError: flags that contradict each other or the model.
        ModelError: files that cannot be used.
        OutOfMemoryError: the weights do not fit.
        ShardError: another process of the model failed.
    """
    model_config = read_config(model_path, serve.trust_remote_code, serve.rope)
    ranks = [adapter_rank(Path(item.partition("=")[2])) for item in serve.lora_adapters]
    facts = model_facts(model_config)
    config = resolve(serve, facts, describe(None), model_path, max(ranks, default=0))
    if config.num_shard > 1:
        from tgi_cli.worker.tensor_parallel.worker import (
            load_sharded,  # it is made of what stands here
        )

        return load_sharded(config, progress), config
    return make_worker(config, progress=progress), config


def make_worker(
    config: EngineConfig,
    shard: Shard = ALONE,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWorker:
    """The same for one process, with a share of the model. Raises the same."""
    began = time.monotonic()
    model_config = read_config(config.model_path, config.trust_remote_code, config.rope)
    facts = model_facts(model_config)
    if config.cross_check and config.load_format == "dummy":
        raise ConfigError(
            "--load-format dummy has no weights that --cross-check could compare",
            "give one of the two",
        )
    quantized = config.quantize or facts.quantization not in (None, "mxfp4")
    if config.cross_check and (quantized or config.quantize_head):
        raise ConfigError(
            "--cross-check compares with transformers' own weights, and these are quantized",
            "leave it off, or serve plain weights",
        )
    constrained = not (config.disable_grammar_support or shard.rank)
    grammars = _grammars(config, facts) if constrained else None
    table = make_table(config)
    device = device_of(config.device, shard.rank)
    dtype: torch.dtype = getattr(torch, config.dtype)
    if device.type == "cpu":
        set_threads(default_threads(processes=shard.size))
    with out_of_memory_as_error(LOAD_REMEDY):
        model = load_model(
            model_config,
            dtype,
            device,
            progress,
            shard=shard,
            load_format=config.load_format,
            lora=table,
            max_positions=config.max_total_tokens,
            quantize=config.quantize,
            quantize_head=config.quantize_head,
        )
        adapters = None if table is None else LoraCache(model, table, dtype, device)
        if config.cross_check:
            from tgi_cli.worker.cross_check import cross_check  # which few ask for

            served = config.max_total_tokens
            cross_check(model_config, model, facts.vocab_size, dtype, device, served, shard)
    release_unused_memory(device)
    cache_dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
    if device.type == "cpu":
        set_threads(default_threads(model.weight_bytes, shard.size))
    try:
        attention = create_attention(
            config.attention, model.kv_specs, config.block_size, dtype, device, cache_dtype
        )
    except ValueError as error:
        raise ConfigError(f"--attention {config.attention}: {error}", "leave it off") from error
    kernels.set_threads(None)
    if attention_name(attention) == "native" and table is None and model.is_program:
        # What is left to torch takes microseconds, and its threads would look for more work for
        # milliseconds, on cores that the kernels' need: 8 streams lost a quarter of their rate.
        kernels.set_threads(torch.get_num_threads())
        set_threads(1)
    seconds = time.monotonic() - began
    with out_of_memory_as_error():  # the tables of rows, as long as the context
        return ModelWorker(config, facts, model, attention, seconds, adapters, shard, grammars)


def _grammars(config: EngineConfig, facts: ModelFacts) -> Future[LLGuidance | None]:
    """Read the vocabulary for grammars while the weights are read."""
    from tgi_cli.worker.grammar import load_grammars  # brings llguidance

    pool = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
    future = pool.submit(
        load_grammars,
        config.model_path,
        facts.vocab_size,
        facts.eos_token_ids,
        config.trust_remote_code,
    )
    pool.shutdown(wait=False)
    return future


def make_table(config: EngineConfig) -> LoraTable | None:
    """The slots for adapters that a configuration asks for, without memory yet."""
    if not config.max_loras:
        return None
    tokens = config.max_batch_prefill_tokens + config.max_batch_size
    return LoraTable(config.max_loras, config.max_lora_rank, tokens)
