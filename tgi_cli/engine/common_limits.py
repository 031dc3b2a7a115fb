"""Limits of requests that hold for each of several engines with the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tgi_cli.engine.messages import EngineInfo

_SMALLEST = (
    *("max_input_tokens", "max_total_tokens", "max_batch_prefill_tokens"),
    *("max_batch_total_tokens", "max_batch_size", "speculate", "max_image_rows"),
    *("grammar", "vision"),
)
_LARGEST = ("step_seconds", "load_seconds")


def common_limits(infos: Sequence[EngineInfo]) -> EngineInfo:
    """The first info with the limits that hold for all, and the longest times."""
    least = {name: min(getattr(info, name) for info in infos) for name in _SMALLEST}
    most = {name: max(getattr(info, name) for info in infos) for name in _LARGEST}
    return replace(infos[0], **least, **most)
