"""Configuration: the user's settings (ServeConfig) become a resolved EngineConfig.

Neither is ever mutated; later findings, such as the number of KV blocks, are return values.
"""

from tgi_cli.config.checks import check_input, check_settings
from tgi_cli.config.resolve import BLOCK_SIZE, resolve
from tgi_cli.config.schema import (
    DecoderFacts,
    DeviceFacts,
    EncoderLimits,
    EngineConfig,
    ModelFacts,
    ServeConfig,
)
from tgi_cli.config.settings.engine import DEFAULT_CPU_PREFILL_TOKENS, DEFAULT_PREFILL_TOKENS

__all__ = [
    "BLOCK_SIZE",
    "DEFAULT_CPU_PREFILL_TOKENS",
    "DEFAULT_PREFILL_TOKENS",
    "DecoderFacts",
    "DeviceFacts",
    "EncoderLimits",
    "EngineConfig",
    "ModelFacts",
    "ServeConfig",
    "check_input",
    "check_settings",
    "resolve",
]
