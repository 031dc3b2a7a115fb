"""Takes the memory of ``--kv-offloading-size``."""

from __future__ import annotations

import logging

import torch

from tgi_cli.attention import PagedAttention
from tgi_cli.attention.host_cache import HostCache
from tgi_cli.config import EngineConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import ConfigError, OutOfMemoryError
from tgi_cli.process.units import format_memory

log = logging.getLogger(__name__)


def open_host_cache(
    config: EngineConfig, attention: PagedAttention, shard: Shard
) -> HostCache | None:
    """Slots of the host's memory for blocks that are evicted; None without the setting.

    Args:
        config: as resolved.
        attention: has its blocks.
        shard: this process's share of the model; all have equally many slots.

    Raises:
        ConfigError: not even one block fits.
        OutOfMemoryError: the host, or the device for blocks on their way, lacks the memory.
    """
    size = config.kv_offloading_size
    if not size:
        return None
    count = shard.smallest(size // shard.size // attention.block_bytes)
    if not count:
        raise ConfigError(
            f"--kv-offloading-size {format_memory(size)} holds no block of the KV cache",
            "give more, or leave it off",
        )
    try:
        cache = HostCache(attention, count)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "--kv-offloading-size: the device has no memory left for blocks on their way",
            "lower --cuda-memory-fraction or --max-batch-total-tokens",
        ) from error
    except RuntimeError as error:
        own = format_memory(count * attention.block_bytes)
        raise OutOfMemoryError(
            f"--kv-offloading-size: the host does not give {own} of pinned memory ({error})",
            "give less",
        ) from error
    if shard.leads:
        log.info("%d tokens of KV blocks fit into the host's memory", count * config.block_size)
    return cache
