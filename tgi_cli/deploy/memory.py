"""The memory that a server takes, from what warm-up measures of its model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from tgi_cli.config import EngineConfig, ServeConfig
from tgi_cli.device import describe
from tgi_cli.process.units import format_memory
from tgi_cli.worker.factory import load_worker, resolve_config
from tgi_cli.worker.sizing import saved_profile
from tgi_cli.worker.sizing.kv_cache import CPU_LIMIT, cache_budget, size_cache, size_states
from tgi_cli.worker.sizing.saved_profile import SavedProfile

log = logging.getLogger(__name__)

PROCESS_BYTES = 768 << 20
"""Memory of the processes without a model: launcher 30 MB, router 100 and torch 220 as resident
sizes, and the router's child processes for templates and grammars; the rest is for requests."""

PIXEL_BYTES = 32
"""Memory that decoding an image takes for each pixel, as for --max-image-pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a server, in bytes, and the limits with which it suffices.

    Attributes:
        weights: weights of the model.
        activations: that a step takes at most.
        cache: cache of KV blocks and recurrent states.
        processes: everything else.
        total: the limit for all processes together.
        cache_tokens: tokens that the KV cache holds.
        max_total_tokens: most tokens of a request.
        max_batch_size: sequences that run at once.
        date: when weights and activations were measured.
    """

    weights: int
    activations: int
    cache: int
    processes: int
    total: int
    cache_tokens: int
    max_total_tokens: int
    max_batch_size: int
    date: str

    @property
    def note(self) -> str:
        """The parts of the total, for people."""
        parts = (
            f"weights {format_memory(self.weights)}",
            f"a step {format_memory(self.activations)}",
            f"cache {format_memory(self.cache)}",
            f"processes {format_memory(self.processes)}",
        )
        return f"Memory, measured on {self.date}: {', '.join(parts)}"


def measured_profile(serve: ServeConfig, path: Path) -> tuple[EngineConfig, SavedProfile]:
    """The profile of ``tgi warmup``, or one that is measured and saved now.

    Args:
        serve: the settings.
        path: folder of the model.

    Raises:
        TgiError: as :func:`tgi_cli.worker.factory.load_worker` and ``warmup``.
    """
    config = resolve_config(serve, path)[0]
    saved = saved_profile.load(saved_profile.key_of(config))
    if saved is not None and saved.weight_bytes:
        return config, saved
    log.info("measuring the memory of %s, as `tgi warmup` does", serve.model_id)
    worker, config = load_worker(replace(serve, measured_limits=False), path)
    try:
        profile = worker.warmup().profile
    finally:
        worker.close()
    key = saved_profile.key_of(config)
    try:
        saved_profile.save(key, profile)
    except OSError as error:
        log.warning("the profile cannot be saved: %s", error)
        return config, profile
    return config, saved_profile.load(key) or profile


def plan_memory(
    config: EngineConfig, profile: SavedProfile, limit: int | None, image_pixels: int = 0
) -> MemoryPlan:
    """Divide memory among weights, steps and cache.

    Args:
        config: as resolved, for a CPU.
        profile: measured.
        limit: bytes for all processes. Default: what the server would take of this machine.
        image_pixels: that are decoded at once; 0 if the model takes no images.

    Raises:
        OutOfMemoryError: the memory is not enough for the model, or for an explicit limit.
    """
    processes = PROCESS_BYTES + PIXEL_BYTES * image_pixels
    machine = describe("cpu").total_memory
    free = (machine if limit is None else limit) - processes - profile.weight_bytes
    explicit = config
    if limit is not None and config.max_batch_total_tokens is None:
        # Memory that is set aside for the server is the cache's, but for the usual margin.
        explicit = replace(config, max_batch_total_tokens=1)
    budget = cache_budget(explicit, max(0, free), profile.activation_bytes, machine)
    slots, config = size_states(config, budget, profile.slot_bytes)
    state_bytes = slots * profile.slot_bytes
    blocks, config = size_cache(config, budget - state_bytes, profile.block_bytes)
    cache = state_bytes + blocks * profile.block_bytes
    # A server with a cache of explicit size takes CPU_LIMIT of what is left for it.
    needed = processes + profile.weight_bytes + profile.activation_bytes + int(cache / CPU_LIMIT)
    return MemoryPlan(
        weights=profile.weight_bytes,
        activations=profile.activation_bytes,
        cache=cache,
        processes=processes,
        total=needed if limit is None else limit,
        cache_tokens=blocks * config.block_size,
        max_total_tokens=config.max_total_tokens,
        max_batch_size=config.max_batch_size,
        date=profile.date,
    )
