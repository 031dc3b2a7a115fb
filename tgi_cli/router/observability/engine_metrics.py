"""The engine's part of the metrics: its load, its steps, and what gateways choose servers by.

Gateways need requests that wait and run, the KV cache's use and size, and adapters in use
(https://github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003). They can
be told our names; those that cannot find vLLM's with ``--vllm-metrics``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.metrics import JOIN_REASONS, METHODS, EngineLoad, EngineMetrics
from tgi_cli.router.observability.prometheus import counter, gauge, histogram

_STAGES = (
    ("inference", "total", "Seconds of a step: all of its stages."),
    ("forward", "forward", "Seconds of a step's work on the device."),
    ("decode", "update", "Seconds of taking in a step's tokens."),
    ("filter", "send", "Seconds of handing a step's tokens over."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What is known of the engine at one moment.

    Attributes:
        model_id: under which it is served.
        max_loras: adapters that share a batch; 0: there are none.
        adapters: how many may be named.
        running, waiting: the adapters that requests use, and those that requests wait for.
        vllm: show what gateways read under vLLM's names too.
    """

    model_id: str
    metrics: EngineMetrics
    max_loras: int = 0
    adapters: int = 0
    running: Sequence[str] = field(default=())
    waiting: Sequence[str] = field(default=())
    vllm: bool = False


def engine_lines(info: EngineInfo, view: EngineView) -> Iterator[str]:
    """The exposition."""
    yield from _load(info, view)
    yield from _steps(view.metrics)
    if view.max_loras:
        yield from gauge(
            "tgi_lora_requests_info", "Adapters in use; the time.", time.time(), _loras(view)
        )
    if view.vllm:
        yield from _vllm(info, view)


def _load(info: EngineInfo, view: EngineView) -> Iterator[str]:
    load = view.metrics.load
    for name, help, value in (
        ("tgi_queue_size", "Requests that wait in the engine.", load.queued),
        (
            "tgi_queue_age_seconds",
            "How long the longest waiting request has waited.",
            view.metrics.queue_seconds,
        ),
        ("tgi_batch_current_size", "Requests that run in the engine.", load.running),
        (
            "tgi_batch_current_max_tokens",
            "Tokens that the KV blocks in use can hold.",
            load.used_blocks * info.block_size,
        ),
        (
            "tgi_batch_max_total_tokens",
            "Tokens that the KV cache can hold.",
            info.max_batch_total_tokens,
        ),
        ("tgi_kv_cache_usage", "KV blocks in use, 0 to 1.", _usage(info, load)),
        (
            "tgi_prefix_cache_blocks",
            "KV blocks whose content can be used again.",
            load.cached_blocks,
        ),
        ("tgi_lora_adapters", "LoRA adapters that requests may name.", view.adapters),
    ):
        yield from gauge(name, help, value)
    yield from gauge("tgi_cache_config_info", "The KV cache's size.", 1, _cache(info))
    for name, help, count in (
        ("tgi_preemption_count", "Sequences set back to make room.", load.preemptions),
        ("tgi_engine_step_count", "Steps of the engine.", load.steps),
        ("tgi_engine_prompt_tokens", "Prompt tokens computed.", load.context_tokens),
        (
            "tgi_prefix_cache_query_tokens",
            "Prompt tokens looked up in the prefix cache.",
            load.prompt_tokens,
        ),
        (
            "tgi_prefix_cache_hit_tokens",
            "Prompt tokens found in the prefix cache.",
            load.reused_tokens,
        ),
    ):
        yield from counter(name, help, {"": count})


def _steps(metrics: EngineMetrics) -> Iterator[str]:
    """TGI's ``tgi_batch_*``; a step that computes prompts is a ``prefill``."""
    histograms, counts = metrics.histograms, metrics.counts
    for name, help, by_method in (
        ("count", "Steps begun.", {m: counts["launched", m] for m in METHODS}),
        ("success", "Steps done.", {m: sum(histograms["total", m].counts) for m in METHODS}),
        ("failure", "Steps failed.", {m: counts["failed", m] for m in METHODS}),
    ):
        yield from counter(f"tgi_batch_inference_{name}", help, by_method, "method")
    for name, stage, help in _STAGES:
        series = {method: histograms[stage, method] for method in METHODS}
        yield from histogram(f"tgi_batch_{name}_duration", help, series, "method")
    yield from histogram(
        "tgi_batch_concat_duration",
        "Seconds of choosing a step that lets requests join.",
        {"decode": histograms["schedule", "join"]},
        "method",
    )
    yield from counter(
        "tgi_batch_concat",
        "Times that requests joined a running batch, by what let them.",
        {reason: counts["joined", reason] for reason in JOIN_REASONS},
        "reason",
    )
    yield from histogram(
        "tgi_batch_next_size",
        "Requests that joined together.",
        {"": histograms["next_size", ""]},
    )
    yield from histogram(
        "tgi_request_skipped_tokens",
        "Tokens of a request in one step beyond the first.",
        {"": histograms["skipped_tokens", ""]},
    )


def _vllm(info: EngineInfo, view: EngineView) -> Iterator[str]:
    """https://docs.vllm.ai/en/latest/usage/metrics/, as far as gateways read it."""
    load = view.metrics.load
    model = {"model_name": view.model_id}
    usage = _usage(info, load)
    for name, help, value in (
        ("num_requests_waiting", "As tgi_queue_size.", load.queued),
        ("num_requests_running", "As tgi_batch_current_size.", load.running),
        ("kv_cache_usage_perc", "As tgi_kv_cache_usage.", usage),
        ("gpu_cache_usage_perc", "The same under its older name.", usage),
    ):
        yield from gauge(f"vllm:{name}", help, value, model)
    cache = _cache(info)
    blocks = {"block_size": cache["block_size"], "num_gpu_blocks": cache["num_blocks"]}
    yield from gauge("vllm:cache_config_info", "The KV cache's size.", 1, blocks)
    if view.max_loras:
        yield from gauge(
            "vllm:lora_requests_info", "Adapters in use; the time.", time.time(), _loras(view)
        )


def _usage(info: EngineInfo, load: EngineLoad) -> float:
    capacity = info.max_batch_total_tokens
    return load.used_blocks * info.block_size / capacity if capacity else 0.0


def _cache(info: EngineInfo) -> dict[str, str]:
    return {
        "block_size": str(info.block_size),
        "num_blocks": str(info.max_batch_total_tokens // info.block_size),
    }


def _loras(view: EngineView) -> dict[str, str]:
    return {
        "max_lora": str(view.max_loras),
        "running_lora_adapters": ",".join(view.running),
        "waiting_lora_adapters": ",".join(view.waiting),
    }
