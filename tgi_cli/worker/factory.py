"""From a folder of weights to a worker that runs steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tgi_cli import kernels
from tgi_cli.attention import PagedAttention, StateCache, attention_name, create_attention
from tgi_cli.attention.fp8 import FP8_DTYPES
from tgi_cli.config import EngineConfig, ModelFacts, ServeConfig, resolve
from tgi_cli.config.resolve_quantization import has_integers
from tgi_cli.device import default_threads, set_threads
from tgi_cli.device.distributed import ALONE, Shard, device_of
from tgi_cli.engine.step import MAX_DRAFT_ROWS
from tgi_cli.errors import ConfigError
from tgi_cli.kernels.facts import describe_device
from tgi_cli.kernels.linear import multiplies_bytes
from tgi_cli.layers import chunked
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import CausalLM, load_model, model_facts, read_config
from tgi_cli.models.cpu_program import compile_program
from tgi_cli.models.kv_scales import kv_scales
from tgi_cli.models.lora import adapter_rank
from tgi_cli.models.registry import scale_rope
from tgi_cli.models.stages import check_stages
from tgi_cli.process.resident_memory import trim_heap
from tgi_cli.worker.lazy_grammars import LazyGrammars
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.sizing.attention_choice import choose_attention
from tgi_cli.worker.sizing.memory import (
    LOAD_REMEDY,
    out_of_memory_as_error,
    release_unused_memory,
)
from tgi_cli.worker.sizing.product_choice import choose_products
from tgi_cli.worker.speculation.load import Target, load_drafter
from tgi_cli.worker.worker import LoadedModel, ModelWorker

if TYPE_CHECKING:
    from tgi_cli.worker.grammar import LLGuidance
    from tgi_cli.worker.tensor_parallel.worker import ShardedWorker

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer*.json", "*vocab*", "*.model", "*.tiktoken")
"""Patterns of files that a tokenizer is made of: its own format, and those that transformers
converts."""


def resolve_config(serve: ServeConfig, model_path: Path) -> tuple[EngineConfig, ModelFacts]:
    """Read the model's configuration, and resolve the settings for it and this machine.

    Raises:
        ConfigError: flags that contradict each other or the model.
        ModelError: files that cannot be used.
    """
    model_config = scale_rope(read_config(model_path, serve.trust_remote_code), serve.rope)
    ranks = [adapter_rank(Path(item.partition("=")[2])) for item in serve.lora_adapters]
    facts, device = model_facts(model_config), describe_device(None)
    bytewise = device.kernels and has_integers(serve, facts) and multiplies_bytes()
    return resolve(serve, facts, device, model_path, max(ranks, default=0), bytewise), facts


def load_worker(
    serve: ServeConfig,
    model_path: Path,
    progress: Callable[[int, int], None] | None = None,
    own_process: bool = True,
) -> tuple[ModelWorker | ShardedWorker, EngineConfig]:
    """Load a model and create its worker, in several processes if it has several shards or stages.

    Args:
        serve: the settings; resolved here, which takes facts of the model and the device.
        model_path: folder of the checkpoint.
        progress: called while loading; see :func:`tgi_cli.models.load_model`.
        own_process: whether this process may be ended if another one of the model is lost.

    Returns:
        The worker, not warmed up, and the resolved configuration (whose limits warm-up may
        still lower).

    Raises:
        ConfigError: flags that contradict each other or the model.
        ModelError: files that cannot be used.
        OutOfMemoryError: the weights do not fit.
        ShardError: another process of the model failed.
    """
    config, _ = resolve_config(serve, model_path)
    if config.pipeline_parallel_size > 1:
        model_config = scale_rope(read_config(model_path, serve.trust_remote_code), serve.rope)
        check_stages(model_config, config.pipeline_parallel_size)
    if config.num_processes == 1:
        return make_worker(config, progress=progress), config
    # A single process needs no messages: torch alone is enough.
    from tgi_cli.worker.tensor_parallel.group import WorkerGroup
    from tgi_cli.worker.tensor_parallel.node_listener import NodeListener
    from tgi_cli.worker.tensor_parallel.pipeline import PipelinedWorker
    from tgi_cli.worker.tensor_parallel.worker import ShardedWorker

    stages = config.pipeline_parallel_size
    if stages > 1:
        log.info("starting %d stages, %d processes in all", stages, config.num_processes)
    else:
        log.info("starting %d shards", config.num_shard)
    listener = NodeListener(serve, config) if config.nnodes > 1 else None
    group = WorkerGroup(config, listener)
    group.shard.own_process = own_process
    try:
        worker = make_worker(config, group.shard, progress)
        group.connect()
    except BaseException:  # an error of any kind, SIGTERM's SystemExit, Ctrl-C
        group.close()
        raise
    return (PipelinedWorker if stages > 1 else ShardedWorker)(worker, group), config


def make_worker(
    config: EngineConfig,
    shard: Shard = ALONE,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWorker:
    """Create the worker of one process, with its share of the model. Raises as load_worker."""
    began = time.monotonic()
    model_config = read_config(config.model_path, config.trust_remote_code)
    model_config = scale_rope(model_config, config.rope)
    facts = model_facts(model_config)
    quantized = config.quantize or facts.quantization not in (None, "mxfp4")
    if config.cross_check and (quantized or config.head_bits):
        raise ConfigError(
            "--cross-check compares with transformers' own weights, and these are quantized",
            "leave it off, or serve plain weights",
        )
    if config.state_prefill == "chunked":
        chunked.functions()  # before the weights, which take a while
    constrained = shard.leads and not config.disable_grammar_support
    grammars = _grammars(config, facts) if constrained else None
    table = _make_table(config)
    device = device_of(config.device, config.device_index(shard.process))
    dtype: torch.dtype = getattr(torch, config.dtype)
    if device.type == "cpu":
        set_threads(default_threads(processes=shard.local_size))
    if config.quantize_activations:
        _require_byte_products(device, dtype)
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
            head_bits=config.head_bits,
            input_bits=8 if config.quantize_activations else 16,
        )
        lora = None if table is None else LoraCache(model, table, dtype, device)
        if config.cross_check:
            from tgi_cli.worker.cross_check import cross_check  # rarely used

            served = config.max_total_tokens
            cross_check(model_config, model, facts.vocab_size, dtype, device, served, shard)
    named = {"speculate", "speculative_config", "speculative_model"}
    explicit = named.intersection(config.explicit_limits)
    if model.state_specs and config.speculate and explicit:
        raise ConfigError(
            f"--speculate {config.speculate}: the recurrent states of {facts.architecture} cannot "
            "be rolled back to before a draft token that is rejected",
            "leave it off",
        )
    target = Target(model, model_config, facts, dtype, device, shard)
    with out_of_memory_as_error(LOAD_REMEDY):
        drafter = load_drafter(config, target)
    for flag, value in (
        ("--kv-cache-dir", config.kv_cache_dir),
        ("--kv-offloading-size", config.kv_offloading_size),
    ):
        if value is not None:
            _require_blocks_alone(flag, model, drafter is not None)
    release_unused_memory(device)
    with out_of_memory_as_error(LOAD_REMEDY):
        choose_products(model, dtype, device, shard)
    cache_dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
    if device.type == "cpu":
        set_threads(default_threads(model.weight_bytes, shard.local_size))
    kind = config.attention
    if kind is None:
        kind = choose_attention(model, dtype, device, cache_dtype, config.max_total_tokens, shard)
    try:
        attention = create_attention(
            kind,
            model.kv_specs,
            config.block_size,
            dtype,
            device,
            cache_dtype,
            model.state_specs,
        )
    except ValueError as error:
        raise ConfigError(f"--attention {config.attention}: {error}", "leave it off") from error
    if cache_dtype in FP8_DTYPES and config.load_format != "dummy":
        _use_scales(config, model, attention)
    if config.state_prefill == "chunked":
        use_chunks(attention.states)
    kernels.set_threads(None)
    captured = drafter.needs if drafter is not None and isinstance(drafter.needs, tuple) else ()
    program = compile_program(model, attention, captured)
    alone = drafter is None or drafter.compiled
    if program is not None and table is None and alone:
        # What is left to torch takes microseconds, and its threads would look for more work for
        # milliseconds, on cores that the kernels' need: 8 streams lost a quarter of their rate.
        kernels.set_threads(torch.get_num_threads())
        set_threads(1)
    loaded = LoadedModel(facts, model, attention, lora, program, drafter, time.monotonic() - began)
    with out_of_memory_as_error():  # the tables of rows, as long as the context
        return ModelWorker(config, loaded, shard, grammars)


def _require_blocks_alone(flag: str, model: CausalLM, has_drafter: bool) -> None:
    """Raises ConfigError if KV blocks are not all that a model keeps of a prefix."""
    if model.state_specs:
        raise ConfigError(
            f"{flag}: the model keeps recurrent states, which are not kept outside of the cache",
            "leave it off",
        )
    if has_drafter:
        raise ConfigError(
            f"{flag}: weights that draft have a cache of their own, which is not kept",
            "leave it or the drafter off",
        )


def _require_byte_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where products cannot take activations in 8 bits."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not multiplies_bytes():
        raise ConfigError(
            "--quantize-activations needs bfloat16 and our kernels, for AVX2 or for AVX-512 with "
            "VNNI",
            "use --no-quantize-activations",
        )


def _use_scales(config: EngineConfig, model: CausalLM, attention: PagedAttention) -> None:
    """Store keys and values by the checkpoint's scales, if it has any."""
    scales = kv_scales(config.model_path, model)
    if scales and not attention.use_scales(scales):
        log.info(
            "the checkpoint's scales of keys and values are not used: attention by %s stores them "
            "as they are",
            attention_name(attention),
        )


