"""Resolves the settings of speculative decoding."""

from __future__ import annotations

from typing import Any

from tgi_cli.config.schema import DeviceFacts, ServeConfig
from tgi_cli.config.speculation import DEFAULT_CPU_DRAFTS, SpeculativeConfig
from tgi_cli.errors import ConfigError


def resolve_drafts(serve: ServeConfig, device: DeviceFacts) -> dict[str, Any]:
    """The fields of :class:`tgi_cli.config.EngineConfig` for drafts.

    Args:
        serve: settings with valid values.
        device: the device that serves.

    Raises:
        ConfigError: settings that contradict each other.
    """
    drafts = SpeculativeConfig.read(serve.speculative_config or "{}")
    most = _most(serve, drafts, device)
    weights = serve.speculative_model or drafts.model
    stated = {
        "speculate": serve.speculate is not None or drafts.num_speculative_tokens is not None,
        "speculative_config": serve.speculative_config is not None,
        "speculative_model": serve.speculative_model is not None,
    }
    return {
        "explicit_limits": tuple(name for name, given in stated.items() if given),
        "speculate": most,
        "drafts_from_answers": serve.prefix_caching and drafts.method != "ngram",
        "speculative_model": weights if most else None,
        "speculative_method": drafts.method if most else None,
    }


def _most(serve: ServeConfig, drafts: SpeculativeConfig, device: DeviceFacts) -> int:
    """The most drafts of a sequence in one step."""
    said, also = serve.speculate, drafts.num_speculative_tokens
    if said is not None and also is not None and said != also:
        raise ConfigError(
            f"--speculate {said} and num_speculative_tokens {also} of --speculative-config "
            "contradict each other",
            "leave one of them off",
        )
    most = also if said is None else said
    if most is not None:
        return most
    if serve.speculative_config is not None or serve.speculative_model is not None:
        return DEFAULT_CPU_DRAFTS
    # On a GPU, looking drafts up would delay the launch of every step.
    return DEFAULT_CPU_DRAFTS if device.kind == "cpu" else 0
