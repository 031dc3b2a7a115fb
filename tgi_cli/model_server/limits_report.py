"""Reports at the start which limits the engine set by itself, each with its reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

from tgi_cli.config import DEFAULT_CPU_PREFILL_TOKENS, DEFAULT_PREFILL_TOKENS, ServeConfig
from tgi_cli.config.resolve import MAX_SEQUENCES
from tgi_cli.engine.config import Batching
from tgi_cli.process.units import format_memory
from tgi_cli.worker.sizing.kv_cache import (
    CPU_SHARE,
    CUDA_MARGIN,
    PREFIX_SHARE,
    STATE_SHARE,
    Capacity,
)

log = logging.getLogger(__name__)


class Limit(NamedTuple):
    """One limit that the user did not set, or did not get; ``text`` is for people."""

    name: str
    value: int
    reason: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.text or f'{self.name} {self.value}'}: {self.reason}"


def log_limits(serve: ServeConfig, context: int, capacity: Capacity) -> None:
    """Log one line per limit that the user left open; JSON lines also have name and value.

    Args:
        serve: The user's settings.
        context: ``max_total_tokens`` as resolved from them before warm-up.
        capacity: The result of warm-up.
    """
    for limit in found_limits(serve, context, capacity):
        more = {"limit": limit.name, "value": limit.value} if serve.json_output else None
        log.info("%s", limit, extra=more)
    if capacity.config.batching != Batching.INFLIGHT:
        names = ("waiting_served_ratio", "max_waiting_tokens")
        ignored = [
            "--" + name.replace("_", "-") for name in names if getattr(serve, name) is not None
        ]
        if ignored:
            log.warning(
                "%s will be ignored: with --batching %s no request waits for a share of the batch",
                " and ".join(ignored),
                capacity.config.batching,
            )
    if serve.max_prefill_delay and capacity.config.batching != Batching.FUSED:
        log.warning(
            "--max-prefill-delay will be ignored: with --batching %s no step has both prompts and "
            "decodes",
            capacity.config.batching,
        )


def found_limits(serve: ServeConfig, context: int, capacity: Capacity) -> Iterator[Limit]:
    """Yield the limits of :func:`log_limits` with their reasons."""
    config = capacity.config
    whole = config.batching == Batching.INFLIGHT
    if serve.max_total_tokens is None:
        if config.max_total_tokens < context:
            reason = "what the KV cache holds"
        elif config.max_total_tokens == serve.max_batch_total_tokens:
            reason = "max_batch_total_tokens"
        else:
            reason = "the model's context"
        yield Limit("max_total_tokens", config.max_total_tokens, reason)
    if serve.max_input_tokens is None:
        reason = "max_total_tokens less one"
        if whole and config.max_input_tokens == serve.max_batch_prefill_tokens:
            reason = "max_batch_prefill_tokens (inflight computes prompts whole)"
        yield Limit("max_input_tokens", config.max_input_tokens, reason)
    if serve.max_batch_prefill_tokens is None:
        on_cpu = config.device == "cpu"
        reason = "default on a CPU" if on_cpu else "default"
        usual = DEFAULT_CPU_PREFILL_TOKENS if on_cpu else DEFAULT_PREFILL_TOKENS
        if config.max_batch_prefill_tokens > usual:
            reason = "the longest prompt (inflight computes prompts whole)"
        yield Limit("max_batch_prefill_tokens", config.max_batch_prefill_tokens, reason)
    requested = serve.max_batch_size or serve.max_concurrent_requests
    if serve.max_batch_size is None or config.max_batch_size < requested:
        reason = "max_concurrent_requests"
        if config.max_batch_size < requested:
            reason = "the most that can run at once"
        if config.max_batch_size < min(requested, MAX_SEQUENCES):
            reason = f"as many recurrent states as {STATE_SHARE:.0%} of the cache's memory holds"
        yield Limit("max_batch_size", config.max_batch_size, reason)
    if serve.max_batch_total_tokens is None:
        tokens = capacity.max_batch_total_tokens
        blocks = f"{capacity.num_blocks} blocks of {config.block_size} tokens ({tokens} tokens)"
        yield Limit("max_batch_total_tokens", tokens, _cache(capacity), f"KV cache {blocks}")


def _cache(capacity: Capacity) -> str:
    """Return the reason for the size of the KV cache."""
    config = capacity.config
    activations = format_memory(capacity.activation_bytes)
    size = format_memory(capacity.cache_bytes)
    if capacity.num_state_slots:
        states = format_memory(capacity.state_bytes)
        size += f", and {states} for {capacity.num_state_slots} recurrent states"
    if config.device != "cpu":
        return (
            f"{size}, all that is free after {activations} of activations, less a "
            f"margin of {CUDA_MARGIN:.0%} of the device"
        )
    per_sequence = -(-config.max_total_tokens // config.block_size)
    useful = int(config.max_batch_size * per_sequence * (1 + PREFIX_SHARE))
    if capacity.num_blocks >= useful:
        return (
            f"{size}, all that {config.max_batch_size} sequences can use and "
            f"{PREFIX_SHARE:.0%} for prefixes"
        )
    free = format_memory(round((capacity.cache_bytes + capacity.state_bytes) / CPU_SHARE))
    share = "half" if CPU_SHARE == 0.5 else f"{CPU_SHARE:.0%}"
    return f"{size}, {share} of {free} free after {activations} of activations"