def use_chunks(states: StateCache | None) -> None:
    """Have prompts computed in chunks of tokens.

    Raises:
        ConfigError: no layer of the model can be computed so.
    """
    specs = () if states is None else states.specs
    tensors = [tensor for spec in specs for tensor in spec.tensors]
    matrices = [each for each in tensors if each.name == "recurrent" and len(each.shape) == 3]
    if states is None or not matrices:
        raise ConfigError(
            "--state-prefill chunked is for models with linear attention or Mamba-2", "leave it off"
        )
    states.chunked = True


def _grammars(config: EngineConfig, facts: ModelFacts) -> LazyGrammars | None:
    """The compiler of grammars; None, with a warning, if there is no tokenizer for them."""

    def load() -> LLGuidance | None:
        from tgi_cli.worker.grammar import load_grammars  # brings llguidance and tokenizers

        made = load_grammars(
            config.model_path, facts.vocab_size, facts.eos_token_ids, config.trust_remote_code
        )
        trim_heap()  # what reading took for a while is a multiple of what is left
        return made

    if not any(next(config.model_path.glob(each), None) for each in _TOKENIZER_FILES):
        log.warning("grammars are unavailable: %s has no tokenizer", config.model_path)
        return None
    return LazyGrammars(load, facts.eos_token_ids)


def _make_table(config: EngineConfig) -> LoraTable | None:
    """The slots for adapters, without memory yet; None if the configuration has none."""
    if not config.max_loras:
        return None
    tokens = config.max_batch_prefill_tokens + config.max_batch_size
    if config.speculate:
        tokens += MAX_DRAFT_ROWS
    return LoraTable(config.max_loras, config.max_lora_rank, tokens)
