"""Resolves pipeline parallelism: how many processes it takes, and what it is not combined with."""

from __future__ import annotations

from typing import Any

from tgi_cli.config.schema import DeviceFacts, ServeConfig
from tgi_cli.errors import ConfigError

NOT_IN_STAGES: dict[str, Any] = {
    "speculate": 0,
    "drafts_from_answers": False,
    "speculative_model": None,
    "speculative_method": None,
}
"""Fields of an EngineConfig that have these values where there are several stages: a draft would
wait for the token before it, and that for all stages."""


def check_pipeline(serve: ServeConfig) -> None:
    """Refuse settings that are not combined with several pipeline stages.

    Raises:
        ConfigError: names both flags.
    """
    stages = serve.pipeline_parallel_size
    if stages == 1:
        return
    refused = {
        f"--speculate {serve.speculate}": bool(serve.speculate),
        "--speculative-config": serve.speculative_config is not None,
        "--speculative-model": serve.speculative_model is not None,
        "--lora-adapters": bool(serve.lora_adapters),
        f"--max-loras {serve.max_loras}": bool(serve.max_loras),
        "--cuda-graphs": bool(serve.cuda_graphs) and 0 not in (serve.cuda_graphs or ()),
        "--kv-cache-dir": serve.kv_cache_dir is not None,
        "--kv-offloading-size": serve.kv_offloading_size is not None,
        "--cross-check": serve.cross_check,
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(
                f"{flag} is not supported with --pipeline-parallel-size {stages}",
                "leave one of them off",
            )


def check_devices(
    stages: int, num_shard: int, nodes: int, device: DeviceFacts, process_bytes: int
) -> None:
    """Check that there is a device, or memory, for every process of the model on this node.

    Args:
        stages: of the pipeline.
        num_shard: processes of each stage.
        nodes: that the processes are divided among.
        device: that serves, and of which the other nodes have as many.
        process_bytes: memory of a process without weights, on a CPU.

    Raises:
        ConfigError: there is not.
    """
    flags = f"--pipeline-parallel-size {stages}"
    processes = stages * num_shard // nodes
    if num_shard > 1:
        flags += f" with --num-shard {num_shard}"
    each = ""
    if nodes > 1:
        flags += f" on --nnodes {nodes}"
        each = " on each"
    if device.kind == "cuda" and processes > device.count:
        raise ConfigError(
            f"{flags} takes {processes} GPUs{each}, and there are {device.count}",
            "lower one of them, or divide the model among more nodes with --nnodes",
        )
    if device.kind == "cpu" and processes * process_bytes > device.total_memory:
        raise ConfigError(
            f"{flags}: this many processes need more memory than this machine has "
            f"({device.total_memory / 2**30:.1f} GiB)",
            "lower one of them",
        )
