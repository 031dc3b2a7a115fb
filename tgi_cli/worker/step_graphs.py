"""All CUDA graphs of a worker: measured, captured and verified at warm-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tgi_cli.attention import PagedAttention, StateCache
from tgi_cli.config import EngineConfig
from tgi_cli.device import available_memory
from tgi_cli.device.distributed import Shard
from tgi_cli.worker.cuda_graphs import DecodeGraphs, graph_sizes
from tgi_cli.worker.graph_capture import GraphSet
from tgi_cli.worker.mixed_graphs import MixedGraphs, MixedSize, mixed_sizes
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing.profile_steps import mixed_replays_agree, replays_agree
from tgi_cli.worker.sizing.sum_choice import choose_sums

log = logging.getLogger(__name__)

_WRONG = "they compute something else than the model"


class StepGraphs:
    """The graphs of one worker. Steps that cannot be captured are launched; the log has the reason.

    All shards use graphs for the same steps, since they run the same operations together.

    Args:
        runner: uses them.
        shard: this process's share of the model.
        attention: of the model, on its device and in its dtype.
        decodes: graphs of decode steps.
        mixed: graphs of steps with prompts; None if there are to be none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        shard: Shard,
        attention: PagedAttention,
        decodes: DecodeGraphs,
        mixed: MixedGraphs | None = None,
    ) -> None:
        self._runner = runner
        self._shard = shard
        self._device = attention.device
        self._dtype = attention.dtype
        self._decodes: DecodeGraphs | None = decodes
        self._mixed = mixed
        self._measured = 0
        self._sums_chosen = shard.size == 1 or attention.device.type != "cuda"

    def _choose_sums(self) -> None:
        """Before the first capture: graphs hold the sums over shards."""
        if not self._sums_chosen:
            self._sums_chosen = True
            choose_sums(self._shard, self._dtype)

    def measure(self) -> int | None:
        """Bytes that graphs will take, or None if none can be captured."""
        self._choose_sums()
        if self._decodes is None or not self._try(self._decodes.measure):
            return None
        size = self._measured
        if self._mixed is not None and self._try(self._mixed.measure, mixed=True):
            size += self._measured
        return size

    def capture(
        self, config: EngineConfig, num_blocks: int, states: StateCache | None = None
    ) -> bool:
        """Record the graphs over the cache, compare them with eager steps, and use them.

        Args:
            config: with the limits that hold: fewer sequences may run than were expected.
            num_blocks: KV blocks of the cache.
            states: states of the model.

        Returns:
            Whether there are any.
        """
        decodes, began = self._decodes, time.monotonic()
        if decodes is None:
            return False
        self._choose_sums()
        before = available_memory(self._device)
        decodes.resize(graph_sizes(config.max_batch_size, config.cuda_graphs))
        if not self._try(decodes.capture):
            return False
        agree = replays_agree(self._runner, decodes, config, num_blocks, states)
        if self._drop_if("" if agree else _WRONG):
            return False
        self._runner.graphs = decodes
        mixed = self._mixed
        if mixed is not None:
            mixed.resize(mixed_sizes_of(config))
            if self._try(mixed.capture, mixed=True):
                agree = mixed_replays_agree(self._runner, mixed, config, num_blocks)
                self._drop_if("" if agree else _WRONG, mixed=True)
            self._runner.mixed_graphs = self._mixed
        if self._shard.leads:
            log.info(
                "CUDA graphs of %d sizes up to %d rows%s: %.1f MiB, captured in %.1f s",
                len(decodes.sizes),
                decodes.largest,
                f", and {len(mixed.captured)} of steps with prompts"
                if mixed is not None and self._mixed is not None
                else "",
                max(0, before - available_memory(self._device)) / 2**20,
                time.monotonic() - began,
            )
        return True

    def drop(self, cause: str) -> None:
        """Use no graphs, for a cause that all shards know."""
        if self._decodes is not None:
            self._drop(cause)

    def _try(self, capture: Callable[[], Any], mixed: bool = False) -> bool:
        """Whether graphs can be measured or captured, on every shard."""
        problem = ""
        try:
            self._measured = capture() or 0
        except Exception as error:  # a model's code, a kernel, the device: then steps run launched
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return not self._drop_if(problem, mixed)

    def _drop_if(self, problem: str, mixed: bool = False) -> bool:
        """Drop graphs, of decodes and so all of them or only mixed ones, if any shard has to."""
        if self._shard.smallest(int(not problem)):
            return False
        self._drop(problem or "another shard has none", mixed)
        return True

    def _drop(self, cause: str, mixed: bool = False) -> None:
        dropped: tuple[GraphSet[Any] | None, ...] = (self._mixed,)
        if mixed:  # as is usual for some kinds of attention
            log.info("steps with prompts run without CUDA graphs: %s", cause)
        else:
            log.warning("decode steps run without CUDA graphs, slower: %s", cause)
            dropped = (self._decodes, self._mixed)
            self._decodes = None
        self._mixed = None
        for graphs in dropped:
            if graphs is not None:
                graphs.drop()


def mixed_sizes_of(config: EngineConfig) -> list[MixedSize]:
    """The sizes of graphs of steps with prompts, within a configuration's limits."""
    return mixed_sizes(config.max_batch_size, config.max_batch_prefill_tokens)
