"""Resolves the user's settings into a fully specified engine, given the model and the device."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

from tgi_cli.config.checks import check_cache, check_input, check_settings
from tgi_cli.config.nodes import check_division
from tgi_cli.config.pipeline import NOT_IN_STAGES, check_devices
from tgi_cli.config.resolve_drafts import resolve_drafts
from tgi_cli.config.resolve_quantization import resolve_activations, resolve_quantize
from tgi_cli.config.schema import (
    DecoderFacts,
    DeviceFacts,
    EngineConfig,
    EngineOptions,
    ModelFacts,
    ServeConfig,
)
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.engine import (
    ATTENTIONS,
    DEFAULT_CPU_PREFILL_DELAY,
    DEFAULT_CPU_PREFILL_TOKENS,
    DEFAULT_PREFILL_TOKENS,
    KV_CACHE_DTYPES,
    MAX_WAITING_TOKENS,
    WAITING_SERVED_RATIO,
)
from tgi_cli.config.settings.model import (
    DEFAULT_CPU_LORAS,
    DEFAULT_LORA_RANK,
    DEFAULT_LORAS,
    MIN_LORA_RANK,
)
from tgi_cli.config.settings.setting import SERVE
from tgi_cli.errors import ConfigError, UnsupportedModelError

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Tokens per KV block: small enough for prefix reuse, whole cache lines for the CPU gather."""

MAX_SEQUENCES = 4096
"""Upper bound of the batch size: each sequence takes a row of the worker's tables."""

MAX_CONTEXT = 1 << 24
"""Upper bound of a context, which is the length of the worker's rows. Llama 4 Scout's is
10,485,760."""

_PROCESS_BYTES = 256 << 20
"""Memory of a shard's process without weights: PyTorch and the interpreter."""

_DTYPES = {"half": "float16", "float": "float32"}
"""Other names of data types."""


def resolve(
    serve: ServeConfig,
    model: ModelFacts,
    device: DeviceFacts,
    model_path: Path,
    lora_rank: int = 0,
    multiplies_bytes: bool = False,
) -> EngineConfig:
    """Fill in the defaults that depend on model and device, and validate all settings.

    Args:
        lora_rank: the largest rank of the adapters that ``serve`` names, or 0.
        multiplies_bytes: whether the device has kernels for activations of 8 bits.

    Raises:
        ConfigError: settings that contradict each other or the model, named as flags.
        UnsupportedModelError: a quantization format or a sharding that is not supported.
    """
    _check_values(serve)
    check_settings(serve)
    if serve.cuda_memory_fraction < 1 and device.kind != "cuda":
        log.warning(
            "--cuda-memory-fraction is for GPUs: on a CPU the cache takes half of the free memory, "
            "or --max-batch-total-tokens"
        )
    ratio, waiting = serve.waiting_served_ratio, serve.max_waiting_tokens
    options = {field.name: getattr(serve, field.name) for field in fields(EngineOptions)}
    if model.decoder is not None:
        _check_for_decoder(serve, model)
        # Each token's keys and values depend on the whole prompt.
        options["prefix_caching"] = False
    total = _resolve_total_tokens(serve, model)
    max_input, prefill = _resolve_input_tokens(serve, device, total, model.decoder)
    dtype = _resolve_dtype(serve.dtype, model, device)
    _check_state_prefill(serve, device, dtype)
    num_shard = _resolve_num_shard(serve, model, device)
    options |= resolve_drafts(serve, device)
    stages = serve.pipeline_parallel_size
    nodes = serve.nnodes
    check_division(nodes, num_shard, stages)
    if stages > 1:
        options |= NOT_IN_STAGES
    if stages > 1 or nodes > 1:
        check_devices(stages, num_shard, nodes, device, _PROCESS_BYTES)
    if serve.kv_cache_dir is not None:
        _check_kept_blocks(model, device, num_shard)
    if serve.kv_offloading_size is not None:
        _check_offloading(model, device)
    options["explicit_limits"] += tuple(
        name
        for name in ("max_input_tokens", "max_total_tokens")
        if getattr(serve, name) is not None
    )
    if model.decoder is not None:
        options["speculate"] = 0
    return EngineConfig(
        **options,
        model_path=model_path,
        revision=serve.revision or "",
        device=device.kind,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        max_input_tokens=max_input,
        max_total_tokens=total,
        max_batch_prefill_tokens=prefill,
        max_prefill_delay=_resolve_prefill_delay(serve, model, device),
        max_batch_size=min(serve.max_batch_size or serve.max_concurrent_requests, MAX_SEQUENCES),
        waiting_served_ratio=WAITING_SERVED_RATIO if ratio is None else ratio,
        max_waiting_tokens=MAX_WAITING_TOKENS if waiting is None else waiting,
        kv_cache_dtype=KV_CACHE_DTYPES[serve.kv_cache_dtype] or dtype,
        attention="torch" if model.decoder is not None else _resolve_attention(serve, device),
        cuda_graphs=() if stages > 1 or 0 in (serve.cuda_graphs or ()) else serve.cuda_graphs,
        quantize=resolve_quantize(serve.quantize, model, device),
        quantize_activations=resolve_activations(serve, model, dtype, multiplies_bytes),
        max_loras=serve.max_loras or (DEFAULT_LORAS if serve.lora_adapters else 0),
        max_cpu_loras=serve.max_cpu_loras or DEFAULT_CPU_LORAS,
        max_lora_rank=_resolve_lora_rank(serve, lora_rank),
        num_shard=num_shard,
        decoder=model.decoder,
    )


