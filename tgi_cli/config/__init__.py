"""Configuration: the user's settings (ServeConfig) become a resolved EngineConfig.

Neither is ever mutated; what is found out later, such as the number of KV blocks, is a return
value.
"""

from tgi_cli.config.resolve import (
    BLOCK_SIZE,
    DEFAULT_CPU_PREFILL_TOKENS,
    DEFAULT_PREFILL_TOKENS,
    resolve,
)
from tgi_cli.config.schema import DeviceFacts, EngineConfig, ModelFacts, ServeConfig

__all__ = [
    "BLOCK_SIZE",
    "DEFAULT_CPU_PREFILL_TOKENS",
    "DEFAULT_PREFILL_TOKENS",
    "DeviceFacts",
    "EngineConfig",
    "ModelFacts",
    "ServeConfig",
    "resolve",
]
