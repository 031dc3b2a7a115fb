"""How large the KV cache can be: measured by the worst steps, or known from a saved profile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tgi_cli.attention import PagedAttention
from tgi_cli.config import EncoderLimits, EngineConfig
from tgi_cli.device import available_memory, total_memory
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.step import Step, StepTime
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.process.units import format_memory
from tgi_cli.worker.sizing import saved_profile
from tgi_cli.worker.sizing.image_cost import ImageCost
from tgi_cli.worker.sizing.memory import PeakMeter, release_unused_memory
from tgi_cli.worker.sizing.profile_steps import (
    WARMUP_BLOCKS,
    WARMUP_SLOTS,
    first_steps,
    part_of_worst,
    threads_for,
    worst_steps,
)
from tgi_cli.worker.sizing.saved_profile import SavedProfile

log = logging.getLogger(__name__)

CPU_SHARE = 0.5
"""Share of the memory that is free after the activations for a cache of no explicit size. The
rest is for other programs and the file cache. Pages are taken from the system when written."""

CPU_LIMIT = 0.9
"""The same share for a cache of an explicit size."""

CUDA_MARGIN = 0.05
"""Share of the device's memory left free for what torch's allocator does not see (libraries' own
workspaces, other processes' contexts) and for its fragmentation."""

PREFIX_SHARE = 0.25
"""Cache on a CPU for prefixes of finished sequences, as a share of what all rows can use."""

STATE_SHARE = 0.5
"""Share of the cache that the recurrent states of running sequences may take; KV needs the rest."""

SNAPSHOT_SHARE = 0.25
"""Share of the rest for states at the end of prefixes."""

SNAPSHOTS_PER_ROW = 4
"""Limit of their number: of each conversation that runs, those of some earlier ones. Without prefix
caching, only samples of one prompt use them, and there is one per row at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a warm-up. Sizes in bytes.

    Attributes:
        config: the engine's configuration with the limits that hold: ``max_total_tokens`` and
            ``max_input_tokens`` are lower than resolved if they are not explicit and memory is
            short.
        num_blocks: KV blocks of ``config.block_size`` tokens.
        num_host_blocks: blocks that the host's memory holds besides.
        num_state_slots: slots for recurrent states; 0 if the model has none.
        state_bytes: of all slots.
        kv_window: positions that a token sees, if every layer has a sliding window.
        cache_bytes: of all blocks.
        weight_bytes: of the model.
        activation_bytes: upper bound of what a step takes beside them.
        load_seconds: from reading the configuration to weights in place.
        warmup_seconds: of the warm-up itself.
        step_seconds: estimate for the worst step on a CPU; 0 if unknown.
        graphs: whether decode steps are CUDA graphs.
        step_times: durations of steps with and without drafts; empty without speculative decoding.
        most_proposed: drafts that a drafter with weights proposes for a sequence; 0 without one.
        images: what they cost; None if the model takes none.
        whole_prompts: whether all tokens of a prompt see each other.
    """

    config: EngineConfig
    num_blocks: int
    cache_bytes: int
    weight_bytes: int
    activation_bytes: int
    load_seconds: float
    warmup_seconds: float
    kv_window: int | None = None
    num_host_blocks: int = 0
    num_state_slots: int = 0
    state_bytes: int = 0
    step_seconds: float = 0.0
    graphs: bool = False
    step_times: tuple[StepTime, ...] = ()
    most_proposed: int = 0
    images: ImageCost | None = None
    whole_prompts: bool = False

    @property
    def encoder(self) -> EncoderLimits | None:
        """What the scheduler is to know of the image encoder."""
        return None if self.images is None else self.images.limits

    @property
    def max_batch_total_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.config.block_size

    @property
    def profile(self) -> SavedProfile:
        """What later starts of the same model need not measure again."""
        return SavedProfile(
            activation_bytes=self.activation_bytes,
            graphs=self.graphs,
            step_seconds=self.step_seconds,
            max_total_tokens=self.config.max_total_tokens,
            step_times=self.step_times,
            images=self.images,
            weight_bytes=self.weight_bytes,
            block_bytes=self.cache_bytes // max(1, self.num_blocks),
            slot_bytes=self.state_bytes // max(1, self.num_state_slots),
        )


class SizedCache(NamedTuple):
    """A profile, and the KV blocks, state slots and limits that follow from it."""

    profile: SavedProfile
    num_blocks: int
    num_slots: int
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class KVCacheSizing:
    """Finds the size of one worker's cache. All shards do the same, with the same result.

    Attributes:
        config: as resolved.
        attention: gets a small cache.
        shard: this process's share of the model.
        weight_bytes: of the model.
        run: runs a step to its end.
        measure_graphs: returns the bytes that CUDA graphs take, or None if there are none.
        beside_bytes: that a drafter keeps beside each block.
        measure_images: returns what images cost; None if the model takes none.
    """

    config: EngineConfig
    attention: PagedAttention
    shard: Shard
    weight_bytes: int
    run: Callable[[Step], object]
    measure_graphs: Callable[[], int | None]
    beside_bytes: int = 0
    measure_images: Callable[[], ImageCost] | None = None

    def size(self) -> SizedCache:
        """Profile the model, or load its saved profile, and size the cache.

        Raises:
            OutOfMemoryError: a step, or an explicit limit, does not fit.
        """
        self.attention.allocate(WARMUP_BLOCKS)
        if self.attention.states is not None:
            self.attention.states.allocate(WARMUP_SLOTS)
        saved = self._load_profile()
        if saved is not None:
            with threads_for(self.weight_bytes, self.attention.device):
                for step in first_steps(self.config):
                    self.run(step)
            sized = self._if_it_fits(saved)
            if sized is not None:
                self._log("limits as `tgi warmup` measured them on %s; no worst step", saved.date)
                return sized
            self._log("there is less memory than on %s: measuring again", saved.date)
        return self._sized(self._measure())

    def _load_profile(self) -> SavedProfile | None:
        """The saved profile, if every shard has one."""
        saved = None
        if self.config.measured_limits:
            saved = saved_profile.load(saved_profile.key_of(self.config))
            if saved is not None and saved.images is None and self.measure_images is not None:
                saved = None
        return saved if self.shard.smallest(int(saved is not None)) else None

    def _if_it_fits(self, saved: SavedProfile) -> SizedCache | None:
        """The cache of a saved profile, or None if requests would get less of it than then."""
        try:
            sized = self._sized(saved)
        except OutOfMemoryError:  # the same on all shards
            return None
        return sized if sized.config.max_total_tokens >= saved.max_total_tokens else None

    def _measure(self) -> SavedProfile:
        """Run the worst steps that the limits allow."""
        config, device, shard = self.config, self.attention.device, self.shard
        meter = PeakMeter(device)
        free = available_memory(device) // self._sharers
        cacheable = shard.smallest(free // max(1, self._block_bytes) * config.block_size)
        part, began = part_of_worst(config), time.monotonic()
        with threads_for(self.weight_bytes, device):
            spans = shard.any(any(spec.spans != "none" for spec in self.attention.specs))
            for step in worst_steps(config, cacheable, spans):
                self.run(step)
        # On CUDA nearly all of it is what happens once: kernels are compiled and tuned.
        seconds = (time.monotonic() - began) * part if device.type == "cpu" else 0.0
        activations = meter.read() * part * self._sharers
        graphs = self.measure_graphs()
        images = None if self.measure_images is None else self.measure_images()
        if images is not None:
            activations += images.total_bytes * self._sharers
        return SavedProfile(
            activation_bytes=-shard.smallest(-activations - (graphs or 0)),
            graphs=graphs is not None,
            step_seconds=seconds,
            max_total_tokens=config.max_total_tokens,
            images=images,
        )

    def _sized(self, profile: SavedProfile) -> SizedCache:
        config, device = self.config, self.attention.device
        block_bytes, sharers = self._block_bytes, self._sharers
        release_unused_memory(device)
        slot_bytes = self._slot_bytes
        small = WARMUP_BLOCKS * block_bytes + WARMUP_SLOTS * slot_bytes
        available = available_memory(device) + small * sharers
        if device.type == "cpu" and (replicas := config.replicas) > 1:
            # The others may not have loaded their weights yet, and take a cache as large.
            available = max(0, available - (replicas - 1) * self.weight_bytes) // replicas
        budget = cache_budget(config, available, profile.activation_bytes, total_memory(device))
        budget //= sharers
        if self.shard.stages > 1:
            # Stages have different numbers of layers, and blocks the same ids on all of them.
            affordable = self.shard.smallest(budget // max(1, block_bytes))
            block_bytes = -self.shard.smallest(-block_bytes)
            budget = affordable * block_bytes
        else:
            budget = self.shard.smallest(budget)
        num_slots, config = size_states(config, budget, slot_bytes)
        if config.max_batch_size < self.config.max_batch_size:
            text = "memory for the recurrent states of %d of %d sequences: max_batch_size is %d"
            if self.shard.leads:
                lower, asked = config.max_batch_size, self.config.max_batch_size
                log.warning(text, lower, asked, lower)
        num_blocks, config = size_cache(config, budget - num_slots * slot_bytes, block_bytes)
        return SizedCache(profile, num_blocks, num_slots, config)

    @property
    def _block_bytes(self) -> int:
        return self.attention.block_bytes + self.beside_bytes

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a state slot on the shard where it is largest; 0 without states."""
        states = self.attention.states
        return 0 if states is None else -self.shard.smallest(-states.slot_bytes)

    @property
    def _sharers(self) -> int:
        """Processes on a CPU share its memory, and each counts what all of them take."""
        sharers = self.shard.sharers or self.shard.processes
        return sharers if self.attention.device.type == "cpu" else 1

    def _log(self, text: str, *values: object) -> None:
        if self.shard.leads:
            log.info(text, *values)


def cache_budget(config: EngineConfig, available: int, activations: int, total_memory: int) -> int:
    """Bytes that the KV cache may take.

    Args:
        config: names the device, and perhaps the size of the cache.
        available: bytes that are free with the weights in place and no step running.
        activations: bytes that a step needs.
        total_memory: of the device.
    """
    if config.device == "cuda":
        margin = max(CUDA_MARGIN, 1 - config.cuda_memory_fraction)
        return max(0, available - activations - int(total_memory * margin))
    share = CPU_SHARE if config.max_batch_total_tokens is None else CPU_LIMIT
    return max(0, int((available - activations) * share))


def size_states(config: EngineConfig, budget: int, slot_bytes: int) -> tuple[int, EngineConfig]:
    """Choose the number of slots for recurrent states: one per row, and some for prefixes.

    Args:
        config: as resolved.
        budget: bytes for states and KV together.
        slot_bytes: of one slot over all layers; 0 if the model has no states.

    Returns:
        The number of slots, and the configuration: with a lower ``max_batch_size`` where the states
        of so many rows would take more than :data:`STATE_SHARE` of the budget.

    Raises:
        OutOfMemoryError: there is no memory for a single sequence.
    """
    if not slot_bytes:
        return 0, config
    rows = min(config.max_batch_size, int(budget * STATE_SHARE) // slot_bytes)
    if not rows:
        raise OutOfMemoryError(
            f"the recurrent state of one request takes {format_memory(slot_bytes)}, and "
            f"{format_memory(int(budget * STATE_SHARE))} are free for it",
            "free memory, lower --max-batch-prefill-tokens, or use a smaller model",
        )
    rest = int((budget - rows * slot_bytes) * SNAPSHOT_SHARE)
    per_row = SNAPSHOTS_PER_ROW if config.prefix_caching else 1
    snapshots = min(rest // slot_bytes, per_row * rows)
    if rows < config.max_batch_size:
        config = replace(config, max_batch_size=rows)
    return rows + snapshots, config


def size_cache(config: EngineConfig, budget: int, block_bytes: int) -> tuple[int, EngineConfig]:
    """Choose the number of KV blocks.

    Args:
        config: as resolved; limits that are not explicit may be lowered.
        budget: bytes for the cache.
        block_bytes: of one block over all layers.

    Returns:
        The number of blocks, and the configuration with the limits that hold with them.

    Raises:
        OutOfMemoryError: an explicit limit does not fit; the message has the numbers.
    """
    size = config.block_size
    per_sequence = -(-config.max_total_tokens // size)
    useful = int(config.max_batch_size * per_sequence * (1 + PREFIX_SHARE))
    if not block_bytes:  # a model without attention: blocks only count tokens
        asked = config.max_batch_total_tokens
        return useful if asked is None else -(-asked // size), config
    affordable = budget // block_bytes
    if config.max_batch_total_tokens is not None:
        asked = -(-config.max_batch_total_tokens // size)
        if asked > affordable:
            raise OutOfMemoryError(
                f"a KV cache of --max-batch-total-tokens {config.max_batch_total_tokens} takes "
                f"{format_memory(asked * block_bytes)}, and "
                f"{format_memory(budget)} are free for it",
                f"ask for at most {affordable * size} tokens, or leave it open"
                if affordable
                else "free memory, lower --max-batch-prefill-tokens, or use a smaller model",
            )
        return asked, config
    if affordable < per_sequence:
        return affordable, _lower_limits(config, affordable, budget, block_bytes)
    if config.device == "cpu":
        return min(affordable, useful), config
    return affordable, config


def _lower_limits(
    config: EngineConfig, affordable: int, budget: int, block_bytes: int
) -> EngineConfig:
    """Lower the limits of one sequence to ``affordable`` blocks, unless they are explicit."""
    total = affordable * config.block_size
    flag, wanted = "", 2
    if "max_total_tokens" in config.explicit_limits:
        flag, wanted = "--max-total-tokens", config.max_total_tokens
    elif "max_input_tokens" in config.explicit_limits:
        flag, wanted = "--max-input-tokens", config.max_input_tokens + 1
    if total < wanted:
        needed = -(-wanted // config.block_size) * block_bytes
        advice = (
            f"lower {flag} ({total} tokens in all fit)" if flag and total > 1 else "free memory"
        )
        raise OutOfMemoryError(
            f"the KV cache of one request of {wanted} tokens takes {format_memory(needed)}, and "
            f"{format_memory(budget)} are free for it",
            f"{advice}, lower --max-batch-prefill-tokens, or use a smaller model",
        )
    max_input = min(config.max_input_tokens, total - 1)
    return replace(config, max_total_tokens=total, max_input_tokens=max_input)