def _check_values(serve: ServeConfig) -> None:
    """Check each value as its flag is checked, which callers in Python do not pass through."""
    for setting in settings_of(SERVE):
        value = getattr(serve, setting.name, None)
        if value in (None, ()) or isinstance(value, bool):
            continue
        word = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        try:
            setting.kind.read(word)
        except ValueError as error:
            raise ConfigError(f"{setting.flag}: {error}") from error


def _resolve_total_tokens(serve: ServeConfig, model: ModelFacts) -> int:
    context = min(model.max_position_embeddings, MAX_CONTEXT)
    if context < model.max_position_embeddings:
        log.warning(
            "limiting the model's context to %d tokens, of %d",
            context,
            model.max_position_embeddings,
        )
    total, cache = serve.max_total_tokens, serve.max_batch_total_tokens
    dense = model.dense_positions
    if dense is not None and dense < context:
        sparse = f"{model.architecture} attends to a part of texts of more than {dense} tokens"
        if total is not None and total > dense:
            raise UnsupportedModelError(
                f"{sparse}, and such sparse attention is not supported",
                f"set --max-total-tokens {dense} or less",
            )
        log.warning("%s, which is not supported: longer ones are not served", sparse)
        context = dense
    if total is None:
        usual = None if model.decoder is None else model.decoder.usual_total_tokens
        total = min(each for each in (context, cache, usual) if each is not None)
        if serve.max_input_tokens is not None:
            total = max(total, min(serve.max_input_tokens + 1, context))
    if total > context:
        raise ConfigError(
            f"--max-total-tokens {total} is more than the model's context of {context} tokens",
            f"set at most {context}",
        )
    if total < 2:
        raise UnsupportedModelError(
            "the model's context is 1 token, and a request takes at least 2: one in, one out",
            "max_position_embeddings in config.json states it",
        )
    check_cache(total, cache)
    return total


