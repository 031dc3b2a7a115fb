"""How large the KV cache can be: measured by the worst steps, or known from an earlier time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tgi_cli.attention import PagedAttention
from tgi_cli.config import EngineConfig
from tgi_cli.device import available_memory, total_memory
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.step import Step
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.worker.sizing import saved_profile
from tgi_cli.worker.sizing.capacity import cache_budget, size_cache
from tgi_cli.worker.sizing.memory import PeakMeter, release_unused_memory
from tgi_cli.worker.sizing.profile_steps import (
    WARMUP_BLOCKS,
    first_steps,
    part_of_worst,
    threads_for,
    worst_steps,
)
from tgi_cli.worker.sizing.saved_profile import SavedProfile

log = logging.getLogger(__name__)


class SizingResult(NamedTuple):
    """What was found: figures, KV blocks, and the limits that hold with them."""

    measured: SavedProfile
    num_blocks: int
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class KVCacheSizing:
    """One worker's way to its size. All shards do the same, and come to the same.

    Attributes:
        config: as resolved.
        attention: gets a small cache.
        shard: this process's place.
        weight_bytes: of the model.
        run: runs a step to its end.
        measure_graphs: bytes that graphs take; None: there will be none.
    """

    config: EngineConfig
    attention: PagedAttention
    shard: Shard
    weight_bytes: int
    run: Callable[[Step], object]
    measure_graphs: Callable[[], int | None]

    def __call__(self) -> SizingResult:
        """Raises OutOfMemoryError: a step, or what was promised to clients, does not fit."""
        self.attention.allocate(WARMUP_BLOCKS)
        kept = self._kept()
        if kept is not None:
            with threads_for(self.weight_bytes, self.attention.device):
                for step in first_steps(self.config):
                    self.run(step)
            sized = self._if_it_fits(kept)
            if sized is not None:
                self._say("limits as `tgi warmup` measured them on %s; no worst step", kept.date)
                return sized
            self._say("there is less memory than on %s: measuring anew", kept.date)
        return self._sized(self._measure())

    def _kept(self) -> SavedProfile | None:
        """Figures of an earlier time, if every shard has them."""
        kept = (
            saved_profile.load(saved_profile.key_of(self.config))
            if self.config.measured_limits
            else None
        )
        return kept if self.shard.smallest(int(kept is not None)) else None

    def _if_it_fits(self, kept: SavedProfile) -> SizingResult | None:
        """None where less was left for requests than at that time."""
        try:
            sized = self._sized(kept)
        except OutOfMemoryError:  # the same on all shards
            return None
        return sized if sized.config.max_total_tokens >= kept.max_total_tokens else None

    def _measure(self) -> SavedProfile:
        """Run the worst steps that the limits allow."""
        config, device, shard = self.config, self.attention.device, self.shard
        meter = PeakMeter(device)
        free = available_memory(device) // self._sharers
        cacheable = shard.smallest(free // self.attention.block_bytes * config.block_size)
        part, began = part_of_worst(config), time.monotonic()
        with threads_for(self.weight_bytes, device):
            for step in worst_steps(config, cacheable):
                self.run(step)
        # On CUDA nearly all of it is what happens once: kernels are compiled and tuned.
        seconds = (time.monotonic() - began) * part if device.type == "cpu" else 0.0
        activations = meter.read() * part * self._sharers
        graphs = self.measure_graphs()
        return SavedProfile(
            activation_bytes=-shard.smallest(-activations - (graphs or 0)),
            graphs=graphs is not None,
            step_seconds=seconds,
            max_total_tokens=config.max_total_tokens,
        )

    def _sized(self, found: SavedProfile) -> SizingResult:
        config, device, shard = self.config, self.attention.device, self.shard
        block_bytes, sharers = self.attention.block_bytes, self._sharers
        release_unused_memory(device)
        available = available_memory(device) + WARMUP_BLOCKS * block_bytes * sharers
        budget = cache_budget(config, available, found.activation_bytes, total_memory(device))
        budget = shard.smallest(budget // sharers)
        num_blocks, effective = size_cache(config, budget, block_bytes)
        return SizingResult(found, num_blocks, effective)

    @property
    def _sharers(self) -> int:
        """Processes on a CPU share its memory, and each counts what all of them take."""
        return self.shard.size if self.attention.device.type == "cpu" else 1

    def _say(self, words: str, *values: object) -> None:
        if self.shard.rank == 0:
            log.info(words, *values)
