"""From the user's words to a specified engine, once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path

from tgi_cli.config.schema import (
    ATTENTIONS,
    BATCHINGS,
    BLOCK_SIZE,
    CAPACITY_POLICIES,
    DEFAULT_CPU_LORAS,
    DEFAULT_CPU_PREFILL_TOKENS,
    DEFAULT_LORA_RANK,
    DEFAULT_LORAS,
    DEFAULT_PREFILL_TOKENS,
    IN_CHECKPOINTS,
    KV_CACHE_DTYPES,
    LEAST_LORA_RANK,
    MAX_WAITING_TOKENS,
    MOST_CONTEXT,
    MOST_SEQUENCES,
    ON_THE_FLY,
    WAITING_SERVED_RATIO,
    DeviceFacts,
    EngineConfig,
    ModelFacts,
    ServeConfig,
)
from tgi_cli.errors import ConfigError, UnsupportedModelError

log = logging.getLogger(__name__)

_PROCESS_BYTES = 256 << 20
"""Of a process that runs a share of a model, without its weights: torch and the interpreter."""

_DTYPES = {
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float": "float32",
}


def _resolve_dtype(asked: str | None, model: ModelFacts, device: DeviceFacts) -> str:
    if asked is not None and asked != "auto":
        if asked not in _DTYPES:
            known = ", ".join(sorted(_DTYPES))
            raise ConfigError(f"--dtype {asked!r} is not a dtype", f"one of: auto, {known}")
        return _DTYPES[asked]
    if device.kind == "cpu":
        return "bfloat16" if device.native_bfloat16 else "float32"
    return "bfloat16" if model.dtype == "float32" else model.dtype


def _resolve_kv_cache_dtype(asked: str, dtype: str) -> str:
    _one_of("kv-cache-dtype", asked, KV_CACHE_DTYPES)
    return KV_CACHE_DTYPES[asked] or dtype


def _resolve_attention(serve: ServeConfig, device: DeviceFacts) -> str | None:
    asked = serve.attention
    _one_of("attention", asked, ATTENTIONS)
    wants = ATTENTIONS[asked]
    if wants not in (None, device.kind):
        here = ", ".join(name for name, kind in ATTENTIONS.items() if kind in (None, device.kind))
        raise ConfigError(f"--attention {asked} is not for {device.kind}", f"one of: {here}")
    if serve.disable_custom_kernels and asked in ("native", "triton"):
        raise ConfigError(
            f"--attention {asked} is a kernel, and --disable-custom-kernels wants none",
            "leave one of them off",
        )
    return asked if wants or asked == "torch" else None


def _resolve_cuda_graphs(asked: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if asked is None:
        return None
    if any(size < 0 for size in asked):
        raise ConfigError(f"--cuda-graphs {','.join(map(str, asked))}: sizes are positive")
    return () if 0 in asked else asked


def _resolve_quantize(asked: str | None, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What is to be done to plain weights, if anything."""
    found = model.quantization
    if asked is None:
        return None
    _one_of("quantize", asked, (*ON_THE_FLY, *IN_CHECKPOINTS))
    if asked == "exl2":
        raise UnsupportedModelError(
            "exl2 mixes widths within a matrix, for kernels of exllamav2 that only CUDA has",
            "serve a checkpoint quantized with gptq, awq or compressed-tensors",
        )
    if asked == "marlin" and device.kind != "cuda":
        raise ConfigError("--quantize marlin names kernels of CUDA GPUs", "leave it off")
    if found is None and asked in ON_THE_FLY:
        return asked
    if asked != found and not (asked == "marlin" and found in ("gptq", "awq")):
        what = f"is quantized with {found}" if found else "has plain weights"
        cause = f"--quantize {asked} contradicts the checkpoint, which {what}"
        raise ConfigError(cause, f"leave it off; for plain weights: {', '.join(ON_THE_FLY)}")
    return None


def _resolve_lora_rank(serve: ServeConfig, largest: int) -> int:
    if serve.max_lora_rank is None:
        return max(largest, LEAST_LORA_RANK) if largest else DEFAULT_LORA_RANK
    if largest > serve.max_lora_rank:
        raise ConfigError(
            f"--max-lora-rank {serve.max_lora_rank} is less than the rank {largest} of an adapter",
            f"make it {largest}, or leave it open",
        )
    return serve.max_lora_rank