def _resolve_input_tokens(
    serve: ServeConfig, device: DeviceFacts, total: int, decoder: DecoderFacts | None
) -> tuple[int, int]:
    """Maximum prompt tokens per request, and per step."""
    max_input = total - 1 if serve.max_input_tokens is None else serve.max_input_tokens
    encoded = None if decoder is None else decoder.max_input_tokens
    if encoded is not None and max_input > encoded:
        if serve.max_input_tokens is not None:
            raise ConfigError(
                f"--max-input-tokens {max_input} is more than the encoder's {encoded} positions",
                f"set at most {encoded}",
            )
        max_input = encoded
    check_input(max_input, total)
    prefill = serve.max_batch_prefill_tokens
    if prefill is None:
        prefill = DEFAULT_CPU_PREFILL_TOKENS if device.kind == "cpu" else DEFAULT_PREFILL_TOKENS
    if (serve.batching == "inflight" or decoder is not None) and prefill < max_input:
        # Prompts are not chunked: a step has to hold the longest.
        if serve.max_batch_prefill_tokens is None:
            prefill = max_input
        elif serve.max_input_tokens is None:
            max_input = prefill
        else:
            why = "with --batching inflight" if decoder is None else "of an encoder-decoder model"
            raise ConfigError(
                f"{why}, --max-batch-prefill-tokens must be >= "
                f"--max-input-tokens. Given: {prefill} and {max_input}",
                "raise the former, lower the latter, or leave one of them unset",
            )
    return max_input, prefill


def _resolve_prefill_delay(serve: ServeConfig, model: ModelFacts, device: DeviceFacts) -> int:
    """Milliseconds by which prompts may lengthen a step beside decodes."""
    if model.decoder is not None:
        return 0  # an encoder takes a prompt as a whole
    usual = DEFAULT_CPU_PREFILL_DELAY if device.kind == "cpu" else 0
    return usual if serve.max_prefill_delay is None else serve.max_prefill_delay


def _check_kept_blocks(model: ModelFacts, device: DeviceFacts, num_shard: int) -> None:
    """Refuse ``--kv-cache-dir`` where blocks cannot be copied. Raises ConfigError."""
    if device.kind != "cpu":
        raise ConfigError(f"--kv-cache-dir is for CPUs, not for {device.kind}", "leave it off")
    if num_shard > 1:
        raise ConfigError("--kv-cache-dir needs one shard", "leave it or --num-shard off")
    if model.decoder is not None:
        raise ConfigError(
            f"--kv-cache-dir is not for encoder-decoder models such as {model.architecture}",
            "leave it off",
        )


def _check_offloading(model: ModelFacts, device: DeviceFacts) -> None:
    """Refuse ``--kv-offloading-size`` where there is nothing to offload. Raises ConfigError."""
    if device.kind != "cuda":
        raise ConfigError(
            f"--kv-offloading-size is for GPUs, not for {device.kind}: its cache is in the same "
            "memory",
            "leave it off; --max-batch-total-tokens makes the cache larger",
        )
    if model.decoder is not None:
        raise ConfigError(
            f"--kv-offloading-size is not for encoder-decoder models such as {model.architecture}",
            "leave it off",
        )


