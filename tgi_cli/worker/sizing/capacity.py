"""How many KV blocks there are, and whether what was promised fits into them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tgi_cli.config import EngineConfig
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.process.units import format_memory

CPU_SHARE = 0.5
"""Of the memory that is free after the activations, what the cache takes by itself: the rest is
for other programs and the file cache. Pages are taken from the system as they are written."""

CPU_LIMIT = 0.9
"""The same, where the user says how large the cache has to be."""

CUDA_MARGIN = 0.05
"""Of the device's memory, left free for what torch's allocator does not see (libraries' own
workspaces, other processes' contexts) and for its fragmentation."""

PREFIX_ROOM = 0.25
"""On a CPU, cache beyond what all rows can use at once, kept for the prefixes of ended ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What warm-up found. Sizes in bytes.

    Attributes:
        config: the engine's configuration with the limits that hold: ``max_total_tokens`` and
            ``max_input_tokens`` are lower than resolved where the user left them open and
            memory is short.
        num_blocks: KV blocks of ``config.block_size`` tokens.
        kv_window: positions that a token sees, if every layer has a sliding window.
        cache_bytes: of all of them.
        weight_bytes: of the model.
        activation_bytes: upper bound of what a step takes beside them.
        load_seconds: from reading the configuration to weights in place.
        warmup_seconds: spent finding this out.
        step_seconds: what the worst step may take on a CPU, estimated; 0: not known.
        graphs: whether decode steps are CUDA graphs.
    """

    config: EngineConfig
    num_blocks: int
    cache_bytes: int
    weight_bytes: int
    activation_bytes: int
    load_seconds: float
    warmup_seconds: float
    kv_window: int | None = None
    step_seconds: float = 0.0
    graphs: bool = False

    @property
    def max_batch_total_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.config.block_size


def cache_budget(config: EngineConfig, available: int, activations: int, total_memory: int) -> int:
    """Bytes that the KV cache may take.

    Args:
        config: says the device, and whether the user asked for a size.
        available: bytes that are free with the weights in place and no step running.
        activations: bytes that a step needs.
        total_memory: of the device.
    """
    if config.device == "cuda":
        kept_free = max(CUDA_MARGIN, 1 - config.cuda_memory_fraction)
        return max(0, available - activations - int(total_memory * kept_free))
    share = CPU_SHARE if config.max_batch_total_tokens is None else CPU_LIMIT
    return max(0, int((available - activations) * share))


def size_cache(config: EngineConfig, budget: int, block_bytes: int) -> tuple[int, EngineConfig]:
    """The number of KV blocks, and the configuration that holds with them.

    Args:
        config: as resolved; limits that are not explicit may be lowered.
        budget: bytes for the cache.
        block_bytes: of one block over all layers.

    Raises:
        OutOfMemoryError: what the user asked for does not fit, with the numbers.
    """
    affordable = budget // block_bytes
    size = config.block_size
    if config.max_batch_total_tokens is not None:
        asked = -(-config.max_batch_total_tokens // size)
        if asked > affordable:
            raise OutOfMemoryError(
                f"a KV cache of --max-batch-total-tokens {config.max_batch_total_tokens} takes "
                f"{format_memory(asked * block_bytes)}, and {format_memory(budget)} are free for "
                "it",
                f"ask for at most {affordable * size} tokens, or leave it open"
                if affordable
                else "free memory, lower --max-batch-prefill-tokens, or use a smaller model",
            )
        return asked, config
    per_sequence = -(-config.max_total_tokens // size)
    if affordable < per_sequence:
        return affordable, _lower_limits(config, affordable, budget, block_bytes)
    if config.device == "cpu":
        useful = int(config.max_batch_size * per_sequence * (1 + PREFIX_ROOM))
        return min(affordable, useful), config
    return affordable, config


def _lower_limits(
    config: EngineConfig, affordable: int, budget: int, block_bytes: int
) -> EngineConfig:
    """Limits of one sequence that fits ``affordable`` blocks, if the user left them open."""
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