def _resolve_num_shard(serve: ServeConfig, model: ModelFacts, device: DeviceFacts) -> int:
    shards = _asked_shards(serve, device)
    if shards == 1:
        return 1
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads is not None and (
        heads % shards or (kv_heads is not None and kv_heads % shards and shards % kv_heads)
    ):
        kv = "" if kv_heads in (None, heads) else f" and {kv_heads} key-value heads"
        raise UnsupportedModelError(
            f"{heads} attention heads{kv} cannot be shared out evenly to {shards} shards",
            "choose --num-shard so that it divides them",
        )
    if device.kind == "cpu" and shards * _PROCESS_BYTES > device.total_memory:
        raise ConfigError(
            f"--num-shard {shards}: so many processes do not fit into the memory of this machine "
            f"({device.total_memory / 2**30:.1f} GiB)",
            "ask for fewer; on a CPU more than one per socket is no faster",
        )
    return shards


def _asked_shards(serve: ServeConfig, device: DeviceFacts) -> int:
    asked, sharded = serve.num_shard, serve.sharded
    _positive("num-shard", asked)
    if sharded is False:
        if asked is not None and asked > 1:
            raise ConfigError(
                f"--num-shard {asked} and --no-sharded contradict each other", "leave one off"
            )
        return 1
    if sharded and asked == 1:
        raise ConfigError("--sharded and --num-shard 1 contradict each other", "leave one off")
    if device.kind != "cuda":
        if sharded and asked is None:
            raise ConfigError(
                "--sharded spreads the model over all GPUs, and this machine has none for torch",
                "say --num-shard N to spread it over N processes on the CPU",
            )
        return asked or 1
    if sharded and asked is None and device.count < 2:
        raise ConfigError(
            "--sharded spreads the model over all GPUs, and there is one alone", "leave it off"
        )
    shards = asked or (device.count if sharded else min(device.chosen or 1, device.count))
    if shards > device.count:
        raise ConfigError(
            f"--num-shard {shards} is more than the GPUs that there are ({device.count})",
            f"ask for at most {device.count}; CUDA_VISIBLE_DEVICES says which are seen",
        )
    return shards


def _one_of(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"--{name} {value!r} is not known", f"one of: {', '.join(choices)}")


def _positive(name: str, value: int | None) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"--{name} {value} must be positive")


