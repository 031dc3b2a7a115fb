"""The engine's metrics: its load, its steps, and what gateways choose servers by.

Gateways need the waiting and running requests, the KV cache's usage and size, and the adapters in
use (https://github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003). They
can be configured with our names, or find vLLM's with ``--vllm-metrics``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.engine.metrics import (
    DRAFT_SOURCES,
    JOIN_REASONS,
    METHODS,
    POSITIONS,
    EngineLoad,
    EngineMetrics,
)
from tgi_cli.router.observability.prometheus import counter, gauge, histogram
from tgi_cli.router.replicas.policy import RoutingReason
from tgi_cli.router.replicas.pool import EnginePool

_DURATIONS = (
    ("inference", "total", "Seconds of a step, all stages."),
    ("forward", "forward", "Seconds of a step on the device."),
    ("decode", "update", "Seconds of applying a step's tokens."),
    ("filter", "send", "Seconds of sending a step's tokens."),
)


def load_lines(info: EngineInfo, metrics: EngineMetrics, adapters: int) -> Iterator[str]:
    """The exposition of the engine's load; ``adapters`` is the number of loaded adapters."""
    load, block_size = metrics.load, info.block_size
    used, capacity = load.used_blocks * block_size, info.max_batch_total_tokens
    drafts = sum(metrics.histograms["accepted_drafts", ""].counts)
    for name, help, value in (
        ("tgi_queue_size", "Requests waiting in the engine.", load.queued),
        ("tgi_queue_age_seconds", "Time the oldest one has waited.", metrics.queue_seconds),
        ("tgi_batch_current_size", "Requests running in the engine.", load.running),
        ("tgi_batch_current_max_tokens", "Capacity in tokens of the used KV blocks.", used),
        ("tgi_batch_max_total_tokens", "Capacity in tokens of the KV cache.", capacity),
        ("tgi_kv_cache_usage_ratio", "Share of the KV blocks in use.", _usage(info, load)),
        ("tgi_prefix_cache_blocks", "KV blocks that a prefix can reuse.", load.cached_blocks),
        ("tgi_state_slots_used", "Recurrent states in use.", load.used_state_slots),
        ("tgi_prefix_cache_states", "Recurrent states to reuse.", load.cached_states),
        ("tgi_lora_adapters", "Loaded LoRA adapters.", adapters),
    ):
        yield from gauge(name, help, value)
    yield from gauge("tgi_cache_config_info", "Size of the KV cache.", 1, _cache(info, ""))
    for name, help, count in (
        ("tgi_preemptions_total", "Sequences preempted.", load.preemptions),
        ("tgi_engine_steps_total", "Steps of the engine.", load.steps),
        ("tgi_engine_prompt_tokens_total", "Prompt tokens computed.", load.context_tokens),
        ("tgi_prefix_cache_query_tokens_total", "Prompt tokens looked up.", load.prompt_tokens),
        ("tgi_prefix_cache_hit_tokens_total", "Prompt tokens found.", load.reused_tokens),
        ("tgi_drafts_total", "Drafts verified, one per sequence and step.", drafts),
        ("tgi_draft_tokens_total", "Draft tokens verified.", load.drafted_tokens),
        ("tgi_draft_accepted_tokens_total", "Draft tokens accepted.", load.accepted_tokens),
        ("tgi_images_encoded_total", "Images encoded.", load.encoded_images),
        ("tgi_images_reused_total", "Images found encoded.", load.reused_images),
    ):
        yield from counter(name, help, {"": count})
    counts = metrics.counts
    for name, help, what in (
        ("tgi_draft_tokens_by_source_total", "Draft tokens verified.", "drafted"),
        ("tgi_draft_accepted_tokens_by_source_total", "Draft tokens accepted.", "accepted"),
    ):
        yield from counter(name, help, {s: counts[what, s] for s in DRAFT_SOURCES}, "source")
    events = {event: count for (what, event), count in counts.items() if what == "stored"}
    if events:
        name, stored = "tgi_kv_cache_dir_bytes", load.stored_bytes
        yield from gauge(name, "Bytes of the KV blocks in --kv-cache-dir.", stored)
        help = "KV blocks that prompts looked for in --kv-cache-dir, and their files."
        yield from counter("tgi_kv_cache_dir_blocks_total", help, events, "event")


