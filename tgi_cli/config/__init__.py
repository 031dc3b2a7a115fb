"""From the user's words to a specified engine: ServeConfig -> resolve() -> EngineConfig.

Nothing mutates either; what is found out later (the number of KV blocks) is a return value of
whoever finds it out.
"""

from tgi_cli.config.resolve import resolve
from tgi_cli.config.schema import (
    ATTENTIONS,
    BATCHINGS,
    BLOCK_SIZE,
    CAPACITY_POLICIES,
    DEFAULT_CPU_LORAS,
    DEFAULT_CPU_PREFILL_TOKENS,
    DEFAULT_LORA_RANK,
    DEFAULT_LORAS,
    DEFAULT_PREFILL_TOKENS,
    IN_CHECKPOINTS,
    KV_CACHE_DTYPES,
    LEAST_LORA_RANK,
    LOAD_FORMATS,
    MAX_WAITING_TOKENS,
    MOST_SEQUENCES,
    ON_THE_FLY,
    WAITING_SERVED_RATIO,
    DeviceFacts,
    EngineConfig,
    ModelFacts,
    ServeConfig,
)

__all__ = [
    "ATTENTIONS",
    "BATCHINGS",
    "BLOCK_SIZE",
    "CAPACITY_POLICIES",
    "DEFAULT_CPU_LORAS",
    "DEFAULT_CPU_PREFILL_TOKENS",
    "DEFAULT_LORAS",
    "DEFAULT_LORA_RANK",
    "DEFAULT_PREFILL_TOKENS",
    "IN_CHECKPOINTS",
    "KV_CACHE_DTYPES",
    "LEAST_LORA_RANK",
    "LOAD_FORMATS",
    "MAX_WAITING_TOKENS",
    "MOST_SEQUENCES",
    "ON_THE_FLY",
    "WAITING_SERVED_RATIO",
    "DeviceFacts",
    "EngineConfig",
    "ModelFacts",
    "ServeConfig",
    "resolve",
]
