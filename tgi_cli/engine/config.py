"""Limits of a step and of a request, and the policies by which steps are scheduled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Protocol

from tgi_cli.config import DecoderFacts, EncoderLimits, EngineConfig
from tgi_cli.config.settings.engine import MAX_WAITING_TOKENS, WAITING_SERVED_RATIO
from tgi_cli.config.settings.model import DEFAULT_CPU_LORAS


class Batching(StrEnum):
    """When waiting requests may join the running batch."""

    FUSED = "fused"
    """At every step; prefill chunks and decodes share it."""
    INFLIGHT = "inflight"
    """Between steps, by TGI's two parameters; prefills run alone and whole."""
    STATIC = "static"
    """Only after the batch has finished; a baseline for comparisons."""


class CapacityPolicy(StrEnum):
    """What an admitted sequence is guaranteed (TensorRT-LLM's names)."""

    MAX_UTILIZATION = "max_utilization"
    """Blocks as it grows; the newest sequence is preempted when they run out."""
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    """All the blocks that it may ever need; it is never preempted."""


class WorkerCapacity(Protocol):
    """What a scheduler has to know of a warm-up's result; see its parameters by these names."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_window(self) -> int | None: ...
    @property
    def num_state_slots(self) -> int: ...
    @property
    def encoder(self) -> EncoderLimits | None: ...
    @property
    def whole_prompts(self) -> bool: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def num_host_blocks(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the engine; counts are tokens unless named otherwise.

    Attributes:
        max_total_tokens: prompt and generated tokens of one request, with the token that a decoder
            starts with.
        max_batch_prefill_tokens: prompt tokens computed in one step.
        max_batch_size: sequences that run at once.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool.
        num_host_blocks: KV blocks that the host's memory holds besides; 0 for none.
        num_state_slots: slots for recurrent states, one per row at least; 0 if the model has none.
        window: positions that a token attends to, if every layer has a sliding window, or None for
            all. Blocks outside of it are released.
        waiting_served_ratio: with ``inflight``, a prefill may interrupt a batch when the waiting
            requests that fit are at least this share of the running ones.
        max_waiting_tokens: with ``inflight``, decode steps after which a prefill runs regardless.
        max_loras: LoRA adapters that one step may use: slots on the device.
        max_cpu_loras: LoRA adapters cached on the host.
        max_queued_requests, max_queued_tokens: upper bounds of waiting requests and of their
            prompt tokens, beyond which new requests are refused, or None for no bound.
        decoder: how an encoder-decoder model answers, or None for other models.
        max_prefill_delay: milliseconds by which prompts may lengthen a step beside decodes, or as
            long as these take if that is more; 0 for no limit.
        token_seconds: time to compute a prompt's token, as warm-up has measured it; 0 if unknown.
        encoder: of images; None if the model takes none.
        whole_prompts: whether all tokens of a prompt see each other (PaliGemma): then it is
            computed in one chunk, and its blocks are reused by equal prompts.
        pipeline_parallel_size: stages of the model, each of which may have a step of its own.
    """

    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    num_state_slots: int = 0
    prefix_caching: bool = True
    window: int | None = None
    batching: Batching = Batching.FUSED
    capacity_policy: CapacityPolicy = CapacityPolicy.MAX_UTILIZATION
    waiting_served_ratio: float = WAITING_SERVED_RATIO
    max_waiting_tokens: int = MAX_WAITING_TOKENS
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_loras: int = 0
    max_cpu_loras: int = DEFAULT_CPU_LORAS
    decoder: DecoderFacts | None = None
    max_prefill_delay: int = 0
    token_seconds: float = 0.0
    encoder: EncoderLimits | None = None
    whole_prompts: bool = False
    pipeline_parallel_size: int = 1

    @property
    def max_input_tokens(self) -> int:
        """Prompt tokens of one request, which leave at least one token to be generated."""
        return self.max_total_tokens - 1

    def prefill_budget(self, num_decodes: int) -> int:
        """Prompt tokens that a step may compute beside decodes.

        Many decodes must not starve prefills: a quarter of the budget is always theirs.
        """
        most = self.max_batch_prefill_tokens
        return max(most - num_decodes, max(1, most // 4))

    @classmethod
    def after_warmup(cls, capacity: WorkerCapacity) -> SchedulerConfig:
        """The configuration of a scheduler over a worker that is warmed up."""
        return cls.of(
            capacity.config,
            capacity.num_blocks,
            capacity.kv_window,
            capacity.num_state_slots,
            capacity.encoder,
            capacity.whole_prompts,
            capacity.step_seconds,
            capacity.num_host_blocks,
        )

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        num_blocks: int,
        window: int | None = None,
        num_state_slots: int = 0,
        encoder: EncoderLimits | None = None,
        whole_prompts: bool = False,
        step_seconds: float = 0.0,
        num_host_blocks: int = 0,
    ) -> SchedulerConfig:
        """The scheduler's part of a resolved configuration, with what warm-up found.

        ``step_seconds`` is its estimate for the largest step, 0 if unknown.
        """
        found: dict[str, Any] = {
            "num_blocks": num_blocks,
            "num_host_blocks": num_host_blocks,
            "window": window,
            "num_state_slots": num_state_slots,
            "encoder": encoder,
            "whole_prompts": whole_prompts,
            "token_seconds": step_seconds / config.max_batch_prefill_tokens,
        }
        values: dict[str, Any] = {
            field.name: getattr(config, field.name)
            for field in fields(cls)
            if field.name not in found
        }
        values["max_total_tokens"] = config.max_sequence_tokens
        values["batching"] = Batching(config.batching)
        values["capacity_policy"] = CapacityPolicy(config.capacity_policy)
        return cls(**values, **found)