def step_lines(metrics: EngineMetrics) -> Iterator[str]:
    """The exposition of the engine's steps, TGI's ``tgi_batch_*``."""
    histograms, counts = metrics.histograms, metrics.counts
    for name, help, by_method in (
        ("count", "Steps launched.", {m: counts["launched", m] for m in METHODS}),
        ("success", "Steps completed.", {m: sum(histograms["total", m].counts) for m in METHODS}),
        ("failure", "Steps failed.", {m: counts["failed", m] for m in METHODS}),
    ):
        yield from counter(f"tgi_batch_inference_{name}", help, by_method, "method")
    for name, stage, help in _DURATIONS:
        series = {method: histograms[stage, method] for method in METHODS}
        yield from histogram(f"tgi_batch_{name}_duration", help, series, "method")
    joins = {reason: counts["joined", reason] for reason in JOIN_REASONS}
    yield from counter("tgi_batch_concat", "Joins to a running batch.", joins, "reason")
    scheduling = {"decode": histograms["schedule", "join"]}
    for name, help, series, label in (
        ("tgi_batch_concat_duration", "Seconds of scheduling a join.", scheduling, "method"),
        ("tgi_batch_next_size", "Requests per join.", {"": histograms["next_size", ""]}, ""),
        (
            "tgi_request_skipped_tokens",
            "Tokens of a request in one step beyond the first.",
            {"": histograms["skipped_tokens", ""]},
            "",
        ),
    ):
        yield from histogram(name, help, series, label)


def sleep_lines(awake: bool, wakes: int, failed: int, seconds: float) -> Iterator[str]:
    """The exposition of whether the engine sleeps; ``seconds`` is what the last wake took."""
    yield from gauge("tgi_engine_asleep", "Whether the model server sleeps.", 0 if awake else 1)
    results = {"success": wakes, "failure": failed}
    yield from counter("tgi_engine_wakes_total", "Times it was woken.", results, "result")
    yield from gauge("tgi_engine_last_wake_seconds", "Time of the last wake.", seconds)


def lora_lines(prefix: str, labels: Mapping[str, str]) -> Iterator[str]:
    """The exposition of the adapters in use, named by the labels; its value is the time."""
    name = f"{prefix}lora_requests_info"
    return gauge(name, "LoRA adapters in use; the time.", time.time(), labels)


def routing_lines(pool: EnginePool) -> Iterator[str]:
    """The exposition of what the router knows of its replicas."""
    yield "# HELP tgi_replica_up Whether the router sends requests to the replica."
    yield "# TYPE tgi_replica_up gauge"
    for replica, client in enumerate(pool.replicas):
        yield f'tgi_replica_up{{replica="{replica}"}} {int(client.accepting)}'
    name = "tgi_replica_requests_total"
    yield f"# HELP {name} Requests sent to the replica, by the reason of its choice."
    yield f"# TYPE {name} counter"
    for replica in range(len(pool.replicas)):
        for reason in RoutingReason:
            count = pool.routed[replica, reason]
            yield f'{name}{{replica="{replica}",reason="{reason.value}"}} {count}'


def vllm_lines(info: EngineInfo, metrics: EngineMetrics, model_id: str) -> Iterator[str]:
    """What gateways read of https://docs.vllm.ai/en/latest/usage/metrics/, and its drafts."""
    load = metrics.load
    usage, model = _usage(info, load), {"model_name": model_id}
    for name, help, value in (
        ("num_requests_waiting", "As tgi_queue_size.", load.queued),
        ("num_requests_running", "As tgi_batch_current_size.", load.running),
        ("kv_cache_usage_perc", "As tgi_kv_cache_usage_ratio.", usage),
        ("gpu_cache_usage_perc", "The same under its older name.", usage),
    ):
        yield from gauge(f"vllm:{name}", help, value, model)
    yield from gauge("vllm:cache_config_info", "Size of the KV cache.", 1, _cache(info, "gpu_"))
    if not info.speculate:
        return
    accepted = metrics.histograms["accepted_drafts", ""]
    # Drafts of which at least 0, 1, 2 ... tokens were accepted.
    reached = list(accumulate(reversed(accepted.counts)))[::-1]
    for name, help, count in (
        ("num_drafts", "As tgi_drafts_total.", reached[0]),
        ("num_draft_tokens", "As tgi_draft_tokens_total.", load.drafted_tokens),
        ("num_accepted_tokens", "As tgi_draft_accepted_tokens_total.", load.accepted_tokens),
    ):
        yield from counter(f"vllm:spec_decode_{name}_total", help, {"": count}, more=model)
    positions = range(min(info.speculate, POSITIONS))
    yield from counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens accepted by their position.",
        {str(position): reached[position + 1] for position in positions},
        "position",
        model,
    )


def _usage(info: EngineInfo, load: EngineLoad) -> float:
    capacity = info.max_batch_total_tokens
    return load.used_blocks * info.block_size / capacity if capacity else 0.0


def _cache(info: EngineInfo, device: str) -> dict[str, str]:
    blocks = info.max_batch_total_tokens // info.block_size
    return {"block_size": str(info.block_size), f"num_{device}blocks": str(blocks)}