def _check_for_decoder(serve: ServeConfig, model: ModelFacts) -> None:
    """Refuse what encoder-decoder models are not served with.

    Raises:
        ConfigError: a setting, named as its flag.
        UnsupportedModelError: a quantized checkpoint.
    """
    if model.quantization is not None:
        raise UnsupportedModelError(
            f"quantized weights ({model.quantization}) of encoder-decoder models are not read",
            "serve the plain checkpoint; --quantize quantizes it as it is loaded",
        )
    refused = {
        "--lora-adapters": bool(serve.lora_adapters),
        "--max-loras": bool(serve.max_loras),
        "--max-prefill-delay": bool(serve.max_prefill_delay),
        "--num-shard": (serve.num_shard or 1) > 1,
        "--sharded": bool(serve.sharded),
        "--pipeline-parallel-size": serve.pipeline_parallel_size > 1,
        "--nnodes": serve.nnodes > 1,
        "--cross-check": serve.cross_check,
        f"--attention {serve.attention}": serve.attention not in ("auto", "torch"),
        "--shard-uds-path": serve.shard_uds_path is not None,
        "--speculate": bool(serve.speculate),
        "--speculative-config": serve.speculative_config is not None,
        "--speculative-model": serve.speculative_model is not None,
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(
                f"{flag} is not supported for encoder-decoder models such as {model.architecture}",
                "leave it off",
            )


def _resolve_dtype(requested: str | None, model: ModelFacts, device: DeviceFacts) -> str:
    if requested is not None and requested != "auto":
        return _DTYPES.get(requested, requested)
    if device.kind == "cpu":
        return default_cpu_dtype(device, model.torch_products)
    return "bfloat16" if model.dtype == "float32" else model.dtype


def default_cpu_dtype(device: DeviceFacts, torch_products: bool) -> str:
    """The dtype of ``--dtype auto`` on a CPU.

    bfloat16 halves memory and what a token reads of it, but torch's products in it are slow where
    the CPU has no instructions for them: linear layers take 7 times as long as in float32,
    convolutions 40 to 50 times (AVX2). Our kernels are fast on every CPU that they support.

    Args:
        torch_products: see :class:`ModelFacts`.
    """
    fast = device.native_bfloat16 or (device.kernels and not torch_products)
    return "bfloat16" if fast else "float32"


def _check_state_prefill(serve: ServeConfig, device: DeviceFacts, dtype: str) -> None:
    """Refuse chunks of tokens where there are no kernels for them."""
    if serve.state_prefill != "chunked":
        return
    if device.kind != "cuda":
        raise ConfigError(f"--state-prefill chunked is not for {device.kind}", "leave it off")
    if dtype == "float32":
        raise ConfigError(
            "--state-prefill chunked has no kernels for float32", "use --dtype bfloat16"
        )


def _resolve_attention(serve: ServeConfig, device: DeviceFacts) -> str | None:
    requested = serve.attention
    required = ATTENTIONS[requested]
    if required not in (None, device.kind):
        here = ", ".join(name for name, kind in ATTENTIONS.items() if kind in (None, device.kind))
        raise ConfigError(f"--attention {requested} is not for {device.kind}", f"one of: {here}")
    return requested if required or requested == "torch" else None


def _resolve_lora_rank(serve: ServeConfig, largest: int) -> int:
    if serve.max_lora_rank is None:
        return max(largest, MIN_LORA_RANK) if largest else DEFAULT_LORA_RANK
    if largest > serve.max_lora_rank:
        raise ConfigError(
            f"--max-lora-rank {serve.max_lora_rank} is less than the rank {largest} of an adapter",
            f"set it to {largest}, or leave it unset",
        )
    return serve.max_lora_rank


def _resolve_num_shard(serve: ServeConfig, model: ModelFacts, device: DeviceFacts) -> int:
    shards = _requested_shards(serve, device)
    if shards == 1:
        return 1
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads is not None and (
        heads % shards or (kv_heads is not None and kv_heads % shards and shards % kv_heads)
    ):
        kv = "" if kv_heads in (None, heads) else f" and {kv_heads} key-value heads"
        raise UnsupportedModelError(
            f"{heads} attention heads{kv} cannot be split evenly among {shards} shards",
            "choose a --num-shard that divides them",
        )
    if device.kind == "cpu" and shards * _PROCESS_BYTES > device.total_memory * serve.nnodes:
        raise ConfigError(
            f"--num-shard {shards}: this many processes need more memory than this machine has "
            f"({device.total_memory / 2**30:.1f} GiB)",
            "lower it; on a CPU more than one per socket is no faster",
        )
    return shards


def _requested_shards(serve: ServeConfig, device: DeviceFacts) -> int:
    requested, sharded = serve.num_shard, serve.sharded
    if sharded is False:
        return 1
    if device.kind != "cuda":
        if sharded and requested is None:
            raise ConfigError(
                "--sharded shards the model over all GPUs, and this machine has none for torch",
                "use --num-shard N to shard it over N processes on the CPU",
            )
        return requested or 1
    if sharded and requested is None and device.count < 2:
        raise ConfigError(
            "--sharded shards the model over all GPUs, and there is only one", "leave it off"
        )
    shards = requested or (device.count if sharded else min(device.chosen or 1, device.count))
    if requested is None:
        shards = max(1, shards * serve.nnodes // serve.pipeline_parallel_size)
    count = device.count * serve.nnodes
    if shards > count:
        raise ConfigError(
            f"--num-shard {shards} is more than the number of GPUs, {count}",
            f"set at most {count}; CUDA_VISIBLE_DEVICES selects the visible ones",
        )
    return shards
