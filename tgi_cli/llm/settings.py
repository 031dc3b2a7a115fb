"""The settings of ``LLM()``'s engine as keyword arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import msgspec


class EngineSettings(TypedDict, total=False):
    """Settings of an engine: those of ``tgi serve``, with the same defaults, but for one.

    Attributes:
        dtype: ``float32``, ``bfloat16`` or ``float16``. Default: depends on the device.
        max_input_tokens: Longest prompt. Default: as the model and the memory allow.
        max_total_tokens: Most tokens of a request, the prompt included. Default: the same.
        max_batch_prefill_tokens: Prompt tokens computed in one step.
        max_prefill_delay: Milliseconds by which prompts may lengthen a step. Default: no limit.
        max_batch_total_tokens: Tokens in the KV cache. Default: as many as fit.
        max_batch_size: Most requests that run at once.
        batching: See :class:`tgi_cli.engine.config.Batching`.
        capacity_policy: See :class:`tgi_cli.engine.config.CapacityPolicy`.
        waiting_served_ratio: See :class:`tgi_cli.engine.config.SchedulerConfig`.
        max_waiting_tokens: See :class:`tgi_cli.engine.config.SchedulerConfig`.
        prefix_caching: Compute common prefixes of prompts once.
        kv_cache_dir: Folder in which KV blocks are kept, too, for later runs. Default: none.
        kv_cache_dir_size: Most bytes of its files. Default: 10 GiB.
        kv_offloading_size: Bytes of the host's memory for KV blocks that a GPU evicts.
        kv_cache_dtype: ``auto`` (as the weights), ``fp8_e4m3fn`` or ``fp8_e5m2``.
        quantize: How to quantize plain weights on loading, as ``int8``; see ``--quantize``.
        quantize_head: Quantize the output head to 8-bit integers.
        quantize_head_bits: Quantize the output head to 8 bits, or to 4 (nf4).
        quantize_activations: Round activations to 8 bits for products with integer weights.
            Default: where the CPU can.
        num_shard: Processes that share the model: a GPU each, or the cores of the CPU.
        pipeline_parallel_size: Stages of the model's layers, in ``num_shard`` processes each.
        speculate: Most draft tokens of a request in a step. Default: 7 on a CPU, 0 on a GPU.
        speculative_model: Weights that draft tokens, a folder or an id on the hub: a smaller model
            (best of the same vocabulary), or heads made for the model.
        max_loras: LoRA adapters that share a batch. Default: 4 if adapters are named, else 0.
        max_cpu_loras: LoRA adapters in the CPU's memory.
        max_lora_rank: Highest rank of a LoRA adapter.
    """

    dtype: str | None
    max_input_tokens: int | None
    max_total_tokens: int | None
    max_batch_prefill_tokens: int | None
    max_prefill_delay: int
    max_batch_total_tokens: int | None
    max_batch_size: int | None
    batching: str
    capacity_policy: str
    waiting_served_ratio: float | None
    max_waiting_tokens: int | None
    prefix_caching: bool
    kv_cache_dir: Path | None
    kv_cache_dir_size: int | None
    kv_offloading_size: int | None
    kv_cache_dtype: str
    quantize: str | None
    quantize_head: bool
    quantize_head_bits: int | None
    quantize_activations: bool | None
    num_shard: int | None
    pipeline_parallel_size: int
    speculate: int | None
    speculative_model: str | None
    max_loras: int | None
    max_cpu_loras: int | None
    max_lora_rank: int | None


def check_settings(settings: EngineSettings) -> EngineSettings:
    """Return the keyword arguments of ``LLM()`` with paths for texts that name folders.

    Raises:
        TypeError: one is unknown or has a wrong type.
    """
    if unknown := settings.keys() - EngineSettings.__annotations__:
        raise TypeError(f"LLM() got an unexpected argument {min(unknown)!r}")
    try:
        return msgspec.convert(settings, EngineSettings, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError as error:
        raise TypeError(f"LLM(): {error}") from error