def resolve(
    serve: ServeConfig,
    model: ModelFacts,
    device: DeviceFacts,
    model_path: Path,
    lora_rank: int = 0,
) -> EngineConfig:
    """Fill in everything the user left open; check everything the user said.

    ``lora_rank`` is the largest rank of the adapters that ``serve`` names, 0 if there are none.

    Raises:
        ConfigError: limits that contradict each other or the model, in TGI's terms.
        UnsupportedModelError: a quantization that cannot be served.
    """
    for name in (
        "max-input-tokens",
        "max-total-tokens",
        "max-batch-prefill-tokens",
        "max-batch-total-tokens",
        "max-batch-size",
        "max-concurrent-requests",
        "max-queued-requests",
        "max-queued-tokens",
        "max-cpu-loras",
        "max-lora-rank",
    ):
        _positive(name, getattr(serve, name.replace("-", "_")))
    _one_of("batching", serve.batching, BATCHINGS)
    _one_of("capacity-policy", serve.capacity_policy, CAPACITY_POLICIES)
    ratio = WAITING_SERVED_RATIO
    if serve.waiting_served_ratio is not None:
        ratio = serve.waiting_served_ratio
    patience = MAX_WAITING_TOKENS if serve.max_waiting_tokens is None else serve.max_waiting_tokens
    if not (math.isfinite(ratio) and ratio >= 0):
        raise ConfigError(f"--waiting-served-ratio {ratio:g} must be at least 0")
    if patience < 0:
        raise ConfigError(f"--max-waiting-tokens {patience} must be at least 0")

    context = min(model.max_position_embeddings, MOST_CONTEXT)
    if context < model.max_position_embeddings:
        log.warning(
            "the model's context is served up to %d tokens, of %d",
            context,
            model.max_position_embeddings,
        )
    total = serve.max_total_tokens
    if total is None:
        total = context
        if serve.max_batch_total_tokens is not None:
            total = min(total, serve.max_batch_total_tokens)
        if serve.max_input_tokens is not None:
            total = max(total, min(serve.max_input_tokens + 1, context))
    if total > context:
        raise ConfigError(
            f"--max-total-tokens {total} is more than the model's context of {context} tokens",
            f"ask for at most {context}",
        )
    if total < 2:
        raise ConfigError("--max-total-tokens must be at least 2: one in, one out")
    max_input = total - 1 if serve.max_input_tokens is None else serve.max_input_tokens
    if max_input >= total:
        raise ConfigError(
            f"--max-input-tokens {max_input} must be less than --max-total-tokens {total}"
        )
    if serve.max_batch_total_tokens is not None and serve.max_batch_total_tokens < total:
        raise ConfigError(
            f"--max-batch-total-tokens {serve.max_batch_total_tokens} cannot hold one request of "
            f"--max-total-tokens {total}",
            "raise the former or lower the latter",
        )
    prefill = serve.max_batch_prefill_tokens
    if prefill is None:
        prefill = DEFAULT_CPU_PREFILL_TOKENS if device.kind == "cpu" else DEFAULT_PREFILL_TOKENS
    if (
        serve.max_batch_prefill_tokens is not None
        and serve.max_batch_total_tokens is not None
        and prefill > serve.max_batch_total_tokens
    ):
        raise ConfigError(
            f"--max-batch-prefill-tokens {prefill} must be at most "
            f"--max-batch-total-tokens {serve.max_batch_total_tokens}"
        )
    if serve.batching == "inflight" and prefill < max_input:
        # Prompts are computed whole: a step has to hold the longest.
        if serve.max_batch_prefill_tokens is None:
            prefill = max_input
        elif serve.max_input_tokens is None:
            max_input = prefill
        else:
            raise ConfigError(
                "with --batching inflight, --max-batch-prefill-tokens must be >= "
                f"--max-input-tokens. Given: {prefill} and {max_input}",
                "raise the former, lower the latter, or leave one of them open",
            )
    loras = serve.max_loras
    if loras is None:
        loras = DEFAULT_LORAS if serve.lora_adapters else 0
    if loras < 0 or (serve.lora_adapters and not loras):
        raise ConfigError(
            f"--max-loras {loras} leaves no room for adapters",
            "make it 1 or more, or leave it open",
        )
    if not 0 < serve.cuda_memory_fraction <= 1:
        raise ConfigError("--cuda-memory-fraction must be above 0 and at most 1")
    if serve.cuda_memory_fraction < 1 and device.kind != "cuda":
        log.warning(
            "--cuda-memory-fraction is for GPUs: on a CPU the cache takes half of what is free, or "
            "--max-batch-total-tokens"
        )
    if serve.cross_check and serve.rope is not None:
        raise ConfigError(
            "--cross-check compares with transformers' model as it is, without --rope-scaling",
            "leave one of them off",
        )
    dtype = _resolve_dtype(serve.dtype, model, device)
    return EngineConfig(
        model_path=model_path,
        model_id=serve.model_id,
        revision=serve.revision or "",
        device=device.kind,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        max_input_tokens=max_input,
        max_total_tokens=total,
        max_batch_prefill_tokens=prefill,
        max_batch_total_tokens=serve.max_batch_total_tokens,
        max_batch_size=min(serve.max_batch_size or serve.max_concurrent_requests, MOST_SEQUENCES),
        prefix_caching=serve.prefix_caching,
        batching=serve.batching,
        capacity_policy=serve.capacity_policy,
        waiting_served_ratio=ratio,
        max_waiting_tokens=patience,
        max_queued_requests=serve.max_queued_requests,
        max_queued_tokens=serve.max_queued_tokens,
        kv_cache_dtype=_resolve_kv_cache_dtype(serve.kv_cache_dtype, dtype),
        attention=_resolve_attention(serve, device),
        cuda_graphs=_resolve_cuda_graphs(serve.cuda_graphs),
        quantize=_resolve_quantize(serve.quantize, model, device),
        quantize_head=serve.quantize_head,
        max_loras=loras,
        max_cpu_loras=serve.max_cpu_loras or DEFAULT_CPU_LORAS,
        max_lora_rank=_resolve_lora_rank(serve, lora_rank),
        num_shard=_resolve_num_shard(serve, model, device),
        cuda_memory_fraction=serve.cuda_memory_fraction,
        trust_remote_code=serve.trust_remote_code,
        load_format=serve.load_format,
        rope=serve.rope,
        grammars=not serve.disable_grammar_support,
        cross_check=serve.cross_check,
        measured_limits=serve.measured_limits,
        explicit_limits=tuple(
            name
            for name in ("max_input_tokens", "max_total_tokens")
            if getattr(serve, name) is not None
        ),
        json_output=serve.json_output,
    )
